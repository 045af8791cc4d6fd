"""Row caches on CUDA, emulated: lookups, gradients, steps and counts equal the CPU's."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.csrc.emulation import SCHEDULES, EmulationError
from tests.csrc.test_ops import CPU, DTYPES, Call, assert_close
from tests.modules.test_row_cache import hot_batches, make_module, train
from tests.ops.cached_rows import Caches
from tests.ops.reference import make_lookup
from tests.ops.test_random_lookups import random_table
from tests.ops.test_row_cache import OPTIMIZERS, make_states
from torchrec_tt.ops import embedding_bag, row_cache, row_counter, step_cores
from torchrec_tt.ops.lookup import Lookup
from torchrec_tt.optim import TTOptimizerConfig


@pytest.fixture
def emulated(cuda_operators):
    cuda_operators.set_schedule(0)
    yield torch.ops.torchrec_tt_emulated
    cuda_operators.check()


class CachedCall(Call):
    """A lookup of tables of which some have a cache."""

    def __init__(self, lookup: Lookup, caches: Caches, **kwargs) -> None:
        super().__init__(lookup, **kwargs)
        self.caches = caches

    @staticmethod
    def draw(seed: int) -> "CachedCall":
        rng = random.Random(seed)
        torch.manual_seed(seed)
        tables = [random_table(rng, f"t{i}") for i in range(rng.choice((1, 1, 2, 5)))]
        one_dim = len({table.shape.embedding_dim for table in tables}) == 1
        lookup = Lookup(tables, pooling=rng.choice(("sum", "mean", "none" if one_dim else "sum")))
        call = CachedCall(
            lookup,
            Caches.draw(lookup, rng, dtype=rng.choice(DTYPES)),
            dtype=rng.choice(DTYPES),
            batch_size=rng.choice((1, 2, 17, 40)),
            weighted=rng.random() < 0.5,
        )
        if rng.random() < 0.3:
            call.indices, call.offsets = call.indices.int(), call.offsets.int()
        return call

    @staticmethod
    def of(*names: str, ratio: float = 0.5, dtype=torch.float32, **kwargs) -> "CachedCall":
        lookup = make_lookup(*names)
        caches = Caches.draw(lookup, random.Random(3), ratios=(ratio,), dtype=dtype)
        return CachedCall(lookup, caches, **kwargs)

    def plan(self, operators) -> list[Tensor]:
        lookup = self.lookup
        return operators.plan(
            *(self.indices, self.offsets, lookup.encoded_tables, lookup.feature_tables),
            *(lookup.check_mode, self.caches.ids),
        )

    def tail(self) -> tuple:
        return (self.caches.rows, *super().tail()[1:])

    def step(self, operators, config: TTOptimizerConfig, *, seeds: bool) -> list[Tensor]:
        """The rows and their states after two steps, the second without the first table."""
        rows = [own.clone() for own in self.caches.rows]
        torch.manual_seed(0)
        has_step = seeds or config.optimizer == "adam"
        states = make_states(rows, config, has_step=has_step)
        cached = [own for own in rows if own.numel()]
        per_table = len(states) // len(cached) if cached else 0
        steps = [(rows, states, len(cached))]
        if len(cached) > 1:
            first = next(t for t, own in enumerate(rows) if own.numel())
            frozen = [own.new_empty(0) if t == first else own for t, own in enumerate(rows)]
            steps.append((frozen, states[per_table:], len(cached) - 1))
        for stepped, own_states, count in steps:
            operators.step_cached_rows(
                *(self.grad, self.plan(operators), self.caches.ids, stepped, own_states),
                *self.tail()[1:],
                *(config.optimizer, 0.1, 1e-3, *config.betas, config.weight_decay),
                config.decoupled_weight_decay,
                [7 * t + 1 for t in range(count)] if seeds else [],
            )
        return [*rows, *states]


@pytest.mark.parametrize("seed", range(60))
def test_random_lookups_through_caches_equal_the_cpus(seed, cuda_operators, emulated):
    call = CachedCall.draw(seed)
    cuda_operators.set_schedule(seed % 5)
    for ours, theirs in zip(call.plan(emulated), call.plan(CPU), strict=True):
        assert torch.equal(ours, theirs)
    assert_close([call.forward(emulated)], [call.forward(CPU)])
    deterministic = seed % 2 == 0
    assert_close(call.backward(emulated, "highest", deterministic), call.backward(CPU))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_steps_of_cores_in_backward_leave_cached_rows_out(optimizer, emulated):
    call = CachedCall.of("3 cores", "2 cores", "4 cores")
    assert_close(call.update(emulated, optimizer), call.update(CPU, optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [(0.0, False), (0.1, False), (0.1, True)], ids=str)
def test_steps_of_cached_rows_equal_the_cpus(optimizer, dtype, decay, cuda_operators, emulated):
    names = ("3 cores", "2 cores, wide", "3 cores, aligned", "4 cores")
    call = CachedCall.of(*names, dtype=dtype, batch_size=60)
    config = TTOptimizerConfig(
        optimizer=optimizer, weight_decay=decay[0], decoupled_weight_decay=decay[1]
    )
    seeds = dtype != torch.float32
    expected = call.step(CPU, config, seeds=seeds)
    for schedule in SCHEDULES:
        cuda_operators.set_schedule(schedule)
        ours = call.step(emulated, config, seeds=seeds)
        # 16-bit rows may fall to their other neighbour where float32 sums differ in a bit
        for a, b in zip(ours, expected, strict=True):
            if dtype == torch.float32 or a.dtype != dtype:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            else:
                torch.testing.assert_close(a, b, rtol=torch.finfo(dtype).eps, atol=1e-3)
                assert (a != b).float().mean() < 0.02


def test_a_row_of_many_indices_steps_on_their_sum(emulated):
    call = CachedCall.of("3 cores", ratio=1.0, batch_size=3)
    count = 500
    call.indices = torch.randint(0, 4, (count,))
    call.offsets = torch.tensor([0, 7, 300, count])
    call.weights = torch.rand(count)
    config = TTOptimizerConfig(optimizer="rowwise_adagrad")
    assert int(call.plan(CPU)[5][1]) < int(call.plan(CPU)[5][0])
    for a, b in zip(
        call.step(emulated, config, seeds=False), call.step(CPU, config, seeds=False), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def counters(caches: Caches) -> tuple[list[Tensor], ...]:
    def made(size, dtype, fill):
        return [torch.full((size(len(ids)),), fill, dtype=dtype) for ids in caches.ids]

    return (
        made(lambda n: n, torch.float32, 0.0),
        made(lambda n: 2 * n, torch.int64, -1),
        made(lambda n: 2 * n, torch.float32, 0.0),
        made(lambda n: 3 + n % 4, torch.int64, 0),
    )


@pytest.mark.parametrize("clock", [0, 1], ids=["lfu", "lru"])
@pytest.mark.parametrize("seed", range(8))
def test_counts_are_the_cpus_bit_for_bit(clock, seed, cuda_operators, emulated):
    call = CachedCall.draw(100 + seed)
    ours, theirs = counters(call.caches), counters(call.caches)
    cuda_operators.set_schedule(seed % 5)
    rng = random.Random(seed)
    for step in range(5):
        shuffle = torch.randperm(len(call.indices)) if len(call.lookup.tables) == 1 else None
        call.indices = call.indices if shuffle is None else call.indices[shuffle]
        if rng.random() < 0.5:
            call.indices = call.indices // 2
        clocks = [clock * (step + 1)] * len(call.lookup.tables)
        for operators, own in ((emulated, ours), (CPU, theirs)):
            plan = call.plan(operators)
            operators.count_rows(plan, call.lookup.encoded_tables, *own, clocks)
    for own, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, own, other))


def test_a_batch_without_ids_counts_and_steps_nothing(emulated):
    call = CachedCall.of("3 cores", "4 cores")
    call.indices, call.weights = call.indices[:0], None
    call.offsets = torch.zeros_like(call.offsets)
    assert_close([call.forward(emulated)], [call.forward(CPU)])
    config = TTOptimizerConfig(optimizer="adam")
    for a, b in zip(
        call.step(emulated, config, seeds=False), call.step(CPU, config, seeds=False), strict=True
    ):
        assert torch.equal(a, b)
    own = counters(call.caches)
    emulated.count_rows(call.plan(emulated), call.lookup.encoded_tables, *own, [0, 0])
    assert not any(statistics.any() for statistics in own[3])


@pytest.mark.parametrize("offsets", [[0, 400, 3], [0, 9, 9], [-4, 1, 2]])
def test_u32_wrong_offsets_count_and_step_nothing(offsets, emulated):
    call = CachedCall.of("3 cores", ratio=1.0, batch_size=2)
    call.indices, call.weights = torch.zeros(400).long(), None
    call.offsets = torch.tensor(offsets)
    plan = call.plan(emulated)
    with pytest.raises(ValueError, match="offsets must"):
        emulated.check_errors(0)
    rows, own = [own.clone() for own in call.caches.rows], counters(call.caches)
    emulated.step_cached_rows(
        *(call.grad, plan, call.caches.ids, rows, [], *call.tail()[1:]),
        *("sgd", 0.1, 0.0, 0.9, 0.99, 0.0, False, []),
    )
    emulated.count_rows(plan, call.lookup.encoded_tables, *own, [0])
    emulated.embedding_bag_backward_dense(call.grad, plan, call.cores, *call.tail(), True)
    assert torch.equal(rows[0], call.caches.rows[0])
    assert not own[3][0].any()


def test_a_lookup_without_the_plans_caches_gives_no_other_row(emulated):
    call = CachedCall.of("3 cores", ratio=1.0, weighted=False)
    plan = call.plan(emulated)
    output = emulated.embedding_bag_forward(plan, call.cores, [], *call.tail()[1:])
    is_empty = call.offsets.diff() == 0
    assert output[is_empty].eq(0).all()
    assert output[~is_empty].isnan().all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_a_module_trains_its_caches_as_on_the_cpu(optimizer, policy, emulated, monkeypatch):
    """Plan, lookup, backward, steps, counting and refreshes together, 8 steps."""
    own = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.02)
    modules = [make_module(optimizer=own, policy=policy, refresh_growth=1) for _ in range(2)]
    batches = hot_batches(8, drift=20)
    for ids in batches:
        train(modules[0], ids)
    on_host = {name: getattr(CPU, name) for name in ("place_rows", "advise_huge_pages")}
    names = ("plan", "embedding_bag_forward", "embedding_bag_backward_dense", "count_rows")
    names += ("embedding_bag_backward_update", "step_cores", "step_cached_rows")
    device = SimpleNamespace(**on_host, **{name: getattr(emulated, name) for name in names})
    for module in (embedding_bag, row_cache, row_counter, step_cores):
        monkeypatch.setattr(module, "operators", lambda: device)
    for ids in batches:
        train(modules[1], ids)
    counts = [module.row_caches["t"].statistics_dict() for module in modules]
    assert counts[0]["refreshes"] == 3
    assert counts[0]["evictions"] > 0
    for name in ("hits", "misses", "unique_misses", "fills", "evictions", "refreshes"):
        assert counts[0][name] == counts[1][name], name
    states = [module.state_dict() for module in modules]
    for name, value in states[0].items():
        if value.is_floating_point():
            torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(states[1][name], value), name


def test_no_barrier_can_be_left_out(cuda_operators, emulated):
    call = CachedCall.of("3 cores", batch_size=40)
    config = TTOptimizerConfig(optimizer="rowwise_adagrad")

    def run() -> None:
        ours, theirs = (call.step(ops, config, seeds=False) for ops in (emulated, CPU))
        assert_close(ours, theirs)
        for a, b in zip(call.plan(emulated), call.plan(CPU), strict=True):
            assert torch.equal(a, b)
        cuda_operators.check()

    run()
    barriers = [b for b in cuda_operators.barriers() if "row_step.cu" in b or "plan.cu" in b]
    assert len(barriers) == 2
    for barrier in barriers:
        with (
            cuda_operators.without_barrier(barrier),
            pytest.raises((EmulationError, AssertionError, RuntimeError)),
        ):
            run()
        cuda_operators.calls.emulation_take_error()
