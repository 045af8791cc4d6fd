import dataclasses

import torch
from torch import nn
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage, Topology

from torchrec_tt.distributed.planner.hardware import KNOWN
from torchrec_tt.distributed.planner.perf_models import TTPerfModel

TOPOLOGY = Topology(world_size=2, compute_device="cpu")
HARDWARE = dataclasses.replace(
    KNOWN["cpu"],
    step_ms=1.0,
    sharding_ms={"table_wise": 2.0, "row_wise": 4.0, "data_parallel": 8.0},
)


def option(sharding_type: str, ms: dict[int, float], *, path: str = "ebc") -> ShardingOption:
    """An option whose shards take these milliseconds on these ranks."""
    shards = [
        Shard(
            size=[10, 4],
            offset=[0, 0],
            storage=Storage(hbm=0, ddr=0),
            perf=Perf(fwd_compute=each / 2, fwd_comms=0, bwd_compute=each / 2, bwd_comms=0),
            rank=rank,
        )
        for rank, each in ms.items()
    ]
    return ShardingOption(
        name="t",
        tensor=torch.empty(10, 4, device="meta"),
        module=(path, nn.Module()),
        input_lengths=[1.0],
        batch_size=8,
        sharding_type=sharding_type,
        partition_by="device",
        compute_kernel="fused",
        shards=shards,
    )


def test_a_step_is_the_busiest_rank_and_the_collectives_of_each_type_once() -> None:
    model = TTPerfModel(TOPOLOGY, HARDWARE)
    plan = [
        option("table_wise", {0: 5.0}),
        option("table_wise", {1: 3.0}),
        option("row_wise", {0: 1.0, 1: 1.5}),
    ]
    assert model.rank_ms(plan) == [6.0, 4.5]
    assert model.fixed_ms(plan) == 1.0 + 2.0 + 4.0
    assert model.rate(plan) == 6.0 + 7.0


def test_collections_have_collectives_of_their_own() -> None:
    plan = [option("table_wise", {0: 5.0}), option("table_wise", {1: 3.0}, path="other")]
    assert TTPerfModel(TOPOLOGY, HARDWARE).fixed_ms(plan) == 1.0 + 2.0 + 2.0


def test_column_wise_tables_cost_the_collectives_of_table_wise_ones() -> None:
    for kind in ("column_wise", "table_column_wise"):
        assert TTPerfModel(TOPOLOGY, HARDWARE).fixed_ms([option(kind, {0: 1.0})]) == 3.0
