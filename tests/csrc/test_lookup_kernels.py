"""The CUDA kernels of the lookup and its gradients, emulated, against the CPU's."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.csrc.emulation import SCHEDULES
from tests.csrc.lookup_calls import EmulationError, Kernels, Setting, build_kernels
from tests.ops.reference import SHAPES, Batch, make_cores, make_lookup
from torchrec_tt.ops import embedding_bag
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.tt.shape import TTShape

# Rounding of the factors of products with a mid slice, 2^-11 and 2^-9, in sums of random signs.
TOLERANCES = {"fp32": 2e-6, "tf32": 2e-3, "bf16": 1e-2}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(build_kernels())


@dataclass
class Case:
    """A call, and what the CPU operators make of it."""

    lookup: Lookup
    cores: list[Tensor]
    plan: list[Tensor]
    offsets: Tensor
    weights: Tensor | None

    @staticmethod
    def draw(
        *names: str,
        pooling: str = "sum",
        dtype: torch.dtype = torch.float32,
        offset_dtype: torch.dtype = torch.int64,
        is_weighted: bool = False,
        batch: Batch | None = None,
    ) -> "Case":
        lookup = make_lookup(*names, pooling=pooling)
        batch = batch or Batch.draw(lookup)
        return Case(
            lookup,
            [core.detach() for core in make_cores(lookup, dtype=dtype)],
            embedding_bag.plan(batch.indices, batch.offsets, lookup=lookup),
            batch.offsets.to(offset_dtype),
            batch.weights.detach() if is_weighted else None,
        )

    def forward(self) -> Tensor:
        return embedding_bag.embedding_bag_forward(
            self.plan,
            self.cores,
            offsets=self.offsets,
            lookup=self.lookup,
            per_sample_weights=self.weights,
        )

    def grad_output(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.forward().shape, generator=generator)

    def backward(self) -> tuple[list[Tensor], Tensor]:
        return embedding_bag.embedding_bag_backward_dense(
            self.grad_output(),
            self.plan,
            self.cores,
            offsets=self.offsets,
            lookup=self.lookup,
            per_sample_weights=self.weights,
            weights_grad=True,
        )

    def arguments(self, setting: Setting) -> dict:
        return {
            "offsets": self.offsets,
            "lookup": self.lookup,
            "weights": self.weights,
            "setting": setting,
        }

    def check(self, kernels: Kernels, setting: Setting) -> None:
        tolerance = TOLERANCES[setting.precision]
        output = kernels.forward(self.plan, self.cores, **self.arguments(setting))
        assert_near(output, self.forward(), tolerance)
        grads, grad_weights, touched = kernels.backward(
            self.grad_output(), self.plan, self.cores, **self.arguments(setting)
        )
        expected, expected_weights = self.backward()
        for grad, of_cpu in zip(grads, expected, strict=True):
            assert_near(grad, of_cpu, tolerance)
        assert_near(grad_weights, expected_weights, tolerance)
        assert torch.equal(touched.bool(), torch.cat([(g != 0).any(1) for g in expected]))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    size = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * size)


DETERMINISTIC = Setting(is_deterministic=True, rows_at_once=17, num_multiprocessors=2)
LARGER_TURNS = replace(DETERMINISTIC, rows_at_once=150)
# (what Case.draw takes, how the kernels run): every dtype, pooling, path and precision
VARIANTS = {
    "sum": ({}, Setting(num_multiprocessors=2)),
    "mean, weights, int32": (
        {"pooling": "mean", "is_weighted": True, "offset_dtype": torch.int32},
        Setting(),
    ),
    "none, float16": ({"pooling": "none", "dtype": torch.float16}, Setting()),
    "none, weights, general": (
        {"pooling": "none", "is_weighted": True},
        Setting(shared_bytes=0, num_multiprocessors=2),
    ),
    "bfloat16, weights, deterministic": (
        {"dtype": torch.bfloat16, "is_weighted": True},
        DETERMINISTIC,
    ),
    "mean, general, deterministic": (
        {"pooling": "mean"},
        replace(DETERMINISTIC, shared_bytes=0, rows_at_once=0),
    ),
    "tf32": ({"is_weighted": True}, Setting(precision="tf32")),
    "bf16": ({"pooling": "mean"}, Setting(precision="bf16", is_deterministic=True)),
}


@pytest.mark.parametrize(("name", "variant"), itertools.product(SHAPES, VARIANTS))
def test_lookups_and_gradients_are_the_cpus_under_every_schedule(kernels, name, variant):
    drawn, setting = VARIANTS[variant]
    case = Case.draw(name, **drawn)
    for schedule in SCHEDULES:
        kernels.emulation.set_schedule(schedule)
        case.check(kernels, setting)


@pytest.mark.parametrize("setting", [Setting(), Setting(shared_bytes=24_000), LARGER_TURNS])
def test_tables_of_all_shapes_go_together(kernels, setting):
    case = Case.draw(*SHAPES, is_weighted=True, pooling="mean")
    for schedule in SCHEDULES:
        kernels.emulation.set_schedule(schedule)
        case.check(kernels, setting)


@pytest.mark.parametrize("setting", [Setting(), LARGER_TURNS])
def test_a_call_of_many_tables_launches_as_often_as_of_one(kernels, setting):
    counts = []
    for names in (["4 cores"], ["4 cores"] * 20, [*SHAPES, *SHAPES]):
        case = Case.draw(*names, is_weighted=True)
        if setting.is_deterministic:
            setting = replace(setting, rows_at_once=10**6)  # one turn
        before = kernels.emulation.calls.emulation_num_launches()
        case.check(kernels, setting)
        counts.append(kernels.emulation.calls.emulation_num_launches() - before)
    assert counts[0] == counts[1] == counts[2] > 8


def bags_of(*indices: int, times: int, lookup: Lookup, batch_size: int = 3) -> Batch:
    """Bags that hold `indices` many times, the last one empty."""
    drawn = torch.tensor(indices).repeat(times)
    ends = torch.linspace(0, len(drawn), batch_size).long()
    offsets = torch.cat([ends, ends[-1:]])
    generator = torch.Generator().manual_seed(2)
    return Batch(drawn, offsets, torch.rand(len(drawn), generator=generator))


@pytest.mark.parametrize("setting", [Setting(), LARGER_TURNS])
@pytest.mark.parametrize("times", [33, 64, 700])
def test_rows_that_fill_the_batch_are_split(kernels, setting, times):
    lookup = make_lookup("3 cores, aligned")
    batch = bags_of(5, 5, 77, 80, 5, times=times, lookup=lookup)
    case = Case.draw("3 cores, aligned", batch=batch, is_weighted=True)
    for schedule in SCHEDULES:
        kernels.emulation.set_schedule(schedule)
        case.check(kernels, setting)


@pytest.mark.parametrize("setting", [Setting(), Setting(num_multiprocessors=64), LARGER_TURNS])
def test_groups_and_prefixes_longer_than_a_block_takes_at_once(kernels, setting):
    # 6 heads of 4 rows in one group, 60 rows to a prefix; windows of 8 prefixes or more
    names = ["3 cores, long last", "3 cores, aligned"]
    lookup = make_lookup(*names)
    counts = [table.block_size for table in lookup.tables]
    indices = torch.cat([torch.arange(count) for count in counts])
    offsets = torch.tensor([0, 100, counts[0], counts[0] + 9, sum(counts)])
    batch = Batch(indices, offsets, torch.ones(len(indices)))
    case = Case.draw(*names, batch=batch)
    for schedule in SCHEDULES:
        kernels.emulation.set_schedule(schedule)
        case.check(kernels, setting)


# Two groups of 300 prefixes, more than a block looks through at once, in windows of 75, 15 and 8;
# and 30 of 20, which a block takes whole in windows of 75 and 15.
@pytest.mark.parametrize("row_factors", [(300, 2, 2), (20, 30, 2)])
def test_groups_of_many_windows(kernels, row_factors):
    shape = TTShape(
        num_embeddings=1200,
        embedding_dim=2,
        row_factors=row_factors,
        col_factors=(1, 2, 1),
        tt_ranks=(2, 2),
    )
    lookup = Lookup([TTTable(name="t", shape=shape)])
    indices, offsets = torch.arange(0, 1200, 2), torch.arange(0, 601, 4)
    cores = [core.detach() for core in make_cores(lookup)]
    plan = embedding_bag.plan(indices, offsets, lookup=lookup)
    case = Case(lookup, cores, plan, offsets, None)
    grads = []
    for num_multiprocessors, is_deterministic in itertools.product((1, 5, 64), (False, True)):
        setting = Setting(
            num_multiprocessors=num_multiprocessors, is_deterministic=is_deterministic
        )
        case.check(kernels, setting)
        if is_deterministic:
            arguments = case.arguments(setting)
            grads.append(kernels.backward(case.grad_output(), plan, cores, **arguments)[0])
    assert all(map(torch.equal, grads[0] * 2, grads[1] + grads[2]))


@pytest.mark.parametrize("setting", [Setting(), LARGER_TURNS, Setting(shared_bytes=0)])
def test_a_batch_without_ids_gives_zeros(kernels, setting):
    batch = Batch(torch.empty(0, dtype=torch.int64), torch.zeros(5).long(), torch.empty(0))
    case = Case.draw("4 cores", batch=batch)
    output = kernels.forward(case.plan, case.cores, **case.arguments(setting))
    assert torch.equal(output, torch.zeros(4, 12))
    grads, _, touched = kernels.backward(output, case.plan, case.cores, **case.arguments(setting))
    assert not any(grad.any() for grad in grads)
    assert not touched.any()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_deterministic_gradients_are_bitwise_equal(kernels, precision):
    case = Case.draw(*SHAPES, is_weighted=True)
    results = []
    for schedule, multiprocessors in [(0, 1), (1, 3), (2, 7)]:
        kernels.emulation.set_schedule(schedule)
        setting = Setting(
            is_deterministic=True, num_multiprocessors=multiprocessors, precision=precision
        )
        grads, grad_weights, _ = kernels.backward(
            case.grad_output(), case.plan, case.cores, **case.arguments(setting)
        )
        results.append([*grads, grad_weights])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_only_the_precision_asked_for_rounds_factors(kernels):
    kernels.emulation.set_schedule(0)
    case = Case.draw("3 cores, aligned")
    expected = case.forward()
    errors = {}
    for precision in TOLERANCES:
        setting = Setting(precision=precision)
        output = kernels.forward(case.plan, case.cores, **case.arguments(setting))
        errors[precision] = float((output - expected).abs().max() / expected.abs().max())
    assert errors["fp32"] < 1e-6
    assert 2e-5 < errors["tf32"] < 2e-3
    assert 2e-4 < errors["bf16"] < 1e-2


def refused(*, row_factors, col_factors, tt_ranks) -> Case:
    shape = TTShape(
        num_embeddings=math.prod(row_factors),
        embedding_dim=math.prod(col_factors),
        row_factors=row_factors,
        col_factors=col_factors,
        tt_ranks=tt_ranks,
    )
    lookup = Lookup([TTTable(name="t", shape=shape, num_features=1)])
    nothing = torch.empty(0)
    indices, offsets = torch.zeros(1).long(), torch.tensor([0, 1])
    plan = embedding_bag.plan(indices, offsets, lookup=lookup)
    return Case(lookup, [nothing] * len(row_factors), plan, offsets, None)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            {"row_factors": (2, 2, 2), "col_factors": (1, 4, 1), "tt_ranks": (4096, 4096)},
            r"slices, heads and rows of at most 16777216 elements on CUDA, got core 1 with "
            r"4096 x 4 x 4096",
        ),
        (
            {"row_factors": (40000, 40000, 2, 2), "col_factors": (1,) * 4, "tt_ranks": (1,) * 3},
            r"at most 1073741824 pairs of their first two digits together on CUDA, got row "
            r"factors 40000 40000 2 2",
        ),
    ],
)
def test_shapes_beyond_the_kernels_are_refused_by_name(kernels, shape, message):
    case = refused(**shape)
    with pytest.raises(ValueError, match=message):
        kernels.forward(case.plan, case.cores, **case.arguments(Setting()))


def all_kernels(kernels: Kernels) -> None:
    """Runs what reaches every barrier where it matters."""
    lookup = make_lookup("3 cores, aligned")
    hot = bags_of(5, 5, 77, 80, 5, times=40, lookup=lookup)
    everything = Case.draw(*SHAPES)
    for case in (everything, Case.draw("3 cores, aligned", batch=hot, is_weighted=True)):
        for setting in (Setting(), DETERMINISTIC):
            case.check(kernels, setting)


def test_no_barrier_can_be_left_out(kernels):
    kernels.emulation.set_schedule(2)
    all_kernels(kernels)
    barriers = [b for b in kernels.emulation.barriers() if "step.cu" not in b]
    assert len(barriers) > 12
    needless = []
    for barrier in barriers:
        with kernels.emulation.without_barrier(barrier):
            try:
                all_kernels(kernels)
                needless.append(barrier)
            except (EmulationError, AssertionError):
                pass
    assert not needless
