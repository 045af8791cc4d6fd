import math

import pytest
import torch
from torch import Tensor

from torchrec_tt.quality import svd_error
from torchrec_tt.tt import row_blocks, unfolding
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.ranks import useful_ranks
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import TTApproximation, grow_ranks, round_cores, tt_svd

pytestmark = pytest.mark.filterwarnings("ignore:tt_ranks=.* larger than the dense one")


def _shape(
    num_embeddings: int,
    row_factors: tuple[int, ...],
    col_factors: tuple[int, ...],
    tt_ranks: tuple[int, ...],
) -> TTShape:
    return TTShape(
        num_embeddings=num_embeddings,
        embedding_dim=math.prod(col_factors),
        row_factors=row_factors,
        col_factors=col_factors,
        tt_ranks=tt_ranks,
    )


def _cores(shape: TTShape, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator) for s in shape.core_shapes]


def _distance(found: TTApproximation, table: Tensor) -> float:
    made = dense([core.double() for core in found.cores], shape=found.shape)
    return float((made - table).norm() / table.norm())


def _plain_tt_svd_error(table: Tensor, shape: TTShape) -> float:
    """Textbook TT-SVD of the table with zeros in the padded rows; its error over the real ones."""
    padded = torch.zeros(shape.num_rows_padded, shape.embedding_dim, dtype=torch.float64)
    padded[: len(table)] = table
    d = shape.num_cores
    digits = padded.view(*shape.row_factors, *shape.col_factors)
    rest = digits.permute([axis for k in range(d) for axis in (k, d + k)]).reshape(-1)
    result = torch.ones(1, 1, dtype=torch.float64)
    r_in = 1
    for m, n, rank in zip(shape.row_factors, shape.col_factors, shape.tt_ranks, strict=False):
        u, s, v = torch.linalg.svd(rest.reshape(r_in * m * n, -1), full_matrices=False)
        result = (result @ u[:, :rank].reshape(r_in, -1)).view(-1, rank)
        rest = s[:rank, None] * v[:rank]
        r_in = rank
    made = (result @ rest.reshape(r_in, -1)).view(
        [s for p in zip(shape.row_factors, shape.col_factors, strict=True) for s in p]
    )
    made = made.permute([2 * k for k in range(d)] + [2 * k + 1 for k in range(d)])
    made = made.reshape(shape.num_rows_padded, -1)[: len(table)]
    return float((made - table).norm() / table.norm())


SHAPES = [
    _shape(1000, (25, 40), (2, 4), (7,)),
    _shape(991, (25, 40), (2, 4), (7,)),
    _shape(120, (4, 5, 6), (2, 2, 2), (3, 4)),
    _shape(107, (4, 5, 6), (2, 2, 2), (3, 4)),
    _shape(2000, (10, 10, 20), (1, 2, 4), (5, 9)),
    _shape(1613, (10, 10, 20), (1, 2, 4), (5, 9)),
    _shape(1201, (5, 6, 7, 6), (2, 2, 1, 2), (4, 6, 5)),
]


def _decaying(shape: TTShape) -> Tensor:
    """Rows and columns that are smooth, with noise."""
    generator = torch.Generator().manual_seed(1)
    i = torch.arange(shape.num_embeddings, dtype=torch.float64)[:, None] / shape.num_embeddings
    j = torch.arange(1, shape.embedding_dim + 1, dtype=torch.float64)
    noise = torch.randn(shape.num_embeddings, shape.embedding_dim, generator=generator)
    return torch.sin(7 * i * j + j * j) + 0.3 * noise


# U61
def test_an_exact_tt_table_is_found_again() -> None:
    shape = _shape(120, (4, 5, 6), (2, 2, 2), (4, 4))
    table = dense(_cores(shape), shape=shape)
    found = tt_svd(table, tt_ranks=[4, 4], row_factors=[4, 5, 6])
    assert found.relative_error < 1e-5
    torch.testing.assert_close(dense(found.cores, shape=found.shape), table)


# U61
def test_a_lower_rank_loses_what_the_bound_says() -> None:
    shape = _shape(120, (4, 5, 6), (2, 2, 2), (4, 4))
    table = dense(_cores(shape), shape=shape).double()
    lower = _shape(120, (4, 5, 6), (2, 2, 2), (2, 2))
    found = tt_svd(table, tt_ranks=[2, 2], row_factors=[4, 5, 6])
    assert svd_error(table, lower) / math.sqrt(2) < found.relative_error < svd_error(table, lower)
    # With one truncated unfolding the bound is the best there is, and reached.
    one = tt_svd(table, tt_ranks=[2], row_factors=[20, 6], col_factors=[4, 2])
    best = svd_error(table, _shape(120, (20, 6), (4, 2), (2,)))
    assert one.relative_error == pytest.approx(best, rel=1e-5)


# U61
@pytest.mark.parametrize("num_embeddings", [101, 103, 107, 115, 119, 124])
def test_padded_rows_do_not_count(num_embeddings: int) -> None:
    shape = _shape(num_embeddings, (5, 5, 5), (2, 2, 2), (4, 4))
    table = dense(_cores(shape), shape=shape)
    found = tt_svd(table, tt_ranks=[4, 4], row_factors=[5, 5, 5])
    assert found.relative_error < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_embeddings}-{s.row_factors}")
def test_the_error_is_that_of_the_cores_and_near_the_plain_algorithm(
    shape: TTShape, dtype: torch.dtype
) -> None:
    table = _decaying(shape)
    found = tt_svd(
        table,
        tt_ranks=shape.tt_ranks,
        row_factors=shape.row_factors,
        col_factors=shape.col_factors,
        dtype=dtype,
    )
    assert found.shape == shape
    assert all(core.dtype == dtype for core in found.cores)
    assert found.relative_error == pytest.approx(_distance(found, table), rel=1e-6)
    if dtype != torch.bfloat16:
        assert found.relative_error < 1.01 * _plain_tt_svd_error(table, shape)


@pytest.mark.parametrize("way", ["gram", "sketch"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_embeddings}-{s.row_factors}")
def test_streamed_unfoldings_give_the_error_of_kept_ones(
    shape: TTShape, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _decaying(shape)
    kept = tt_svd(
        table, tt_ranks=shape.tt_ranks, row_factors=shape.row_factors, col_factors=shape.col_factors
    )
    monkeypatch.setattr(unfolding, "MAX_KEPT", 0)
    monkeypatch.setattr(unfolding, "BLOCK_BYTES", 1)
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(unfolding, "MAX_SVD", 0)
    monkeypatch.setattr(unfolding, "MIN_SKETCH", 1)
    monkeypatch.setattr(unfolding, "MAX_GRAM_SIDE", 0 if way == "sketch" else 2048)
    found = tt_svd(
        table, tt_ranks=shape.tt_ranks, row_factors=shape.row_factors, col_factors=shape.col_factors
    )
    assert found.relative_error == pytest.approx(kept.relative_error, rel=0.005)
    assert found.relative_error < 1.01 * _plain_tt_svd_error(table, shape)


@pytest.mark.parametrize("way", ["kept", "gram", "sketch"])
@pytest.mark.parametrize("max_error", [0.3, 0.05, 1e-4])
def test_an_error_gives_the_ranks(
    max_error: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "kept":
        monkeypatch.setattr(unfolding, "MAX_KEPT", 0)
        monkeypatch.setattr(unfolding, "MIN_SKETCH", 2)
        monkeypatch.setattr(unfolding, "MAX_GRAM_SIDE", 0 if way == "sketch" else 2048)
    shape = SHAPES[5]
    table = _decaying(shape)
    found = tt_svd(
        table, max_error=max_error, row_factors=shape.row_factors, col_factors=shape.col_factors
    )
    assert found.relative_error <= max_error
    lower = [max(1, rank - 1) for rank in found.shape.tt_ranks]
    less = tt_svd(
        table, tt_ranks=lower, row_factors=shape.row_factors, col_factors=shape.col_factors
    )
    assert less.relative_error > max_error / math.sqrt(2)


@pytest.mark.parametrize(("num_embeddings", "max_error"), [(61, 0.5), (62, 0.5)])
def test_rows_that_are_missing_cost_no_rank(num_embeddings: int, max_error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(num_embeddings, 8, generator=generator) * torch.logspace(0, -2, 8)
    factors = {"row_factors": [5, 4, 6], "col_factors": [2, 2, 2]}
    found = tt_svd(table, max_error=max_error, **factors)
    assert found.relative_error <= max_error
    first, second = found.shape.tt_ranks
    less = tt_svd(table, tt_ranks=[first - 1, second], **factors)
    assert less.relative_error > max_error


@pytest.mark.parametrize("num_embeddings", [125, 117, 101])
def test_rounding_gives_nearly_the_error_of_tt_svd(num_embeddings: int) -> None:
    shape = _shape(num_embeddings, (5, 5, 5), (2, 2, 2), (4, 4))
    cores = _cores(shape)
    table = dense(cores, shape=shape).double()
    found = round_cores(cores, shape=shape, tt_ranks=[2, 3])
    assert found.shape.tt_ranks == (2, 3)
    assert found.relative_error == pytest.approx(_distance(found, table), rel=1e-5)
    bound = svd_error(table, _shape(num_embeddings, (5, 5, 5), (2, 2, 2), (2, 3)))
    assert found.relative_error < (1.0 if num_embeddings == 125 else 1.2) * bound


def test_rounding_within_an_error_takes_the_ranks_it_needs() -> None:
    shape = _shape(120, (4, 5, 6), (2, 2, 2), (4, 4))
    cores = _cores(shape)
    grown_shape, grown = grow_ranks(cores, shape=shape, tt_ranks=[7, 6])
    assert round_cores(grown, shape=grown_shape, max_error=1e-5).shape.tt_ranks == (4, 4)
    found = round_cores(cores, shape=shape, max_error=0.6)
    assert found.relative_error <= 0.6
    assert found.shape.num_parameters < shape.num_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_keeps_the_dtype_and_a_full_rank_the_table(dtype: torch.dtype) -> None:
    shape = _shape(1201, (5, 6, 7, 6), (2, 2, 1, 2), (4, 6, 5))
    cores = [core.to(dtype) for core in _cores(shape)]
    found = round_cores(cores, shape=shape, tt_ranks=shape.tt_ranks)
    assert all(core.dtype == dtype for core in found.cores)
    assert found.relative_error < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_embeddings}-{s.row_factors}")
def test_growing_keeps_the_table_and_every_new_path_learns(shape: TTShape) -> None:
    cores = _cores(shape)
    ranks = [rank + 2 for rank in shape.tt_ranks]
    grown, result = grow_ranks(cores, shape=shape, tt_ranks=ranks)
    assert grown.tt_ranks == tuple(ranks)
    torch.testing.assert_close(dense(result, shape=grown), dense(cores, shape=shape))
    leaves = [core.double().requires_grad_() for core in result]
    for _ in range(2):
        loss = dense(leaves, shape=grown).square().sum()
        grads = torch.autograd.grad(loss, leaves)
        leaves = [
            (x - 1e-6 * g).detach().requires_grad_() for x, g in zip(leaves, grads, strict=True)
        ]
    for leaf, m, (r_in, n, r_out) in zip(
        leaves, grown.row_factors, grown.slice_shapes, strict=True
    ):
        assert leaf.view(m, r_in, n, r_out).abs().sum((0, 2)).count_nonzero() == r_in * r_out


class _MadeRows:
    """Rows that are made when they are asked for: smooth ones with noise."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self.num_rows = num_rows
        self.dim = dim

    def rows(self, begin: int, end: int) -> Tensor:
        i = torch.arange(begin, end)[:, None] / self.num_rows
        j = torch.arange(1, self.dim + 1)
        return torch.sin(5 * i * j + j * j) + 0.3 * torch.sin(1e4 * (i + 1) * j)


def test_blocks_of_rows_and_a_tensor_give_the_same_cores() -> None:
    blocks = _MadeRows(1613, 8)
    found = tt_svd(blocks, tt_ranks=[5, 9])
    same = tt_svd(blocks.rows(0, 1613), tt_ranks=[5, 9])
    assert found.relative_error == pytest.approx(same.relative_error, rel=1e-6)
    torch.testing.assert_close(
        dense(found.cores, shape=found.shape), dense(same.cores, shape=same.shape)
    )


def test_ranks_of_no_use_are_clipped_with_one_warning() -> None:
    table = _MadeRows(120, 8).rows(0, 120)
    with pytest.warns(UserWarning, match=r"tt_ranks=\(9, 50\) are more than .* \(8, 12\)") as seen:
        found = tt_svd(table, tt_ranks=[9, 50], row_factors=[4, 5, 6])
    assert len([w for w in seen if "are more than" in str(w.message)]) == 1
    assert found.shape.tt_ranks == (8, 12)
    assert found.relative_error < 1e-6
    shape = found.shape
    with pytest.warns(UserWarning, match=r"\(8, 12\) are taken"):
        assert grow_ranks(found.cores, shape=shape, tt_ranks=[8, 13])[0] == shape


@pytest.mark.parametrize(
    ("num_embeddings", "tt_ranks", "useful"),
    [
        (120, (8, 12), (8, 12)),
        (120, (9, 13), (8, 12)),
        (120, (2, 50), (2, 12)),
        (120, (1, 12), (1, 10)),
        (31, (100, 100), (4, 12)),  # two first digits, six prefixes
    ],
)
def test_useful_ranks_are_the_sides_of_the_unfoldings(
    num_embeddings: int, tt_ranks: tuple[int, int], useful: tuple[int, int]
) -> None:
    assert useful_ranks(_shape(num_embeddings, (4, 5, 6), (2, 2, 2), tt_ranks)) == useful


@pytest.mark.parametrize("num_embeddings", [1, 2, 7, 30, 31, 61])
def test_tiny_tables_are_met_by_their_useful_ranks(num_embeddings: int) -> None:
    table = torch.randn(num_embeddings, 8, generator=torch.Generator().manual_seed(0))
    ranks = useful_ranks(_shape(num_embeddings, (4, 5, 6), (2, 2, 2), (99, 99)))
    found = tt_svd(table, tt_ranks=ranks, row_factors=[4, 5, 6])
    assert found.relative_error < 1e-5
    tt_svd(table, tt_ranks=[1, 1], row_factors=[4, 5, 6])


def test_a_table_of_zeros_has_no_error() -> None:
    found = tt_svd(torch.zeros(120, 8), tt_ranks=[2, 2], row_factors=[4, 5, 6])
    assert found.relative_error == 0.0
    assert dense(found.cores, shape=found.shape).count_nonzero() == 0
    assert tt_svd(torch.zeros(120, 8), max_error=0.1).shape.tt_ranks == (1, 1)
    cores = [torch.zeros(s) for s in found.shape.core_shapes]
    assert round_cores(cores, shape=found.shape, tt_ranks=[1, 1]).relative_error == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    table = torch.ones(120, 8)
    table[77, 3] = value
    with pytest.raises(ValueError, match="table must be finite, got nan or inf in row 77"):
        tt_svd(table, tt_ranks=[2, 2])
    shape = _shape(120, (4, 5, 6), (2, 2, 2), (2, 2))
    cores = _cores(shape)
    cores[1][0, 0] = value
    with pytest.raises(ValueError, match="cores must be finite"):
        round_cores(cores, shape=shape, tt_ranks=[1, 1])


def test_wrong_arguments_are_refused() -> None:
    table = torch.ones(120, 8)
    shape = _shape(120, (4, 5, 6), (2, 2, 2), (2, 2))
    cores = _cores(shape)
    with pytest.raises(ValueError, match="table must be a matrix of floating values"):
        tt_svd(torch.ones(120, 8, dtype=torch.int64), tt_ranks=[2, 2])
    with pytest.raises(ValueError, match=r"table must be a matrix .* on meta"):
        tt_svd(torch.ones(120, 8, device="meta"), tt_ranks=[2, 2])
    with pytest.raises(ValueError, match="tt_ranks or max_error must be given"):
        tt_svd(table)
    with pytest.raises(ValueError, match="tt_ranks or max_error must be given"):
        tt_svd(table, tt_ranks=[2, 2], max_error=0.1)
    with pytest.raises(ValueError, match=r"max_error must be between 0 and 1, got 1\.5"):
        tt_svd(table, max_error=1.5)
    with pytest.raises(ValueError, match="row_factors must have a product of at least"):
        tt_svd(table, tt_ranks=[2, 2], row_factors=[2, 3, 4])
    with pytest.raises(ValueError, match="dtype must be a floating dtype"):
        tt_svd(table, tt_ranks=[2, 2], dtype=torch.int8)
    with pytest.raises(ValueError, match=r"tt_ranks must be at most the cores' \(2, 2\)"):
        round_cores(cores, shape=shape, tt_ranks=[2, 3])
    with pytest.raises(ValueError, match=r"tt_ranks must be at least the cores' \(2, 2\)"):
        grow_ranks(cores, shape=shape, tt_ranks=[1, 3])
    with pytest.raises(ValueError, match="cores must have the shapes"):
        grow_ranks(cores[:2], shape=shape, tt_ranks=[2, 3])
    with pytest.raises(ValueError, match="tt_ranks must have 2 entries for 3 cores"):
        round_cores(cores, shape=shape, tt_ranks=[2])


def test_a_block_of_another_shape_is_refused() -> None:
    class Short(_MadeRows):
        def rows(self, begin: int, end: int) -> Tensor:
            return super().rows(begin, end)[:-1]

    with pytest.raises(ValueError, match=r"rows\(0, 120\) must be \[120, 8\], got \[119, 8\]"):
        tt_svd(Short(120, 8), tt_ranks=[2, 2])


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    tt_svd(torch.ones(120, 8), tt_ranks=[2, 2])
    assert capsys.readouterr().out == ""
    tt_svd(torch.ones(120, 8), tt_ranks=[2, 2], progress=True)
    assert "core 3 of 3" in capsys.readouterr().out
