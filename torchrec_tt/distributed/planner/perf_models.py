"""What a step of a whole plan takes."""

from torchrec.distributed.planner.types import PerfModel, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_tt.distributed.planner.hardware import Hardware

_AS = {  # the type whose collectives a type has, in groups of its own
    ShardingType.COLUMN_WISE.value: ShardingType.TABLE_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value: ShardingType.TABLE_WISE.value,
    ShardingType.GRID_SHARD.value: ShardingType.TABLE_ROW_WISE.value,
}


class TTPerfModel(PerfModel):
    """The busiest rank's shards, and the fixed costs of a step.

    Every sharding type in use distributes its inputs and outputs in collectives of its own, which
    cost a step `sharding_ms` whatever the tables. So a table of one more type may cost more than
    its shards say.

    Args:
        topology: the devices.
        hardware: the coefficients.
    """

    def __init__(self, topology: Topology, hardware: Hardware) -> None:
        self._topology = topology
        self._hardware = hardware

    def rate(self, plan: list[ShardingOption]) -> float:
        """Returns the milliseconds of a step."""
        return max(self.rank_ms(plan)) + self.fixed_ms(plan)

    def rank_ms(self, plan: list[ShardingOption]) -> list[float]:
        """Returns the milliseconds of each rank's shards."""
        ranks = [0.0] * self._topology.world_size
        for option in plan:
            for shard in option.shards:
                assert shard.rank is not None
                assert shard.perf is not None
                ranks[shard.rank] += shard.perf.total
        return ranks

    def fixed_ms(self, plan: list[ShardingOption]) -> float:
        """Returns the milliseconds that do not depend on the shards."""
        types = {(option.path, option.sharding_type) for option in plan}
        return self._hardware.step_ms + sum(
            self._hardware.sharding_ms.get(_AS.get(kind, kind), 0.0) for _, kind in types
        )
