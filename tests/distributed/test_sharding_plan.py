"""What a plan may say; refused from the global plan, the same on every rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch.distributed.device_mesh import init_device_mesh
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    CacheParams,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import DataType, PoolingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    batches,
    kjt,
    on_meta,
    sharder,
    tables,
    unsharded,
)
from torchrec_tt import (
    RowCacheConfig,
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
)
from torchrec_tt.distributed.row_cache import row_cache_config
from torchrec_tt.distributed.sharding_plan import (
    TT_COMPUTE_KERNEL,
    check_plan,
    with_tt_kernel,
)
from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig


def collection(pooling: PoolingType = PoolingType.SUM) -> TTEmbeddingBagCollection:
    return TTEmbeddingBagCollection(tables(pooling), device="meta")


def hand_made(
    ebc: TTEmbeddingBagCollection, *, world_size: int = 2, **generators: Any
) -> dict[str, ParameterSharding]:
    """A plan for nodes of 2 ranks; tables that are not named are table-wise on rank 0."""
    return construct_module_sharding_plan(
        ebc,
        {c.name: generators.get(c.name, table_wise(rank=0)) for c in ebc.embedding_bag_configs()},
        sharder=TTEmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=world_size,
        device_type="cpu",
    )


def test_u14_a_hand_made_plan_is_accepted() -> None:
    ebc = collection()
    plan = hand_made(ebc, t0=table_wise(rank=1), t1=row_wise(), r1=data_parallel())
    check_plan(ebc, plan, world_size=2)
    assert plan["t0"].ranks == [1]


def test_tt_tables_are_moved_to_the_tt_kernel_and_regular_ones_are_not() -> None:
    ebc = collection()
    plan = hand_made(ebc)
    kernels = {name: p.compute_kernel for name, p in with_tt_kernel(ebc, plan).items()}
    assert kernels["t0"] == kernels["t1"] == TT_COMPUTE_KERNEL
    assert kernels["r0"] == kernels["r1"] == plan["r0"].compute_kernel != TT_COMPUTE_KERNEL
    assert plan["t0"].compute_kernel != TT_COMPUTE_KERNEL  # the caller's plan stays as it was


# U10
@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise", "grid_shard", "no_such_type"])
def test_other_sharding_types_are_refused_by_table_and_allowed_types(kind: str) -> None:
    ebc = collection()
    plan = hand_made(ebc)
    plan["t0"].sharding_type = kind
    message = f"data_parallel.*table_wise.*row_wise.*table_row_wise.*got '{kind}' for table 't0'"
    with pytest.raises(ValueError, match=message):
        check_plan(ebc, plan, world_size=2)
    plan["t0"].sharding_type = ShardingType.TABLE_WISE.value
    plan["r0"] = hand_made(ebc, r0=column_wise(ranks=[0, 1]))["r0"]  # a regular table may
    check_plan(ebc, plan, world_size=2)


def with_cache(cache: RowCacheConfig | None) -> TTEmbeddingBagCollection:
    own = tables()
    own[1].cache = cache  # of t0
    return TTEmbeddingBagCollection(own, device="meta")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (CacheParams(load_factor=0.0), r"load_factor must be in \(0, 1\), got 0.0 for table 't0'"),
        (CacheParams(load_factor="x"), r"load_factor must be in \(0, 1\), got 'x' for table 't0'"),
        (CacheParams(algorithm="lfu"), r"algorithm must be one of .*, got 'lfu' for table 't0'"),
        (CacheParams(load_factor=1.5), r"load_factor must be in \(0, 1\), got 1.5 for table 't0'"),
        (CacheParams(algorithm=CacheAlgorithm.LRU), "load_factor must be given .* table 't0'"),
        (CacheParams(load_factor=0.2, precision=DataType.INT8), "precision must be one of"),
        (CacheParams(load_factor=0.2, reserved_memory=8.0), "reserved_memory must be unset"),
    ],
)
def test_u11_cache_params_that_a_row_cache_cannot_follow_are_refused(
    params: CacheParams, message: str
) -> None:
    ebc = collection()
    plan = hand_made(ebc)
    plan["r0"].cache_params = params  # TorchRec's to judge
    check_plan(ebc, plan, world_size=2)
    plan["t0"].cache_params = params
    with pytest.raises(ValueError, match=message):
        check_plan(ebc, plan, world_size=2)


def test_u11_cache_params_precede_the_cache_of_the_config_setting_by_setting() -> None:
    own = RowCacheConfig(num_rows=16, decay=0.25, dtype=torch.float16)
    config = with_cache(own).embedding_bag_configs()[1]
    assert row_cache_config(config, None) == own
    params = CacheParams(load_factor=0.2, algorithm=CacheAlgorithm.LRU, precision=DataType.BF16)
    assert row_cache_config(config, params) == RowCacheConfig(
        load_factor=0.2, policy="lru", decay=0.25, dtype=torch.bfloat16
    )
    config.cache = None
    assert row_cache_config(config, params) == RowCacheConfig(
        load_factor=0.2, policy="lru", dtype=torch.bfloat16
    )


def test_a_data_parallel_table_with_a_row_cache_is_refused_with_the_reason() -> None:
    for own, params in (
        (RowCacheConfig(num_rows=8), None),
        (None, CacheParams(load_factor=0.2)),
    ):
        ebc = with_cache(own)
        plan = hand_made(ebc, t0=data_parallel())
        plan["t0"].cache_params = params
        message = "got 'data_parallel' for table 't0': with a row cache every replica would need"
        with pytest.raises(ValueError, match=message):
            check_plan(ebc, plan, world_size=2)


# U36
def test_output_dtypes_other_than_fp32_are_refused_beside_tt_tables() -> None:
    ebc = collection()
    for name in ("t0", "r0"):
        plan = hand_made(ebc)
        plan[name].output_dtype = DataType.FP32
        check_plan(ebc, plan, world_size=2)
        plan[name].output_dtype = DataType.FP16
        with pytest.raises(ValueError, match=f"output_dtype must be FP32 .* for table '{name}'"):
            check_plan(ebc, plan, world_size=2)


def test_a_plan_without_a_table_is_refused() -> None:
    ebc = collection()
    plan = dict(hand_made(ebc))
    del plan["t1"]
    with pytest.raises(ValueError, match="every table of the collection, got none for 't1'"):
        check_plan(ebc, plan, world_size=2)


def test_row_blocks_other_than_the_input_distribution_cuts_are_refused() -> None:
    ebc = collection()
    plan = hand_made(ebc, t0=row_wise())
    check_plan(ebc, plan, world_size=2)
    plan["t0"].sharding_spec.shards[0].shard_sizes[0] = 60
    plan["t0"].sharding_spec.shards[1].shard_offsets[0] = 60
    plan["t0"].sharding_spec.shards[1].shard_sizes[0] = 50
    message = r"table 't0' into .*\[55, 0\], \[55, 16\].* got .*\[60, 0\], \[50, 16\]"
    with pytest.raises(ValueError, match=message):
        check_plan(ebc, plan, world_size=2)


@pytest.mark.parametrize("offset_and_size", [(0, 8), (8, 8), (8, 16)])
def test_shards_of_some_of_the_columns_are_refused(offset_and_size: tuple[int, int]) -> None:
    ebc = collection()
    for generator in (row_wise(), table_wise(rank=1)):
        plan = hand_made(ebc, t0=generator)
        shard = plan["t0"].sharding_spec.shards[0]
        shard.shard_offsets[1], shard.shard_sizes[1] = offset_and_size
        with pytest.raises(ValueError, match="110 rows and 16 columns of table 't0'"):
            check_plan(ebc, plan, world_size=2)


@pytest.mark.parametrize("ranks", [None, [], [0, 1], [2], [-1], ["0"]])
def test_ranks_of_a_table_wise_table_must_be_one_rank_of_the_world(ranks: Any) -> None:
    ebc = collection()
    plan = hand_made(ebc)
    plan["t0"].ranks = ranks
    with pytest.raises(ValueError, match=r"ranks must be one rank of 2 .*table_wise table 't0'"):
        check_plan(ebc, plan, world_size=2)


@pytest.mark.parametrize("ranks", [None, [0], [1, 0], [0, 1, 2], [0, 2]])
def test_ranks_of_a_row_wise_table_must_be_all_ranks_in_order(ranks: Any) -> None:
    ebc = collection()
    plan = hand_made(ebc, t1=row_wise())
    plan["t1"].ranks = ranks
    with pytest.raises(ValueError, match=r"ranks must be all ranks in order .*table 't1', got"):
        check_plan(ebc, plan, world_size=2)


@pytest.mark.parametrize("ranks", [None, [0], [1, 0], [1, 2], [0, 1, 2, 3]])
def test_ranks_of_a_table_row_wise_table_must_be_those_of_one_node(ranks: Any) -> None:
    ebc = collection()
    plan = hand_made(ebc, world_size=4, t1=table_row_wise(host_index=1))
    check_plan(ebc, plan, world_size=4, local_world_size=2)
    plan["t1"].ranks = ranks
    with pytest.raises(ValueError, match=r"ranks must be the 2 ranks of one node .*table 't1'"):
        check_plan(ebc, plan, world_size=4, local_world_size=2)


def test_a_node_that_is_not_whole_has_no_table_row_wise_tables() -> None:
    ebc = collection()
    plan = hand_made(ebc, world_size=4, t1=table_row_wise(host_index=1))
    with pytest.raises(ValueError, match=r"ranks must be the 2 ranks of one node in order of 3"):
        check_plan(ebc, plan, world_size=3, local_world_size=2)


def test_shards_placed_elsewhere_than_on_their_ranks_are_refused() -> None:
    ebc = collection()
    plan = hand_made(ebc)
    plan["t0"].ranks = [1]
    with pytest.raises(ValueError, match=r"shards of table 't0' on .*\[1\], got \[0\]"):
        check_plan(ebc, plan, world_size=2)
    plan = hand_made(ebc, t1=row_wise())
    plan["t1"].sharding_spec.shards.reverse()
    with pytest.raises(ValueError, match=r"table 't1'"):
        check_plan(ebc, plan, world_size=2)


def test_a_missing_sharding_spec_is_refused() -> None:
    ebc = collection()
    plan = hand_made(ebc)
    plan["t0"].sharding_spec = None
    with pytest.raises(ValueError, match=r"sharding_spec must be .* table 't0', got None"):
        check_plan(ebc, plan, world_size=2)


def test_a_table_of_fewer_rows_than_ranks_may_be_row_wise() -> None:
    tiny = TTEmbeddingBagConfig(
        name="tiny", num_embeddings=5, embedding_dim=4, feature_names=["f"], tt_ranks=[2]
    )
    ebc = TTEmbeddingBagCollection([tiny], device="meta")
    for world_size in (4, 7):
        plan = construct_module_sharding_plan(
            ebc,
            {"tiny": row_wise()},
            sharder=TTEmbeddingBagCollectionSharder(),
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        check_plan(ebc, plan, world_size=world_size)


def test_a_regular_table_on_the_tt_kernel_is_refused() -> None:
    ebc = collection()
    plan = hand_made(ebc)
    plan["r1"].compute_kernel = TT_COMPUTE_KERNEL
    message = f"compute_kernel must not be '{TT_COMPUTE_KERNEL}'.* table 'r1'"
    with pytest.raises(ValueError, match=message):
        check_plan(ebc, plan, world_size=2)


def two_dimensional_message(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2))
    world = dist.group.WORLD
    env = ShardingEnv2D(sharding_pg=world, replica_pg=world, global_pg=world, device_mesh=mesh)
    with pytest.raises(NotImplementedError) as error:
        sharder().shard(collection(), hand_made(collection()), env)
    return str(error.value)


@pytest.mark.slow
def test_2d_parallelism_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(two_dimensional_message):
        assert "ShardingEnv2D" in message
        assert "got ['t0'" in message


def reshard_message(rank: int) -> str:
    model = on_meta(unsharded())
    plan = hand_made(model.ebc)
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}), sharders=[sharder()])
    moved = hand_made(collection(), t0=table_wise(rank=1))
    with pytest.raises(NotImplementedError) as error:
        dmp.reshard({"ebc": (1.0, moved)}, "ebc")
    dist.barrier()  # nobody is stuck in a collective
    return str(error.value)


@pytest.mark.slow
def test_resharding_in_place_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    for message in two_ranks.run(reshard_message):
        assert "torch.distributed.checkpoint" in message
        assert "got ['t0'" in message


def forward_backward(rank: int, kinds: list[str], world_size: int) -> None:
    """A hand-made plan of each kind, with the stock kernel the helper names, runs and learns."""
    generators = {
        "table_wise": table_wise(rank=world_size - 1),
        "row_wise": row_wise(),
        "table_row_wise": table_row_wise(host_index=0),
        "data_parallel": data_parallel(),
    }
    (batch,) = batches(1, size=BATCH_SIZE * world_size)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    for kind in kinds:
        model = on_meta(unsharded())
        generator = generators[kind]
        plan = construct_module_sharding_plan(
            model.ebc,
            {c.name: generator for c in model.ebc.embedding_bag_configs()},
            sharder=sharder(),
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        dmp = DistributedModelParallel(
            model, plan=ShardingPlan({"ebc": plan}), sharders=[sharder()]
        )
        before = copy.deepcopy([p.detach() for p in dmp.module.ebc.parameters() if p.numel()])
        output = dmp(features)
        output.sum().backward()
        assert output.isfinite().all()
        after = [p for p in dmp.module.ebc.parameters() if p.numel()]
        for old, new in zip(before, after, strict=True):
            assert new.grad is not None or not torch.equal(old, new)


@pytest.mark.slow
def test_u12_u14_every_type_that_is_allowed_builds_and_learns(two_ranks: Ranks) -> None:
    kinds = ["table_wise", "row_wise", "table_row_wise", "data_parallel"]
    two_ranks.run(forward_backward, kinds, 2)


def refused_everywhere(rank: int) -> list[str]:
    """Bad plans against the whole stack: the same words on every rank, and no collective begun."""
    bad: list[dict[str, Any]] = [
        {"t0": column_wise(ranks=[0, 1])},
        {"t0": table_row_wise(host_index=0), "t1": column_wise(ranks=[1, 0])},
        {"t1": grid_shard(host_indexes=[0])},
        {},
    ]
    messages = []
    for generators in bad:
        model = on_meta(unsharded())
        plan = hand_made(model.ebc, **generators)
        if "t1" in generators and plan["t1"].sharding_type == "column_wise":
            plan["t1"].sharding_type = "table_column_wise"
        if not generators:
            plan["r0"].compute_kernel = TT_COMPUTE_KERNEL
        with pytest.raises(ValueError, match=r"must be one of|'r0'") as error:
            DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}), sharders=[sharder()])
        messages.append(str(error.value))
    dist.barrier()  # nobody is stuck in an earlier collective
    return messages


@pytest.mark.slow
def test_a_bad_plan_raises_the_same_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(refused_everywhere)
    assert first == second
    assert "got 'column_wise' for table 't0'" in first[0]
    assert "got 'table_column_wise' for table 't1'" in first[1]
    assert "got 'grid_shard' for table 't1'" in first[2]
    assert TT_COMPUTE_KERNEL in first[3]


def unsharded_in_dmp(rank: int) -> list[str]:
    messages = []
    for sharders, plan in ((get_default_sharders(), None), ([sharder()], ShardingPlan({}))):
        with pytest.raises(ValueError, match="TTEmbeddingBagCollectionSharder") as error:
            DistributedModelParallel(unsharded(), sharders=sharders, plan=plan)
        messages.append(str(error.value))
    dist.barrier()
    return messages


@pytest.mark.slow
def test_u08_a_tt_table_that_dmp_leaves_unsharded_raises_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(unsharded_in_dmp)
    assert first == second
    assert all("['t0', 't1']" in message for message in first)


class ExtraSharding(ParameterSharding):
    """U01: a plugin's ParameterSharding brings fused parameters of its own."""

    def get_additional_fused_params(self) -> dict[str, Any]:
        return {"tt_note": [4, 4]}


def extra_fused_params(rank: int) -> tuple[Any, list[Any]]:
    model = on_meta(unsharded())
    plan = hand_made(model.ebc)
    plan["t0"] = ExtraSharding(**vars(plan["t0"]))
    tt_sharder = sharder()
    module = tt_sharder.shard(model.ebc, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    configs = [c for lookup in module._lookups for c in lookup.grouped_configs]
    if rank:
        return None, configs
    noted = [c.fused_params["tt_note"] for c in configs if "tt_note" in (c.fused_params or {})]
    stock = [c for c in configs if c.compute_kernel.value != TT_COMPUTE_KERNEL]
    return noted, [key for c in stock for key in c.fused_params if "tt" in key]


@pytest.mark.slow
def test_u01_a_plans_own_fused_params_reach_the_tt_kernel_alone(two_ranks: Ranks) -> None:
    assert two_ranks.run(extra_fused_params) == [([(4, 4)], []), (None, [])]


def stock_planner(rank: int) -> dict[str, tuple[str, str]]:
    """DMP with no plan makes one with the stock planner, on stock kernels, for these tables."""
    sharders = [sharder()]
    model = DistributedModelParallel(on_meta(unsharded()), sharders=sharders)
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    model(kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)).sum().backward()
    plan = model.module.ebc.module_sharding_plan
    return {name: (p.sharding_type, p.compute_kernel) for name, p in plan.items()}


@pytest.mark.slow
def test_a_plan_of_the_stock_planner_runs(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(stock_planner)
    assert first == second
    assert first["t0"][1] == first["t1"][1] == TT_COMPUTE_KERNEL
