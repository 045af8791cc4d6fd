"""Cores and their optimizer state in state dicts, and moving between plans with DCP."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    batches,
    full_state,
    kjt,
    on_meta,
    plan_for,
    sharded,
    sharder,
    unsharded,
)

pytestmark = pytest.mark.slow

TW, RW, DP, TWRW = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_ROW_WISE.value,
)
KINDS = (TW, RW, DP)


def trained(rank: int, kinds: tuple[str, str]) -> tuple[DistributedModelParallel, Any]:
    """A model that two Adagrad steps moved away from every initial value."""
    types = {"t0": kinds[0], "t1": kinds[1]}
    model, optimizers = sharded(unsharded(), types, optimizer="adagrad")
    size = BATCH_SIZE * dist.get_world_size()
    for batch in batches(2, size=size):
        features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
        optimizers.zero_grad()
        model(features).square().mean().backward()
        optimizers.step()
    return model, optimizers


def replicas_after_load(rank: int, folder: str) -> list[Tensor]:
    """Loads into the state dict's own tensors alone, with no `load_state_dict` after it."""
    model, _ = trained(rank, (TWRW, TWRW))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other, _ = sharded(unsharded(seed=5), {"t0": TWRW, "t1": TWRW}, optimizer="adagrad")
    dcp.load(other.state_dict(), checkpoint_id=folder)
    after = dict(other.named_parameters())
    for key, value in model.named_parameters():
        assert "tt_cores" not in key or torch.equal(value, after[key]), key
    return [p.detach() for key, p in after.items() if "tt_cores" in key and p.numel()]


def test_dcp_load_fills_every_replica_of_a_node_in_place(two_nodes: Ranks, tmp_path: Path) -> None:
    values = two_nodes.run(replicas_after_load, str(tmp_path))
    assert sum(map(len, values)) == 10
    for first, second in (values[:2], values[2:]):
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


def env_of(output_dtensor: bool) -> ShardingEnv:
    world = dist.group.WORLD
    return ShardingEnv(dist.get_world_size(), dist.get_rank(), world, output_dtensor)


def kinds_of_values(
    rank: int, kind: str, output_dtensor: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    env = env_of(output_dtensor)
    model, _ = sharded(unsharded(), {"t0": kind, "t1": kind}, env=env)
    return {
        key.removeprefix("ebc."): (type(value).__name__, tuple(value.size()))
        for key, value in model.state_dict().items()
        if "tt_cores" in key
    }


def test_u44_every_rank_has_every_core_under_its_unsharded_key(two_ranks: Ranks) -> None:
    source = unsharded().ebc.state_dict()
    for kind, output_dtensor in itertools.product(KINDS, [False, True]):
        owned_type = "DTensor" if output_dtensor else "ShardedTensor"
        value_type = owned_type if kind == TW else "Tensor"
        expected = {
            key: (value_type, tuple(value.size()))
            for key, value in source.items()
            if "tt_cores" in key
        }
        assert len(expected) == 5
        assert two_ranks.run(kinds_of_values, kind, output_dtensor) == [expected, expected]


def missing_core_message(rank: int, kind: str) -> str:
    model, _ = sharded(unsharded(), {"t0": kind, "t1": kind})
    state = dict(model.state_dict())
    del state["ebc.embedding_bags.t1.tt_cores.1"]
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    return str(error.value)


def test_u44_strict_load_fails_on_a_missing_core_on_every_rank(two_ranks: Ranks) -> None:
    for kind in KINDS:
        for message in two_ranks.run(missing_core_message, kind):
            assert "embedding_bags.t1.tt_cores.1" in message


def round_trip(rank: int, kinds: tuple[str, str]) -> None:
    model, _ = trained(rank, kinds)
    before = full_state(model.state_dict())
    whole = {key: value.clone() for key, value in before.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.load_state_dict(whole)
    for key, value in full_state(model.state_dict()).items():
        assert torch.equal(value, before[key]), key


def test_whole_plain_tensors_load_under_every_plan(two_ranks: Ranks) -> None:
    for kinds in ((TW, TW), (RW, DP)):
        two_ranks.run(round_trip, kinds)


def foreign_shard_message(rank: int, output_dtensor: bool) -> str:
    source, _ = sharded(unsharded(), {"t0": TW, "t1": TW}, env=env_of(output_dtensor))
    target, _ = sharded(unsharded(), {"t0": RW, "t1": RW})
    try:
        target.load_state_dict(source.state_dict())
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("output_dtensor", [False, True])
def test_shards_of_another_plan_are_refused(two_ranks: Ranks, output_dtensor: bool) -> None:
    value_type = "DTensor" if output_dtensor else "ShardedTensor"
    for message in two_ranks.run(foreign_shard_message, output_dtensor):
        assert f"got a {value_type} placed for another plan" in message
        assert "torch.distributed.checkpoint" in message


def own_state_loads(rank: int, output_dtensor: bool) -> None:
    types = {"t0": TW, "t1": RW}
    source, _ = sharded(unsharded(), types, env=env_of(output_dtensor))
    target, _ = sharded(unsharded(seed=5), types)
    target.load_state_dict(source.state_dict())
    for key, value in full_state(target.state_dict()).items():
        assert torch.equal(value, full_state(source.state_dict())[key]), key


def test_shards_of_the_same_plan_load_in_either_form(two_ranks: Ranks) -> None:
    for output_dtensor in (False, True):
        two_ranks.run(own_state_loads, output_dtensor)


def wrong_core_messages(rank: int, kind: str) -> list[str]:
    """A whole core and, where there is one, a DTensor that are those of another shape."""
    model, _ = sharded(unsharded(), {"t0": kind, "t1": kind}, env=env_of(True))
    key, other = (f"ebc.embedding_bags.t1.tt_cores.{k}" for k in range(2))
    state = model.state_dict()
    messages = []
    for bad in (torch.zeros(10, 13), state[other]):
        with pytest.raises(ValueError, match="must have the size") as error:
            model.load_state_dict({**state, key: bad})
        messages.append(str(error.value))
    return messages


def test_a_core_of_another_size_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    for kind in KINDS:
        first, second = two_ranks.run(wrong_core_messages, kind)
        assert first == second
        assert "embedding_bags.t1.tt_cores.0 must have the size (10, 12), got (10, 13)" in first[0]
        assert first[1].endswith("got (12, 24)")


def devices_on_meta(rank: int) -> set[str]:
    meta = on_meta(unsharded())
    sharders = [sharder("adagrad")]
    model = DistributedModelParallel(
        meta.ebc,
        plan=ShardingPlan({"": plan_for(meta, {"t0": TW, "t1": RW}, sharders).plan["ebc"]}),
        sharders=sharders,
        device=torch.device("meta"),
        init_parameters=False,
        init_data_parallel=False,
    )
    return {str(parameter.device) for parameter in model.parameters() if parameter.numel()}


def test_a_model_sharded_on_meta_allocates_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(devices_on_meta) == [{"meta"}, {"meta"}]
