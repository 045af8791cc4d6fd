import math
import time

import pytest
import torch
from torch import Tensor, nn

from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.init import TAIL_PROBABILITY, TTInit, _UniformRows, init_cores_, table_generator
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import tt_svd

pytestmark = pytest.mark.filterwarnings("ignore:tt_ranks=.* larger than the dense one")

METHODS: tuple[TTInit, ...] = ("sampled_gaussian", "gaussian", "uniform", "orthogonal", "tt_svd")
DRAWN = METHODS[:3]  # independent entries
RANKS = [
    *((1,), (8,), (64,)),
    *((1, 1), (4, 4), (16, 16), (64, 64), (2, 64), (64, 3)),
    *((1, 1, 1), (16, 8, 16), (1, 5, 3)),
]


def _init(
    shape: TTShape,
    *,
    method: TTInit = "sampled_gaussian",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    cores = [torch.full(s, torch.nan, dtype=dtype) for s in shape.core_shapes]
    init_cores_(cores, shape=shape, method=method, generator=torch.Generator().manual_seed(seed))
    return cores


def _std_over_target(shape: TTShape, cores: list[Tensor]) -> float:
    std = dense([core.double() for core in cores], shape=shape).std(correction=0).item()
    return std * math.sqrt(3 * shape.num_embeddings)


def _kurtosis(table: Tensor) -> float:
    centred = table.double() - table.double().mean()
    return (centred.pow(4).mean() / centred.pow(2).mean().square()).item()


# U62
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tt_ranks", RANKS, ids=str)
def test_table_has_the_wanted_standard_deviation(tt_ranks: tuple[int, ...], method: TTInit) -> None:
    shape = make_shape(5000, 16, tt_ranks=tt_ranks)
    cores = _init(shape, method=method)
    assert _std_over_target(shape, cores) == pytest.approx(1.0, rel=1e-5)


def test_deviation_is_that_of_the_rows_that_can_be_looked_up() -> None:
    shape = TTShape(
        num_embeddings=1003,  # of 4000: three rows have another first digit than the others
        embedding_dim=4,
        row_factors=(4, 20, 50),
        col_factors=(2, 2, 1),
        tt_ranks=(1, 2),
    )
    padded = TTShape(
        num_embeddings=4000,
        embedding_dim=4,
        row_factors=(4, 20, 50),
        col_factors=(2, 2, 1),
        tt_ranks=(1, 2),
    )
    cores = _init(shape)
    assert _std_over_target(shape, cores) == pytest.approx(1.0, rel=1e-5)
    over_padded = _std_over_target(padded, cores) / math.sqrt(4000 / 1003)
    assert abs(over_padded - 1.0) > 0.02


@pytest.mark.parametrize("num_embeddings", [2, 3, 7, 10])
def test_tiny_tables_have_the_wanted_standard_deviation(num_embeddings: int) -> None:
    shape = make_shape(num_embeddings, 8, tt_ranks=(2, 2))
    cores = _init(shape, seed=num_embeddings)
    assert _std_over_target(shape, cores) == pytest.approx(1.0, rel=1e-5)


def test_a_nearly_constant_table_is_not_blown_up() -> None:
    shape = make_shape(1, 2, tt_ranks=(1, 1))
    target = 1 / math.sqrt(3)
    for seed in range(50):
        table = dense(_init(shape, seed=seed), shape=shape)
        assert table.abs().max() < 2.1 * target
        assert table.abs().max() > 0.5 * target


@pytest.mark.parametrize("tt_ranks", [(8, 8), (16, 16), (32, 32), (8, 64), (64, 8)], ids=str)
def test_sampled_gaussian_gives_a_nearly_gaussian_table(tt_ranks: tuple[int, int]) -> None:
    shape = make_shape(20_000, 16, tt_ranks=tt_ranks)
    for seed in range(4):
        assert 2.9 < _kurtosis(dense(_init(shape, seed=seed), shape=shape)) < 3.2


def test_gaussian_cores_give_a_more_peaked_table_than_sampled_ones() -> None:
    shape = make_shape(20_000, 16, tt_ranks=(16, 16))
    tables = {m: dense(_init(shape, method=m), shape=shape) for m in METHODS}
    assert _kurtosis(tables["gaussian"]) > 3.5
    assert 3.1 < _kurtosis(tables["uniform"]) < 3.4


# U62
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [4, 16, 64])
def test_entries_have_the_deviation_of_a_dense_table_at_any_rank(rank: int, method: TTInit) -> None:
    shape = make_shape(6000, 16, tt_ranks=(rank, rank))
    dense_std = nn.init.uniform_(torch.empty(6000, 16), -(6000**-0.5), 6000**-0.5).std().item()
    assert dense(_init(shape, method=method), shape=shape).std().item() == pytest.approx(
        dense_std, rel=0.1
    )


def test_orthogonal_cores_are_orthogonal() -> None:
    shape = make_shape(5000, 16, tt_ranks=(6, 40))  # 40 is more than the last core can be
    first, middle, last = _init(shape, method="orthogonal", dtype=torch.float64)
    m = shape.row_factors
    for matrix in (
        first.view(-1, 6).T,
        middle.view(m[1], 6, -1).transpose(0, 1).reshape(6, -1),
        last.view(m[2], 40, -1).transpose(0, 1).reshape(40, -1),
    ):
        gram = matrix @ matrix.T
        torch.testing.assert_close(
            gram, gram.diagonal().mean() * torch.eye(len(gram)).double(), rtol=0, atol=1e-5
        )


def test_a_random_table_is_approached_by_its_tt_svd() -> None:
    shape = make_shape(600, 8, tt_ranks=(8, 20))
    table = _UniformRows(
        600, 8, int(torch.randint(2**40, (1,), generator=torch.Generator().manual_seed(0)))
    )
    found = dense(_init(shape, method="tt_svd"), shape=shape)
    cosine = torch.nn.functional.cosine_similarity(
        found.flatten(), table.rows(0, 600).flatten(), dim=0
    )
    best = tt_svd(table, tt_ranks=(8, 20)).relative_error
    assert cosine.item() == pytest.approx(math.sqrt(1 - best**2), rel=1e-3)


@pytest.mark.parametrize("method", DRAWN)
def test_tables_and_cores_are_centred(method: TTInit) -> None:
    shape = make_shape(142_572, 16, tt_ranks=(16, 16))
    cores = _init(shape, method=method)
    for core in cores:
        # Five deviations of the mean of as many independent entries.
        assert abs(core.mean()) < 5 * core.std() / math.sqrt(core.numel())
    table = dense(cores, shape=shape)
    assert abs(table.mean()) < 0.02 * table.std()


@pytest.mark.parametrize(
    ("method", "variance"),
    [("sampled_gaussian", 5.74643), ("gaussian", 1.0), ("uniform", 1 / 3)],
)
def test_core_scale_is_near_its_expectation(method: TTInit, variance: float) -> None:
    shape = make_shape(142_572, 16, tt_ranks=(16, 8))
    scale = (3 * 142_572 * 16 * 8) ** (-1 / 6) / math.sqrt(variance)
    for core in _init(shape, method=method):
        assert core.std().item() == pytest.approx(scale * math.sqrt(variance), rel=0.05)


def test_variance_of_the_tails_is_its_closed_form() -> None:
    density = math.exp(-2.0) / math.sqrt(2 * math.pi)
    closed_form = 1 + 2 * density / TAIL_PROBABILITY
    assert closed_form == pytest.approx(5.74643, rel=1e-5)
    x = torch.linspace(2, 12, 100_001, dtype=torch.float64)
    weights = torch.exp(-x * x / 2)
    integrated = torch.trapezoid(x * x * weights, x) / torch.trapezoid(weights, x)
    assert integrated.item() == pytest.approx(closed_form, rel=1e-6)


def test_sampled_gaussian_draws_the_tails_and_nothing_else() -> None:
    shape = make_shape(142_572, 16, tt_ranks=(32, 32))
    core = _init(shape)[1].double().flatten()
    scale = core.abs().min().item() / 2
    magnitudes = core.abs() / scale
    count = magnitudes.numel()
    for bound in (2.1, 2.3, 2.6, 3.0, 3.5):
        expected = math.erfc(bound / math.sqrt(2)) / (2 * TAIL_PROBABILITY)
        deviation = math.sqrt(expected * (1 - expected) / count)
        observed = (magnitudes > bound).double().mean().item()
        assert observed == pytest.approx(expected, abs=5 * deviation)
    assert (core > 0).double().mean().item() == pytest.approx(0.5, abs=2.5 / math.sqrt(count))


def test_uniform_cores_fill_a_symmetric_interval() -> None:
    core = _init(make_shape(142_572, 16, tt_ranks=(16, 16)), method="uniform")[1]
    low, high = core.min().item(), core.max().item()
    assert low < 0 < high
    assert low == pytest.approx(-high, rel=0.01)
    histogram = torch.histc(core, bins=10, min=low, max=high) / core.numel()
    torch.testing.assert_close(histogram, torch.full((10,), 0.1), atol=0.01, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_one_seed_gives_one_table(method: TTInit) -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    first, again, other = (_init(shape, method=method, seed=s) for s in (7, 7, 8))
    for core, same, different in zip(first, again, other, strict=True):
        assert torch.equal(core, same)
        assert not torch.equal(core, different)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_holds_the_float32_values(dtype: torch.dtype) -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    for core, cast in zip(_init(shape), _init(shape, dtype=dtype), strict=True):
        assert torch.equal(core.to(dtype), cast)


def test_without_a_generator_the_global_seed_decides() -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    cores = [torch.empty(s) for s in shape.core_shapes]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        init_cores_(cores, shape=shape)
    for core, expected in zip(cores, _init(shape, seed=3), strict=True):
        assert torch.equal(core, expected)


def test_parameters_are_filled_in_place_without_a_graph() -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    parameters = [torch.nn.Parameter(torch.zeros(s)) for s in shape.core_shapes]
    init_cores_(parameters, shape=shape)
    for parameter in parameters:
        assert parameter.is_leaf
        assert parameter.count_nonzero() == parameter.numel()


def test_meta_cores_draw_nothing() -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    cores = [torch.empty(s, device="meta") for s in shape.core_shapes]
    init_cores_(cores, shape=shape, generator=generator)
    assert torch.equal(generator.get_state(), before)


def test_ten_million_rows_take_a_fifth_of_a_second() -> None:
    shape = make_shape(10_000_000, 64, tt_ranks=(32, 32))
    cores = [torch.empty(s) for s in shape.core_shapes]

    def seconds() -> float:
        start = time.process_time()  # of this process alone
        init_cores_(cores, shape=shape)
        return time.process_time() - start

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Several tries: the first warms up, and neighbours slow the memory down.
        assert any(seconds() < 0.2 for _ in range(8))
    finally:
        torch.set_num_threads(num_threads)


def test_an_unknown_method_is_refused() -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    with pytest.raises(ValueError, match=r"method must be one of \(.*\), got 'xavier'"):
        _init(shape, method="xavier")  # type: ignore[arg-type]


def test_cores_of_another_shape_are_refused() -> None:
    shape = make_shape(5000, 16, tt_ranks=(4, 4))
    cores = [torch.empty(s) for s in shape.core_shapes]
    with pytest.raises(ValueError, match="cores must have the shapes"):
        init_cores_(cores[:2], shape=shape)
    with pytest.raises(ValueError, match="cores must have the shapes"):
        init_cores_([*cores[:2], cores[2].T], shape=shape)


def test_table_generators_differ_by_name_and_seed() -> None:
    streams = {
        (name, seed): tuple(torch.rand(4, generator=table_generator(name, seed=seed)).tolist())
        for name in ("t_cat_0", "t_cat_1", "")
        for seed in (0, 1, 2**40)
    }
    assert len(set(streams.values())) == len(streams)


def test_table_generators_are_the_same_in_every_process() -> None:
    assert table_generator("t_cat_2", seed=5).initial_seed() == 15_188_025_209_167_895_698
