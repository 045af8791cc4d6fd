"""How many ids, rows and prefixes a step is expected to ask of a shard of a Tensor-Train table."""

import functools
import math
from dataclasses import dataclass

from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.traffic import Traffic, expected_prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookups:
    """Expected counts of a step on one rank of a table.

    Attributes:
        num_indices: ids that it looks up.
        num_bags: rows that it returns.
        num_rows: distinct rows that the cores make.
        num_prefixes: distinct prefixes of these.
    """

    num_indices: float
    num_bags: float
    num_rows: float
    num_prefixes: float


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
) -> Lookups:
    """Returns the counts of a shard.

    The ranks with the cores share the ids of all ranks' batches; where they split rows, each of
    them returns a (partial) row for every bag.
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
    num_rows, num_prefixes = _distinct(
        num_indices,
        max(1, shard.size[0]),
        math.prod(shape.row_factors[:-1]),
        traffic if is_data_parallel else traffic.of_shard(replicas),
    )
    return Lookups(
        num_indices=num_indices,
        num_bags=bags if is_data_parallel else bags * topology.world_size,
        num_rows=num_rows,
        num_prefixes=num_prefixes,
    )


@functools.lru_cache(maxsize=8192)
def _distinct(
    num_indices: float, num_values: int, num_prefixes: int, traffic: Traffic
) -> tuple[float, float]:
    """Expected distinct rows and prefixes; planning asks for the same ones many times."""
    num_rows = traffic.expected_unique(num_indices, num_values=num_values)
    prefixes = min(num_prefixes, num_values)
    return num_rows, expected_prefixes(num_rows, num_values=num_values, num_prefixes=prefixes)
