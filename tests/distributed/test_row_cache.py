"""Row caches of sharded tables: what lookups return and steps do, by a dictionary of rows."""

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import Tensor
from torch.nn.functional import embedding_bag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import CacheParams, ShardingPlan, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    EPS,
    KEYS,
    LR,
    NUM_IDS,
    full_state,
    kjt,
    on_meta,
    sharded,
    sharder,
    unsharded,
)
from torchrec_tt import (
    RowCacheConfig,
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
)
from torchrec_tt.distributed.planner.planners import tt_planner
from torchrec_tt.distributed.sharded_collection import ShardedTTCollection
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.tt.cores import dense

DP, TW, RW, TWRW = (
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)
TABLE_OF = {"f2": "t0", "f0": "t0", "f3": "t1"}  # TT tables by feature
OFTEN = RowCacheConfig(num_rows=16, first_refresh=2, refresh_growth=1)
BAGS = 6  # on every rank

Batch = tuple[list[Tensor], list[Tensor]]


def drifting_batch(step: int, *, busy: int) -> Batch:
    """Lengths and ids per feature: the first `busy` ranks' bags have hot ids, the others none."""
    generator = torch.Generator().manual_seed(step)
    bags = BAGS * dist.get_world_size()
    lengths, ids = [], []
    for key in KEYS:
        n = torch.randint(0, 6, (bags,), generator=generator)
        n[BAGS * busy :] = 0
        hot = torch.randint(0, 12, (int(n.sum()),), generator=generator) * 7 + step // 6
        rare = torch.randint(0, NUM_IDS[key], hot.shape, generator=generator)
        is_hot = torch.rand(hot.shape, generator=generator) < 0.8
        lengths.append(n)
        ids.append(torch.where(is_hot, hot, rare) % NUM_IDS[key])
    return lengths, ids


def own_part(batch: Batch) -> KeyedJaggedTensor:
    start = dist.get_rank() * BAGS
    return kjt(batch, start=start, stop=start + BAGS)


def collection_of(model: Any) -> ShardedTTCollection:
    return next(m for m in model.modules() if isinstance(m, ShardedTTCollection))


class Table:
    """A TT table with cached rows as the state dict of the whole model has it."""

    def __init__(self, state: Mapping[str, Tensor], name: str, shape: Any) -> None:
        prefix = f"ebc.embedding_bags.{name}."
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self.cores = [own[f"tt_cores.{k}"] for k in range(shape.num_cores)]
        self.sums: dict[int, Tensor] = {}
        self.rows: dict[int, Tensor] = {}
        self.shape = shape
        for key, ids in own.items():
            if key.endswith(".ids"):
                at = key.removesuffix("ids")
                for slot, row in enumerate(ids.long().tolist()):
                    if row >= 0:
                        assert row not in self.rows
                        self.rows[row] = own[f"{at}rows"][slot]
                        self.sums[row] = own[f"{at}sum"][slot]

    def dense(self, cores: list[Tensor], rows: Tensor) -> Tensor:
        table = dense(cores, shape=self.shape)
        return table.index_copy(0, torch.tensor(list(self.rows), dtype=torch.long), rows)


def check_refresh(before: Table, after: Table) -> None:
    """Rows that stay keep value and state; new ones are what the cores give, and have no past."""
    of_cores = dense(after.cores, shape=after.shape)
    for row, value in after.rows.items():
        if row in before.rows:
            assert torch.equal(value, before.rows[row])
            assert torch.equal(after.sums[row], before.sums[row])
        else:
            torch.testing.assert_close(value, of_cores[row])
            assert not after.sums[row].any()
    if after.rows.keys() >= before.rows.keys():  # nothing to fold
        for old, new in zip(before.cores, after.cores, strict=True):
            assert torch.equal(old, new)


def lookup(weights: Tensor, batch: Batch, feature: str) -> Tensor:  # [B, D]
    k = KEYS.index(feature)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), batch[0][k].cumsum(0)])
    return embedding_bag(batch[1][k], weights, offsets, mode="sum", include_last_offset=True)


def adagrad(value: Tensor, grad: Tensor, total: Tensor) -> Tensor:
    return value.detach() - LR * grad / (total.sqrt() + EPS)


def check_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def drive(
    rank: int, types: Mapping[str, str], busy: int, steps: int
) -> dict[str, dict[str, int | float]]:
    """Trains; after every forward and backward the state is what the dictionary says."""
    source = unsharded(caches={"t0": OFTEN, "t1": OFTEN})
    model, _ = sharded(source, types, optimizer="adagrad")
    shapes = source.ebc.tt_shapes

    def tables() -> dict[str, Table]:
        state = full_state(model.state_dict())
        check_replicas(state)
        return {name: Table(state, name, shape) for name, shape in shapes.items()}

    first, last = rank * BAGS, (rank + 1) * BAGS
    sums = {
        name: [torch.zeros_like(core) for core in table.cores] for name, table in tables().items()
    }
    for step in range(steps):
        batch = drifting_batch(step, busy=busy)
        old = tables()
        pooled = collection_of(model)(own_part(batch)).wait()
        now = tables()
        leaves, outputs = {}, {}
        for name, table in now.items():
            check_refresh(old[name], table)
            cores = [core.clone().requires_grad_() for core in table.cores]
            dim = table.shape.embedding_dim
            rows = torch.stack(list(table.rows.values()) or [torch.zeros(dim)])[: len(table.rows)]
            leaves[name] = (cores, rows.clone().requires_grad_())
        loss = torch.zeros(())
        for feature, name in TABLE_OF.items():
            table = now[name]
            cores, rows = leaves[name]
            output = lookup(table.dense(cores, rows), batch, feature)
            key = "f0@t0" if feature == "f0" else feature
            torch.testing.assert_close(pooled[key], output[first:last], rtol=1e-5, atol=1e-6)
            outputs[key] = output
            loss = loss + output.square().sum() / dist.get_world_size()
        loss.backward()
        sum(pooled[key].square().sum() for key in outputs).backward()
        for name, table in tables().items():
            cores, rows = leaves[name]
            for k, core in enumerate(cores):
                sums[name][k] += core.grad.square()
                check_near(table.cores[k], adagrad(core, core.grad, sums[name][k]))
            for k, row in enumerate(now[name].rows):
                total = now[name].sums[row] + rows.grad[k].square()
                check_near(table.sums[row], total)
                check_near(table.rows[row], adagrad(rows[k], rows.grad[k], total))
    return collection_of(model).row_cache_statistics()


def check_replicas(state: Mapping[str, Tensor]) -> None:
    """Cores that every rank has are the same on all of them, bit for bit."""
    for key, value in state.items():
        if ".tt_cores." in key:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value)
            assert all(torch.equal(part, value) for part in parts), key


# U23: rank 1 has no ids at all in the case of one busy rank.
@pytest.mark.slow
@pytest.mark.parametrize("types", [{"t0": TW, "t1": RW}, {"t0": RW, "t1": TW}])
@pytest.mark.parametrize("busy", [1, 2])
def test_a_sharded_row_is_what_the_dictionary_says(
    two_ranks: Ranks, types: Mapping[str, str], busy: int
) -> None:
    results = two_ranks.run(drive, types, busy, 20)
    counted = [table for result in results for table in result.values()]
    assert len(counted) == 3  # one of the table-wise table, two of the row-wise one
    for what, least in (("evictions", 10), ("hits", 100)):
        assert sum(table[what] for table in counted) > least


# U23: rank 2 has no ids at all, and blocks of rows that end within a step of the row factors.
@pytest.mark.slow
def test_u23_a_row_wise_row_is_what_the_dictionary_says_with_one_of_three_ranks_idle(
    three_ranks: Ranks,
) -> None:
    results = three_ranks.run(drive, {"t0": RW, "t1": RW}, 2, 14)
    for name in ("t0", "t1"):
        counted = [result[name] for result in results]
        assert {table["refreshes"] for table in counted} == {6}
        assert all(table["hits"] > 0 for table in counted)  # the idle rank answers for its block
        assert sum(table["evictions"] for table in counted) > 4


def train(model: Any, steps: range) -> None:
    for step in steps:
        pooled = collection_of(model)(own_part(drifting_batch(step, busy=1))).wait()
        pooled.values().square().sum().backward()


def many_steps(rank: int, types: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What caches counted, and the cores on this rank."""
    model, _ = sharded(unsharded(caches={"t0": OFTEN, "t1": OFTEN}), types, optimizer="adagrad")
    train(model, range(60))
    cores = {k: v for k, v in model.named_parameters() if "tt_cores" in k and v.numel()}
    return collection_of(model).row_cache_statistics(), cores


# U23
@pytest.mark.slow
def test_u23_replicas_stay_equal_where_three_of_four_ranks_never_have_ids(two_nodes: Ranks) -> None:
    results = two_nodes.run(many_steps, {"t0": TWRW, "t1": RW})
    counted = [table for tables, _ in results for table in tables.values()]
    assert len(counted) == 2 + 4  # t0 on the ranks of a node
    assert all(table["refreshes"] == 29 for table in counted)
    assert sum(table["evictions"] for table in counted) > 100
    for name in results[0][1] | results[-1][1]:
        first, *others = [cores[name] for _, cores in results if name in cores]
        assert others
        assert all(torch.equal(first, other) for other in others)


def refreshes(model: Any) -> list[int]:
    counted = collection_of(model).row_cache_statistics()
    return [int(table["refreshes"]) for table in counted.values()]


def hold_a_lookup(rank: int) -> None:
    """A lookup of rank 1 that waits for its backward puts off the refresh on both."""
    model, _ = sharded(unsharded(caches={"t1": OFTEN}), {"t0": TW, "t1": RW}, optimizer="adagrad")
    train(model, range(2))
    held = collection_of(model)(own_part(drifting_batch(2, busy=2))).wait().values()
    assert refreshes(model) == [1]
    if rank == 0:
        del held
    for step in range(3, 6):
        collection_of(model)(own_part(drifting_batch(step, busy=2))).wait()
    assert refreshes(model) == [1]
    if rank == 1:
        del held
    gc.collect()  # TorchRec's lookups are rings of references
    train(model, range(6, 7))
    assert refreshes(model) == [2]


@pytest.mark.slow
def test_a_refresh_waits_on_every_rank_for_a_lookup_in_flight_on_one(two_ranks: Ranks) -> None:
    two_ranks.run(hold_a_lookup)


def evaluate_between(rank: int) -> None:
    """Neither evaluation nor a lookup without gradients counts or changes anything."""
    model, _ = sharded(
        unsharded(caches={"t0": OFTEN, "t1": OFTEN}), {"t0": TW, "t1": RW}, optimizer="adagrad"
    )
    train(model, range(5))
    before = full_state(model.state_dict())
    batch = own_part(drifting_batch(5, busy=2))
    model.eval()
    collection_of(model)(batch).wait()
    model.train()
    with torch.no_grad():
        collection_of(model)(batch).wait()
    for key, value in full_state(model.state_dict()).items():
        assert torch.equal(value, before[key]), key
    train(model, range(5, 6))
    assert any(not v.equal(before[k]) for k, v in full_state(model.state_dict()).items())


@pytest.mark.slow
def test_evaluation_leaves_row_caches_as_they_are(two_ranks: Ranks) -> None:
    two_ranks.run(evaluate_between)


def follow_the_rate(rank: int) -> None:
    """Rows are stepped at the rate of the cores, whichever it is at the step."""
    model, optimizer = sharded(
        unsharded(caches={"t0": OFTEN, "t1": OFTEN}), {"t0": RW, "t1": TW}, optimizer="sgd"
    )
    train(model, range(3))
    before = full_state(model.state_dict())
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.0
    collection_of(model).load_state_dict(collection_of(model).state_dict())
    train(model, range(3, 4))  # no refresh is due
    after = full_state(model.state_dict())
    for key in (k for k in after if ".rows" in k or "tt_cores" in k):
        assert torch.equal(after[key], before[key]), key
    assert optimizer is not None


@pytest.mark.slow
def test_the_learning_rate_of_param_groups_is_that_of_the_rows(two_ranks: Ranks) -> None:
    two_ranks.run(follow_the_rate)


def share_a_table(rank: int) -> dict[str, dict[str, int | float]]:
    """Both features of t0 ask for the same 4 rows, 6 bags each, on both ranks."""
    cache = RowCacheConfig(num_rows=8, first_refresh=1)
    model, _ = sharded(unsharded(caches={"t0": cache}), {"t0": RW, "t1": TW}, optimizer="sgd")
    bags = BAGS * dist.get_world_size()
    lengths = [torch.full((bags,), int(key in ("f0", "f2"))) for key in KEYS]
    same = torch.arange(bags) % 4
    ids = [same if key in ("f0", "f2") else same[:0] for key in KEYS]
    for _ in range(3):
        pooled = collection_of(model)(own_part((lengths, ids))).wait()
        pooled.values().sum().backward()
    return collection_of(model).row_cache_statistics()


# U35, U55: 2 features x 12 bags a step, of which the first misses.
@pytest.mark.slow
def test_u35_features_of_a_sharded_table_count_a_row_once(two_ranks: Ranks) -> None:
    first, second = (result["t0"] for result in two_ranks.run(share_a_table))
    assert (first["unique_misses"], first["misses"], first["hits"]) == (4, 24, 48)
    assert (second["misses"], second["hits"], second["fills"]) == (0, 0, 0)


def plan_from_constraints(rank: int) -> dict[str, tuple[int, str]]:
    """Slots and policy of the caches that `cache_params` of constraints give this rank."""
    sharders = [sharder("sgd")]
    model = on_meta(unsharded(caches={"t1": OFTEN}))
    params = CacheParams(load_factor=0.2, algorithm=CacheAlgorithm.LRU)
    constraints = {
        "t0": ParameterConstraints(sharding_types=[RW], cache_params=params),
        "t1": ParameterConstraints(sharding_types=[RW]),
    }
    topology = Topology(world_size=2, compute_device="cpu")
    planner = tt_planner(topology, batch_size=BAGS, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded_model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    train(sharded_model, range(3))
    caches = collection_of(sharded_model)._row_caches()
    return {name: (cache.num_slots, cache.config.policy) for name, cache in caches.items()}


# U11
@pytest.mark.slow
def test_u11_cache_params_of_a_constraint_reach_the_kernel(two_ranks: Ranks) -> None:
    # 0.2 of 55 rows are 11, in whole sets 16.
    expected = {"t0": (16, "lru"), "t1": (16, "lfu")}
    assert two_ranks.run(plan_from_constraints) == [expected] * 2


def train_at_the_defaults(rank: int) -> tuple[int, list[tuple[float, int]]]:
    """Hits of the default cache, and what its optimizer is told."""
    cache = RowCacheConfig(num_rows=16)
    model, _ = sharded(
        unsharded(caches={"t0": cache, "t1": cache}),
        {"t0": TW, "t1": RW, "r0": DP, "r1": DP},  # FBGEMM has no Adam on the CPU
        tt_sharder=TTEmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}
        ),
        load=False,
    )
    train(model, range(100))
    hits = sum(table["hits"] for table in collection_of(model).row_cache_statistics().values())
    told = []
    for kernel in collection_of(model)._tt_kernels():
        kernel.fused_optimizer.update_hyper_parameters({"weight_decay": 0.5})
        kernel.fused_optimizer.set_optimizer_step(7)
    for own in collection_of(model)._row_caches().values():
        told.append((own.optimizer.weight_decay, int(own.step)))
    return int(hits), told


# U53, and U54: there are regular tables beside.
@pytest.mark.slow
def test_u53_sharded_caches_work_by_themselves_and_follow_the_optimizer(two_ranks: Ranks) -> None:
    for hits, told in two_ranks.run(train_at_the_defaults):
        assert hits > 0
        assert set(told) == {(0.5, 7)}


def row_wise_table(
    num_embeddings: int, cache: RowCacheConfig, *, world_size: int
) -> tuple[DistributedModelParallel, RowCache]:
    """A sharded collection of one table of feature "f", and this rank's cache of it."""
    table = TTEmbeddingBagConfig(
        name="t",
        num_embeddings=num_embeddings,
        embedding_dim=4,
        feature_names=["f"],
        tt_ranks=[2],
        cache=cache,
    )
    sharder = TTEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        TTEmbeddingBagCollection([table], device="meta"),
        {"t": row_wise()},
        sharder=sharder,
        local_size=2,
        world_size=world_size,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        TTEmbeddingBagCollection([table], device="meta"),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    (cache_of_rank,) = [kernel.row_cache("t") for kernel in collection_of(model)._tt_kernels()]
    return model, cache_of_rank


def train_a_tiny_table(rank: int) -> tuple[int, int]:
    """5 rows over 4 ranks in blocks of 2, 2, 1 and 0: slots and refreshes on this rank."""
    config = RowCacheConfig(load_factor=0.9, first_refresh=1, refresh_growth=1)
    model, cache = row_wise_table(5, config, world_size=4)
    features = KeyedJaggedTensor(["f"], torch.arange(5), lengths=torch.ones(5, dtype=torch.long))
    for _ in range(4):
        model(features).values().square().sum().backward()
    state = model.state_dict()
    model.load_state_dict(state)
    return cache.num_slots, cache.statistics_dict()["refreshes"]


@pytest.mark.slow
def test_a_rank_without_rows_has_a_cache_of_no_slots(two_nodes: Ranks) -> None:
    assert two_nodes.run(train_a_tiny_table) == [(8, 3), (8, 3), (8, 3), (0, 3)]


def refresh_at_the_default_intervals(rank: int) -> tuple[int, int, list[int]]:
    """Slots, what their interval would be, and the steps that began with a refresh."""
    config = RowCacheConfig(load_factor=0.9999, first_refresh=20, refresh_growth=10)
    model, cache = row_wise_table(2033, config, world_size=2)
    steps, counted = [], 0
    for step in range(500):
        ids = torch.randint(0, 2033, (4 * (rank + 1),), generator=torch.manual_seed(step))
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([len(ids)]))
        model(features).values().sum().backward()
        refreshes = cache.statistics_dict()["refreshes"]
        if refreshes > counted:
            steps.append(step)
        counted = refreshes
    return cache.num_slots, cache.config.greatest_interval(cache.table.block_size), steps


@pytest.mark.slow
def test_shards_of_unlike_slots_refresh_at_the_same_steps(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(refresh_at_the_default_intervals)
    assert (first[:2], last[:2]) == ((1024, 102), (1016, 101))  # alone they would part
    assert first[2] == last[2] == [20, 20 + 200, 20 + 200 + 204]  # 2,040 slots together
