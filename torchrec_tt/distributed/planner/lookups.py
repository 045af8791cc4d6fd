"""Of which Tensor-Train table an option is, and what a step is expected to ask of its shards."""

import functools
import math
from dataclasses import dataclass

from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_tt.distributed.sharding_plan import tt_collection
from torchrec_tt.modules.embedding_configs import TTTableConfig
from torchrec_tt.modules.embedding_modules import tt_configs
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.traffic import Traffic, expected_prefixes


def tt_config_of(option: ShardingOption) -> TTTableConfig | None:
    """Returns the configuration of the option's table, None for a regular one."""
    collection = tt_collection(option.module[1])
    configs = tt_configs(collection.table_configs()) if collection is not None else []
    return next((config for config in configs if config.name == option.name), None)


def tt_shape_of(option: ShardingOption) -> TTShape | None:
    """Returns the shape of the option's table, None for a regular one."""
    config = tt_config_of(option)
    return config.tt_shape if config is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookups:
    """Expected counts of a step on one rank of a table.

    Attributes:
        num_indices: ids that it looks up.
        num_bags: rows that it returns.
        num_rows: distinct rows that the cores make.
        num_prefixes: distinct prefixes of these.
        num_slots: of the row cache, 0 without one.
        num_cached_rows: distinct rows that the cache has.
        hit_ratio: share of the ids that it has.
    """

    num_indices: float
    num_bags: float
    num_rows: float
    num_prefixes: float
    num_slots: int = 0
    num_cached_rows: float = 0.0
    hit_ratio: float = 0.0


def num_replicas(option: ShardingOption, topology: Topology) -> int:
    """Returns how many ranks have the table's cores; if several do, they sum dense gradients."""
    if option.sharding_type == ShardingType.TABLE_WISE.value:
        return 1
    if option.sharding_type == ShardingType.TABLE_ROW_WISE.value:
        return topology.local_world_size
    return topology.world_size


def expected_lookups(
    option: ShardingOption,
    shard: Shard,
    shape: TTShape,
    *,
    topology: Topology,
    constraints: ParameterConstraints | None,
    traffic: Traffic,
    cache: RowCacheConfig | None = None,
) -> Lookups:
    """Returns the counts of a shard.

    The ranks with the cores share the ids of all ranks' batches; where they split rows, each of
    them returns a (partial) row for every bag. A cache is taken to have the most popular rows of
    the shard.
    """
    inputs = len(option.input_lengths)
    batch_sizes = (constraints and constraints.batch_sizes) or [option.batch_size] * inputs
    poolings = (constraints and constraints.num_poolings) or [1.0] * inputs
    bags = sum(b * p for b, p in zip(batch_sizes, poolings, strict=True))
    indices = sum(
        length * b * p
        for length, b, p in zip(option.input_lengths, batch_sizes, poolings, strict=True)
    )
    replicas = num_replicas(option, topology)
    is_data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
    num_indices = indices * topology.world_size / replicas
    num_values = max(1, shard.size[0])
    of_shard = traffic if is_data_parallel else traffic.of_shard(replicas)
    num_slots = cache.num_slots(num_values) if cache is not None else 0
    prefixes = math.prod(shape.row_factors[:-1])
    cached, num_rows, num_prefixes = _distinct(
        num_indices, num_values, prefixes, of_shard, num_slots
    )
    return Lookups(
        num_indices=num_indices,
        num_bags=bags if is_data_parallel else bags * topology.world_size,
        num_rows=num_rows,
        num_prefixes=num_prefixes,
        num_slots=num_slots,
        num_cached_rows=cached,
        hit_ratio=of_shard.hit_ratio(num_slots, num_values=num_values) if num_slots else 0.0,
    )


@functools.lru_cache(maxsize=8192)
def _distinct(
    num_indices: float, num_values: int, num_prefixes: int, traffic: Traffic, num_slots: int
) -> tuple[float, float, float]:
    """Distinct rows, cached and not, and prefixes; planning asks for the same ones many times."""
    total = traffic.expected_unique(num_indices, num_values=num_values)
    num_rows = total
    if num_slots:
        num_rows = traffic.expected_unique_misses(
            num_indices, num_values=num_values, num_cached=num_slots
        )
    prefixes = expected_prefixes(
        num_rows, num_values=num_values, num_prefixes=min(num_prefixes, num_values)
    )
    return total - num_rows, num_rows, prefixes
