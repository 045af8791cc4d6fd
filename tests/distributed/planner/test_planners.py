import copy
import dataclasses
import pickle
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Topology,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import BATCH_SIZE, ToyModel, batches, kjt, sharder, tables
from torchrec_tt import TTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder
from torchrec_tt.distributed.planner.planners import TTEmbeddingShardingPlanner, tt_planner
from torchrec_tt.distributed.sharding_plan import TT_COMPUTE_KERNEL
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.tt.traffic import Traffic

MIB = 1024**2
TT_KINDS = ["data_parallel", "row_wise", "table_row_wise", "table_wise"]


def planner(
    *,
    ddr_cap: int = 512 * MIB,
    constraints: dict[str, ParameterConstraints] | None = None,
) -> TTEmbeddingShardingPlanner:
    topology = Topology(
        world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=ddr_cap, hbm_cap=0
    )
    return tt_planner(
        topology,
        batch_size=128,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )


def toy(pooling: PoolingType = PoolingType.SUM) -> ToyModel:
    return ToyModel(TTEmbeddingBagCollection(tables(pooling), device="meta"))


def test_u03_ten_million_rows_fit_into_512_mib_as_tt_and_not_as_rows() -> None:
    size = {"name": "big", "num_embeddings": 10_000_000, "embedding_dim": 64}
    tt = TTEmbeddingBagConfig(**size, feature_names=["f"], tt_ranks=[16, 16])
    model = nn.Sequential(TTEmbeddingBagCollection([tt], device="meta"))
    plan = planner().plan(model, [TTEmbeddingBagCollectionSharder()])
    assert plan.plan["0"]["big"].compute_kernel == TT_COMPUTE_KERNEL
    rows = EmbeddingBagConfig(**size, feature_names=["f"])
    model = nn.Sequential(EmbeddingBagCollection([rows], device="meta"))
    with pytest.raises(PlannerError) as error:
        planner().plan(model, [EmbeddingBagCollectionSharder()])
    assert error.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_u02_a_table_of_8_rows_is_planned() -> None:
    tiny = TTEmbeddingBagConfig(
        name="tiny", num_embeddings=8, embedding_dim=4, feature_names=["f"], tt_ranks=[2, 2]
    )
    model = nn.Sequential(TTEmbeddingBagCollection([tiny], device="meta"))
    plan = planner().plan(model, [TTEmbeddingBagCollectionSharder()])
    assert plan.plan["0"]["tiny"].compute_kernel == TT_COMPUTE_KERNEL


def test_tables_too_large_for_any_rank_are_refused_as_by_torchrec() -> None:
    with pytest.raises(PlannerError) as error:
        planner(ddr_cap=10_000).plan(toy(), [TTEmbeddingBagCollectionSharder()])
    assert error.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_u08_planning_without_the_tt_sharder_raises() -> None:
    with pytest.raises(ValueError, match=r"TTEmbeddingBagCollectionSharder.*module 'ebc'"):
        planner().plan(toy(), get_default_sharders())


def test_a_misspelt_fused_param_is_refused_when_planning() -> None:
    sharder = TTEmbeddingBagCollectionSharder(fused_params={"learning_rat": 0.1})
    with pytest.raises(ValueError, match="'learning_rat'; the nearest is 'learning_rate'"):
        planner().plan(toy(), [sharder])


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, None, True])
def test_a_batch_size_that_is_no_positive_integer_is_refused(batch_size: Any) -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    with pytest.raises(ValueError, match=f"batch_size must be a positive .* got {batch_size}"):
        tt_planner(topology, batch_size=batch_size)


def test_default_sharders_and_the_tt_one_plan_every_table() -> None:
    sharders = [*get_default_sharders(), TTEmbeddingBagCollectionSharder()]
    plan = planner().plan(toy(), sharders)
    assert set(plan.plan["ebc"]) == {"r0", "t0", "r1", "t1"}


def test_mean_tables_are_planned_beside_row_wise_ones() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["row_wise"]),
        "t1": ParameterConstraints(sharding_types=["table_wise"]),
    }
    plan = planner(constraints=constraints).plan(
        toy(PoolingType.MEAN), [TTEmbeddingBagCollectionSharder()]
    )
    assert plan.plan["ebc"]["t0"].sharding_type == "row_wise"


def collective_errors(rank: int) -> list[tuple[str, str]]:
    cases = [
        (planner(ddr_cap=10_000), [TTEmbeddingBagCollectionSharder()]),
        (planner(), get_default_sharders()),
        (
            planner(constraints={"t0": ParameterConstraints(sharding_types=["column_wise"])}),
            [TTEmbeddingBagCollectionSharder()],
        ),
    ]
    errors = []
    for a_planner, sharders in cases:
        start = time.monotonic()
        with pytest.raises((ValueError, PlannerError)) as error:
            a_planner.collective_plan(toy(), sharders, dist.group.WORLD)
        assert time.monotonic() - start < 5
        errors.append((type(error.value).__name__, str(error.value)))
    dist.barrier()
    return errors


@pytest.mark.slow
def test_u07_a_planning_error_is_raised_on_every_rank_within_seconds(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(collective_errors)
    assert first == second
    assert [kind for kind, _ in first] == ["PlannerError", "ValueError", "ValueError"]


def collective_plan(rank: int) -> dict[str, str]:
    plan = planner().collective_plan(toy(), [TTEmbeddingBagCollectionSharder()])
    return {name: str(sharding) for name, sharding in plan.plan["ebc"].items()}


@pytest.mark.slow
def test_every_rank_gets_the_same_plan(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(collective_plan)
    assert first == second
    assert set(first) == {"r0", "t0", "r1", "t1"}


def every_option(rank: int) -> list[str]:
    """A model for each option that the planner has for a TT and a regular table runs and learns.

    Returns the TT table's options.
    """
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    sharders = [TTEmbeddingBagCollectionSharder()]
    asked = {
        "t0": ParameterConstraints(sharding_types=TT_KINDS),
        "r0": ParameterConstraints(sharding_types=[kind.value for kind in ShardingType]),
    }
    enumerator = tt_planner(topology, batch_size=BATCH_SIZE, constraints=asked)._enumerator
    options = enumerator.enumerate(toy(), sharders)
    found = sorted(
        {(o.name, o.sharding_type, o.compute_kernel) for o in options if o.name in asked}
    )
    (batch,) = batches(1, size=BATCH_SIZE * world_size)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    for name, kind, kernel in found:
        only = ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel])
        one = tt_planner(topology, batch_size=BATCH_SIZE, constraints={name: only})
        meta = toy()
        plan = one.collective_plan(meta, sharders, dist.group.WORLD)
        model = DistributedModelParallel(
            meta, device=torch.device("cpu"), plan=plan, sharders=sharders
        )
        own = [p for key, p in model.named_parameters() if f".{name}." in key and p.numel()]
        before = [p.detach().clone() for p in own]
        output = model(features)
        assert output.isfinite().all()
        output.sum().backward()
        for old, new in zip(before, own, strict=True):
            assert new.grad is not None or not torch.equal(old, new), (name, kind, kernel)
    return [f"{kind} {kernel}" for name, kind, kernel in found if name == "t0"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_u12_every_option_of_the_planner_builds_and_learns(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue(ranks).run(every_option):
        assert found == [f"{kind} {TT_COMPUTE_KERNEL}" for kind in TT_KINDS]


def test_constraints_on_tables_that_are_not_there_are_refused_with_the_nearest() -> None:
    misspelt = {"t00": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(ValueError, match=r"constraints must name tables .* got 't00'.* 't0'"):
        planner(constraints=misspelt).plan(toy(), [TTEmbeddingBagCollectionSharder()])


def test_traffic_of_tables_that_are_not_there_is_refused_with_the_nearest() -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    one = tt_planner(topology, batch_size=8, traffic={"t2": Traffic()})
    with pytest.raises(ValueError, match=r"traffic must name tables .* got 't2'"):
        one.plan(toy(), [TTEmbeddingBagCollectionSharder()])


def test_u06_an_error_names_the_table_its_bytes_the_cap_and_a_rank_that_fits() -> None:
    rows = EmbeddingBagConfig(
        name="huge", num_embeddings=10**9, embedding_dim=128, feature_names=["f"]
    )
    model = nn.Sequential(EmbeddingBagCollection([rows], device="meta"))
    with pytest.raises(PlannerError) as error:
        planner(ddr_cap=1024 * MIB).plan(model, [EmbeddingBagCollectionSharder()])
    assert error.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    message = str(error.value)
    assert "\n" not in message
    assert "table 'huge' needs at least 512," in message  # 10^9 x 128 x 4 bytes and its IO
    assert f"a rank has {1024 * MIB:,}" in message
    assert "as a TT table of rank 256 it would need" in message


def test_a_tt_table_that_does_not_fit_is_told_a_lower_rank() -> None:
    tt = TTEmbeddingBagConfig(
        name="big", num_embeddings=10**7, embedding_dim=64, feature_names=["f"], tt_ranks=[64, 64]
    )
    model = nn.Sequential(TTEmbeddingBagCollection([tt], device="meta"))
    with pytest.raises(PlannerError, match=r"table 'big' needs at least .* of rank (\d+)") as error:
        planner(ddr_cap=8 * MIB).plan(model, [TTEmbeddingBagCollectionSharder()])
    rank = int(re.search(r"of rank (\d+)", str(error.value)).group(1))
    fitting = dataclasses.replace(tt, tt_ranks=[rank, rank])
    model = nn.Sequential(TTEmbeddingBagCollection([fitting], device="meta"))
    planner(ddr_cap=8 * MIB).plan(model, [TTEmbeddingBagCollectionSharder()])


def test_a_row_cache_that_does_not_fit_is_told_a_smaller_one() -> None:
    tt = TTEmbeddingBagConfig(
        name="big",
        num_embeddings=10**6,
        embedding_dim=64,
        feature_names=["f"],
        tt_ranks=[16, 16],
        cache=RowCacheConfig(load_factor=0.9),
    )
    model = nn.Sequential(TTEmbeddingBagCollection([tt], device="meta"))
    with pytest.raises(PlannerError, match="its row cache takes") as error:
        planner(ddr_cap=64 * MIB).plan(model, [TTEmbeddingBagCollectionSharder()])
    load_factor = float(re.search(r"load_factor ([\d.e-]+)", str(error.value)).group(1))
    assert load_factor >= 0.05
    fitting = dataclasses.replace(tt, cache=RowCacheConfig(load_factor=load_factor))
    model = nn.Sequential(TTEmbeddingBagCollection([fitting], device="meta"))
    planner(ddr_cap=64 * MIB).plan(model, [TTEmbeddingBagCollectionSharder()])


def test_tables_that_fit_one_by_one_but_not_together_are_added_up() -> None:
    many = [
        EmbeddingBagConfig(
            name=f"r{i}", num_embeddings=100_000, embedding_dim=64, feature_names=[f"f{i}"]
        )
        for i in range(8)
    ]
    model = nn.Sequential(EmbeddingBagCollection(many, device="meta"))
    with pytest.raises(PlannerError, match=r"all tables need .* largest table is 'r0'"):
        planner(ddr_cap=64 * MIB).plan(model, [EmbeddingBagCollectionSharder()])


def many_tables(count: int, *, is_tt: bool) -> nn.Module:
    size = {"num_embeddings": 1_000_000, "embedding_dim": 64}
    kind, kwargs = (
        (TTEmbeddingBagConfig, {"tt_ranks": [16, 16]})
        if is_tt
        else (
            EmbeddingBagConfig,
            {},
        )
    )
    tables = [kind(name=f"t{i}", feature_names=[f"f{i}"], **size, **kwargs) for i in range(count)]
    collection = TTEmbeddingBagCollection if is_tt else EmbeddingBagCollection
    return nn.Sequential(collection(tables, device="meta"))


def timed_planner(seconds: Any, *, ddr_cap: int = 512 * MIB) -> TTEmbeddingShardingPlanner:
    return tt_planner(
        Topology(world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=ddr_cap),
        batch_size=128,
        timeout_seconds=seconds,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )


def test_a_time_out_before_any_plan_is_no_lack_of_storage() -> None:
    with pytest.raises(PlannerError, match=r"^timeout_seconds .* got 1e-09 and 0 prop") as error:
        timed_planner(1e-9).plan(toy(), [TTEmbeddingBagCollectionSharder()])
    assert error.value.error_type == PlannerErrorType.OTHER


def test_a_time_out_does_not_hide_that_a_table_is_too_large() -> None:
    with pytest.raises(PlannerError, match="'t0' needs at least") as error:
        timed_planner(1e-9, ddr_cap=10_000).plan(toy(), [TTEmbeddingBagCollectionSharder()])
    assert error.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "3", True])
def test_a_time_out_that_is_no_positive_number_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=f"timeout_seconds must be positive .* got {seconds!r}"):
        timed_planner(seconds)


def test_an_enumerator_that_knows_no_tt_tables_is_refused() -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    with pytest.raises(ValueError, match="must be a TTEmbeddingEnumerator, got EmbeddingEnum"):
        tt_planner(topology, batch_size=8, enumerator=EmbeddingEnumerator(topology, 8))


def test_reserving_more_than_there_is_leaves_nothing_and_not_less() -> None:
    one = tt_planner(
        Topology(world_size=2, local_world_size=2, compute_device="cpu"), batch_size=2**40
    )
    with pytest.raises(PlannerError, match="a rank has 0 "):
        one.plan(toy(), [TTEmbeddingBagCollectionSharder()])


def test_a_report_is_of_the_module_that_was_planned() -> None:
    one, sharders = planner(), [TTEmbeddingBagCollectionSharder()]
    one.plan(toy(), sharders)
    with pytest.raises(ValueError, match="plan must be given for another module"):
        one.report(many_tables(2, is_tt=True), sharders)


def test_a_planner_plans_again_and_after_pickling() -> None:
    one, sharders = planner(), [TTEmbeddingBagCollectionSharder()]
    first = one.plan(toy(), sharders)
    again = pickle.loads(pickle.dumps(one))
    for other in (one, again, copy.deepcopy(one)):
        assert str(other.plan(toy(), sharders)) == str(first)


def other_topology_errors(rank: int) -> str:
    topology = Topology(world_size=4, local_world_size=4, compute_device="cpu")
    one = tt_planner(topology, batch_size=8)
    with pytest.raises(ValueError, match="process group") as error:
        one.collective_plan(toy(), [TTEmbeddingBagCollectionSharder()])
    return str(error.value)


@pytest.mark.slow
def test_a_topology_of_other_ranks_than_the_groups_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(other_topology_errors):
        assert re.search("divides the 2 ranks of the process group, got 4", message)


@pytest.mark.slow
def test_a_time_out_ends_planning_with_the_best_plan_so_far() -> None:
    model, sharders = many_tables(40, is_tt=False), [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=16, local_world_size=8, compute_device="cuda")
    found = {}
    for seconds in (1, 600):
        one = tt_planner(topology, batch_size=128, timeout_seconds=seconds)
        one._enumerator.enumerate(model, sharders)  # it is not what the limit is for
        start = time.process_time()
        plan = one.plan(model, sharders)
        found[seconds] = (time.process_time() - start, one._num_proposals)
        assert len(plan.plan["0"]) == 40
    assert found[1][1] < found[600][1]
    assert found[1][0] < found[600][0]


@pytest.mark.slow
def test_tt_tables_are_planned_in_the_time_of_as_many_regular_ones() -> None:
    topology = Topology(world_size=16, local_world_size=8, compute_device="cuda")
    stock = EmbeddingShardingPlanner(topology=topology, batch_size=128, debug=False)
    ours = tt_planner(topology, batch_size=128)
    seconds = []
    for one, its_sharder, is_tt in (
        (stock, EmbeddingBagCollectionSharder(), False),
        (ours, TTEmbeddingBagCollectionSharder(), True),
    ):
        model = many_tables(16, is_tt=is_tt)
        start = time.process_time()
        one.plan(model, [its_sharder])
        seconds.append(time.process_time() - start)
    assert seconds[1] < 1.2 * seconds[0]


def bytes_on_this_rank(rank: int, optimizer: str) -> dict[str, tuple[int, int]]:
    """By table, what the planner counted on this rank and what is there after sharding."""
    cached = tables()
    for config in cached:
        if config.name in ("t0", "t1"):
            config.cache = RowCacheConfig(load_factor=0.2)
    sharders = [sharder(optimizer)]
    model = ToyModel(TTEmbeddingBagCollection(cached, device="meta"))
    kinds = {"t0": "row_wise", "t1": "table_wise", "r0": "table_wise", "r1": "table_wise"}
    one = planner(
        constraints={n: ParameterConstraints(sharding_types=[k]) for n, k in kinds.items()}
    )
    plan = one.collective_plan(model, sharders, dist.group.WORLD)
    report = one.report(model, sharders, plan)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    features = kjt(batches(1, size=2 * BATCH_SIZE)[0], start=0, stop=BATCH_SIZE)
    dmp(features).sum().backward()  # optimizers make their state at the first step
    found = {}
    for entry in report.tables:
        counted = 0
        if rank in entry.ranks:
            rows = {"r0": 100 * 16 * 4, "r1": 200 * 8 * 4}.get(entry.table, 0)
            kept = entry.storage
            counted = kept.cores + kept.optimizer + kept.cache if entry.is_tt else rows
        there = sum(
            p.nbytes for name, p in dmp.named_parameters() if f".{entry.table}." in name
        ) + sum(local_bytes(s) for s in optimizer_states(dmp, entry.table) if entry.is_tt)
        caches = dmp.module.ebc._row_caches()
        there += caches[entry.table].num_bytes if entry.table in caches else 0
        found[entry.table] = (counted, there)
    return found


def optimizer_states(model: DistributedModelParallel, table: str) -> list[Any]:
    return [
        value
        for name, state in model.fused_optimizer.state_dict()["state"].items()
        if f".{table}." in name
        for key, value in state.items()
        if "step" not in key
    ]


def local_bytes(state: Any) -> int:
    shards = state.local_shards() if isinstance(state, ShardedTensor) else None
    return state.nbytes if shards is None else sum(s.tensor.nbytes for s in shards)


# U03
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_storage_is_what_is_there_after_sharding(optimizer: str, two_ranks: Ranks) -> None:
    for found in two_ranks.run(bytes_on_this_rank, optimizer):
        for counted, there in found.values():
            assert counted == there
