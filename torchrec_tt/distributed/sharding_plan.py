"""What a sharding plan may say of a collection with Tensor-Train tables, checked on every rank.

A plan is global: every rank holds the same one. So everything here raises the same error on every
rank, before any collective.
"""

import copy
import itertools
import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    CacheParams,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_tt.distributed.applied_optimizer import applied_optimizer
from torchrec_tt.distributed.fused_params import check_output_dtype
from torchrec_tt.distributed.row_cache import row_cache_config
from torchrec_tt.modules.embedding_configs import MAX_WEIGHTS, TTEmbeddingConfig, TTTableConfig
from torchrec_tt.modules.embedding_modules import (
    TTCollection,
    tt_configs,
)

TT_COMPUTE_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
_SEQUENCE_TYPES = (
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
)
_POOLED_TYPES = (*_SEQUENCE_TYPES, ShardingType.TABLE_ROW_WISE.value)
# Types whose pooled output is summed over ranks that each hold some of the rows.
ROW_SPLITTING_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)


def tt_collection(module: nn.Module) -> TTCollection | None:
    """Returns the TT collection that `module` is, or that its feature processors feed, if any."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        module = module._embedding_bag_collection
    return module if isinstance(module, TTCollection) else None


def check_env(env: ShardingEnv, *, tables: Iterable[str]) -> None:
    """Raises NotImplementedError for sharding environments that TT tables cannot join."""
    if isinstance(env, ShardingEnv2D):
        raise NotImplementedError(
            "2D parallelism (ShardingEnv2D) is not supported for Tensor-Train tables, got "
            f"{list(tables)}: its weight sync does not know their cores; supported is ShardingEnv"
        )


def check_plan(
    module: TTCollection,
    plan: Mapping[str, ParameterSharding],
    *,
    world_size: int,
    local_world_size: int | None = None,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Raises ValueError, naming the table, where `plan` cannot shard `module`.

    Shards are placed on global ranks; without a `pg` they are those of the plan. Without a
    `local_world_size` all ranks are on one node.
    """
    configs = module.table_configs()
    for config in configs:
        if config.name not in plan:
            raise ValueError(
                f"plan must have every table of the collection, got none for {config.name!r}"
            )
        is_tt = isinstance(config, TTTableConfig)
        if not is_tt and plan[config.name].compute_kernel == TT_COMPUTE_KERNEL:
            raise ValueError(
                f"compute_kernel must not be {TT_COMPUTE_KERNEL!r}, the one of Tensor-Train "
                f"tables, got it for the regular table {config.name!r}"
            )
        if module.tt_shapes and plan[config.name].output_dtype is not None:
            check_output_dtype(plan[config.name].output_dtype, table=config.name)
    for config in tt_configs(configs):
        _check_tt_table(
            config,
            plan[config.name],
            world_size=world_size,
            local_world_size=local_world_size or world_size,
            pg=pg,
        )


def sharding_types_of(
    config: TTTableConfig, *, cache_params: CacheParams | None = None
) -> tuple[str, ...]:
    """Returns the sharding types that a Tensor-Train table can have.

    Splitting the columns would split a table's flops but not its cores. TorchRec has no
    table-row-wise sharding of sequences. The caches of a data-parallel table would need the same
    hot rows on every rank.

    Raises:
        ValueError: for `cache_params` that a row cache cannot follow.
    """
    types = _SEQUENCE_TYPES if isinstance(config, TTEmbeddingConfig) else _POOLED_TYPES
    if row_cache_config(config, cache_params) is None:
        return types
    return tuple(kind for kind in types if kind != ShardingType.DATA_PARALLEL.value)


def check_sharding_type(
    config: TTTableConfig, sharding_type: str, *, cache_params: CacheParams | None = None
) -> None:
    """Raises ValueError for a sharding type that a Tensor-Train table cannot have."""
    types = sharding_types_of(config, cache_params=cache_params)
    if sharding_type in types:
        return
    reason = ""
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        reason = ": with a row cache every replica would need the same hot rows at every step"
    raise ValueError(
        f"sharding_type must be one of {list(types)} for a Tensor-Train table, "
        f"got {sharding_type!r} for table {config.name!r}{reason}"
    )


def with_tt_kernel(
    module: TTCollection, plan: Mapping[str, ParameterSharding]
) -> dict[str, ParameterSharding]:
    """Returns `plan` with TT tables on the TT kernel, whatever kernel its maker thought of.

    `construct_module_sharding_plan` and the stock planner know no kernel for TT tables.
    """
    result = dict(plan)
    for name in module.tt_shapes:
        result[name] = copy.copy(plan[name])
        result[name].compute_kernel = TT_COMPUTE_KERNEL
    return result


def shardable_parameters(module: TTCollection) -> dict[str, nn.Parameter]:
    """Returns a parameter `[num_embeddings, D]` per table; on `meta` for TT tables.

    TorchRec shards tables by the shape of a weight. A TT table's stands in for rows that are
    never stored; `apply_optimizer_in_backward`'s choice for the cores goes with it.
    """
    return {
        config.name: _logical_weight(module, config)
        if isinstance(config, TTTableConfig)
        else module.table_modules()[config.name].weight
        for config in module.table_configs()
    }


def _logical_weight(module: TTCollection, config: TTTableConfig) -> nn.Parameter:
    size = (config.num_embeddings, config.embedding_dim)
    if math.prod(size) >= MAX_WEIGHTS:
        raise ValueError(
            "num_embeddings * embedding_dim must be below 2^61 for a sharded table, as TorchRec "
            f"counts its bytes as rows, got {size[0]} * {size[1]} for table {config.name!r}"
        )
    weight = nn.Parameter(torch.empty(size, dtype=config.core_dtype, device="meta"))
    cores = list(module.table_modules()[config.name].tt_cores)
    applied = applied_optimizer(cores, table=config.name)
    if applied is not None:
        weight._optimizer_classes, weight._optimizer_kwargs = [applied[0]], [applied[1]]
    return weight


def _check_tt_table(
    config: TTTableConfig,
    sharding: ParameterSharding,
    *,
    world_size: int,
    local_world_size: int,
    pg: dist.ProcessGroup | None,
) -> None:
    name, kind = config.name, sharding.sharding_type
    check_sharding_type(config, kind, cache_params=sharding.cache_params)
    if kind == ShardingType.DATA_PARALLEL.value:
        return
    ranks = list(sharding.ranks or [])
    if kind == ShardingType.ROW_WISE.value:
        is_right, rule = ranks == list(range(world_size)), "all ranks in order"
    elif kind == ShardingType.TABLE_ROW_WISE.value:
        nodes = torch.arange(world_size).split(local_world_size)
        is_right = ranks in [node.tolist() for node in nodes if len(node) == local_world_size]
        rule = f"the {local_world_size} ranks of one node in order"
    else:
        is_right, rule = len(ranks) == 1 and ranks[0] in range(world_size), "one rank"
    if not is_right:
        raise ValueError(
            f"ranks must be {rule} of {world_size} for the {kind} table {name!r}, "
            f"got {sharding.ranks}"
        )
    if not isinstance(sharding.sharding_spec, EnumerableShardingSpec):
        raise ValueError(
            f"sharding_spec must be an EnumerableShardingSpec for the {kind} table {name!r}, "
            f"got {sharding.sharding_spec}"
        )
    _check_shards(config, sharding.sharding_spec.shards, num_shards=len(ranks))
    placed = [r if pg is None else dist.get_global_rank(pg, r) for r in ranks]
    got = [shard.placement and shard.placement.rank() for shard in sharding.sharding_spec.shards]
    if got != placed:
        raise ValueError(
            f"sharding_spec must place the shards of table {name!r} on the global ranks {placed} "
            f"of its ranks {ranks}, got {got}"
        )


def _check_shards(config: TTTableConfig, shards: list[ShardMetadata], *, num_shards: int) -> None:
    rows, columns = config.num_embeddings, config.embedding_dim
    block = -(-rows // num_shards)
    # TorchRec's input distribution cuts the ids so, whatever the plan says.
    starts = [min(r * block, rows) for r in range(num_shards + 1)]
    expected = [([a, 0], [b - a, columns]) for a, b in itertools.pairwise(starts)]
    got = [(list(shard.shard_offsets), list(shard.shard_sizes)) for shard in shards]
    if got != expected:
        raise ValueError(
            f"sharding_spec must cut the {rows} rows and {columns} columns of table "
            f"{config.name!r} into shards (offsets, sizes) {expected}, got {got}"
        )
