import itertools

import pytest
import torch
from torch import Tensor

from torchrec_tt.tt.cores import dense, rows
from torchrec_tt.tt.shape import TTShape

SHAPES = [
    TTShape(
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        row_factors=row_factors,
        col_factors=col_factors,
        tt_ranks=tt_ranks,
    )
    for num_embeddings, embedding_dim, row_factors, col_factors, tt_ranks in (
        (10, 6, (3, 4), (2, 3), (5,)),
        (7, 7, (1, 7), (7, 1), (1,)),
        (22, 12, (2, 3, 4), (3, 1, 4), (5, 2)),
        (1, 1, (1, 1, 1), (1, 1, 1), (3, 2)),
        (50, 16, (5, 2, 5), (2, 2, 4), (1, 8)),
        (100, 24, (3, 4, 2, 5), (2, 3, 1, 4), (2, 5, 3)),
    )
]


def _random_cores(shape: TTShape, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shape.core_shapes]


def _entry_by_definition(cores: list[Tensor], row: int, column: int, *, shape: TTShape) -> float:
    """The sum over all rank paths of products of core elements, with digits by hand."""
    digits = []
    for m, n in zip(reversed(shape.row_factors), reversed(shape.col_factors), strict=True):
        digits.insert(0, (row % m, column % n))
        row, column = row // m, column // n
    total = 0.0
    for path in itertools.product(*(range(r) for r in shape.tt_ranks)):
        ranks, product = (0, *path, 0), 1.0
        for k, (i, j) in enumerate(digits):
            _, n, r_out = shape.slice_shapes[k]
            product *= cores[k][i, (ranks[k] * n + j) * r_out + ranks[k + 1]].item()
        total += product
    return total


def test_a_table_worked_by_hand() -> None:
    shape = TTShape(
        num_embeddings=4, embedding_dim=2, row_factors=(2, 2), col_factors=(1, 2), tt_ranks=(2,)
    )
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # [m_0, (r_1)]
    right = torch.tensor([[1.0, 0.0, 0.0, 1.0], [5.0, 6.0, 7.0, 8.0]])  # [m_1, (r_1, n_1)]
    # row 0 = 1 * (1, 0) + 2 * (0, 1); row 1 = 1 * (5, 6) + 2 * (7, 8); rows 2, 3 with (3, 4)
    expected = torch.tensor([[1.0, 2.0], [19.0, 22.0], [3.0, 4.0], [43.0, 50.0]])
    assert torch.equal(dense([left, right], shape=shape), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_is_the_sum_over_rank_paths(shape: TTShape) -> None:
    cores = _random_cores(shape)
    table = dense(cores, shape=shape)
    assert table.shape == (shape.num_embeddings, shape.embedding_dim)
    for row in {0, shape.num_embeddings // 2, shape.num_embeddings - 1}:
        for column in range(shape.embedding_dim):
            expected = _entry_by_definition(cores, row, column, shape=shape)
            assert table[row, column].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_dense_table(shape: TTShape, index_dtype: torch.dtype) -> None:
    cores = _random_cores(shape)
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(shape.num_embeddings, (40,), generator=generator)
    torch.testing.assert_close(
        rows(cores, indices.to(index_dtype), shape=shape), dense(cores, shape=shape)[indices]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_gradients_of_the_dense_table(shape: TTShape) -> None:
    cores = [core.requires_grad_() for core in _random_cores(shape)]
    indices = torch.arange(shape.num_embeddings).repeat(2)
    cotangent = torch.randn(indices.numel(), shape.embedding_dim, dtype=torch.float64)
    actual = torch.autograd.grad(rows(cores, indices, shape=shape), cores, cotangent)
    expected = torch.autograd.grad(dense(cores, shape=shape)[indices], cores, cotangent)
    torch.testing.assert_close(actual, expected)


def test_no_indices_give_no_rows() -> None:
    shape = SHAPES[2]
    empty = torch.empty(0, dtype=torch.int64)
    assert rows(_random_cores(shape), empty, shape=shape).shape == (0, shape.embedding_dim)


def test_ids_past_int32_reach_their_own_rows() -> None:
    shape = TTShape(
        num_embeddings=2**31 + 10,
        embedding_dim=8,
        row_factors=(1300, 1300, 1300),
        col_factors=(2, 2, 2),
        tt_ranks=(2, 2),
    )
    cores = _random_cores(shape)
    ids = [0, 2**31 - 1, 2**31, 2**31 + 9]
    actual = rows(cores, torch.tensor(ids), shape=shape)
    expected = torch.tensor(
        [[_entry_by_definition(cores, i, j, shape=shape) for j in range(8)] for i in ids],
        dtype=torch.float64,
    )
    torch.testing.assert_close(actual, expected)
    assert len({tuple(row) for row in actual.tolist()}) == len(ids)


def test_int32_ids_reach_their_rows_in_a_table_past_int32() -> None:
    shape = TTShape(
        num_embeddings=2**31 + 10,
        embedding_dim=4,
        row_factors=(1, 2**17, 2**15),
        col_factors=(2, 2, 1),
        tt_ranks=(1, 1),
    )
    cores = _random_cores(shape)
    ids = torch.tensor([0, 5, 2**31 - 1])
    assert torch.equal(rows(cores, ids.int(), shape=shape), rows(cores, ids, shape=shape))
