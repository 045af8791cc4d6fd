"""Cores of sequence tables in state dicts, moving between plans, and their first values."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    batches,
    full_state,
    kjt,
    plan_for,
)
from tests.distributed.toy_sequence_model import (
    on_meta,
    sharded,
    sharder,
    unsharded,
)

pytestmark = pytest.mark.slow

TW, RW, DP = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)
KINDS = (TW, RW, DP)


def state_dict_kinds(rank: int, kind: str) -> dict[str, str]:
    model, _ = sharded(unsharded(), {"t0": kind, "t1": kind})
    return {k: type(v).__name__ for k, v in model.state_dict().items() if "tt_cores" in k}


def test_every_rank_has_every_core_under_its_unsharded_key(two_ranks: Ranks) -> None:
    keys = [f"ec.embeddings.{t}.tt_cores.{k}" for t, d in (("t0", 3), ("t1", 2)) for k in range(d)]
    for kind in KINDS:
        expected = dict.fromkeys(keys, "ShardedTensor" if kind == TW else "Tensor")
        assert two_ranks.run(state_dict_kinds, kind) == [expected, expected]


def move_by_dcp(rank: int, folder: str, source: tuple[str, str], target: tuple[str, str]) -> int:
    """Saves under one plan, loads under another; returns the number of optimizer states moved."""
    model, optimizers = sharded(
        unsharded(), {"t0": source[0], "t1": source[1]}, optimizer="adagrad"
    )
    (batch,) = batches(1, size=2 * BATCH_SIZE)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    optimizers.zero_grad()
    model(features).square().mean().backward()
    optimizers.step()
    state = {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    other, _ = sharded(unsharded(seed=5), {"t0": target[0], "t1": target[1]}, optimizer="adagrad")
    loaded = {"model": other.state_dict()}
    if DP not in source:  # a data-parallel table's state is in the user's own optimizer
        loaded["optim"] = other.fused_optimizer.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    after = full_state(other.state_dict())
    for key, value in full_state(model.state_dict()).items():
        assert torch.equal(after[key], value), key
    if "optim" not in loaded:
        return 0
    other.fused_optimizer.load_state_dict(loaded["optim"])
    sums = [whole_sums(m) for m in (model, other)]
    for key, value in sums[1].items():
        assert value.abs().sum() > 0, key
        assert torch.equal(value, sums[0][key]), key
    return len(sums[1])


def whole_sums(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Adagrad's sums of every core, each from a rank that holds it."""
    mine = {}
    for key, state in model.fused_optimizer.state_dict()["state"].items():
        if ".tt_cores." in key:
            value = state["sum"]
            shards = value.local_shards() if isinstance(value, ShardedTensor) else None
            mine[key] = (shards[0].tensor if shards else value).detach().clone()
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, mine)
    return {key: value for state in states for key, value in state.items()}


@pytest.mark.parametrize(
    ("source", "target", "num_sums"),
    [
        ((TW, RW), (RW, TW), 5),
        ((TW, DP), (DP, TW), 0),
        ((DP, RW), (RW, DP), 0),
    ],
)
def test_dcp_moves_cores_and_their_optimizer_between_plans(
    two_ranks: Ranks,
    tmp_path: Path,
    source: tuple[str, str],
    target: tuple[str, str],
    num_sums: int,
) -> None:
    assert two_ranks.run(move_by_dcp, str(tmp_path), source, target) == [num_sums] * 2


def change_form(rank: int, folder: str, output_dtensor: bool) -> None:
    """Saves in one form of state dict and loads in the other, under another plan."""
    envs = [ShardingEnv(2, rank, dist.group.WORLD, form) for form in (False, True)]
    source, _ = sharded(unsharded(), {"t0": TW, "t1": RW}, env=envs[output_dtensor])
    saved = source.state_dict()
    assert isinstance(saved["ec.embeddings.t0.tt_cores.0"], DTensor) == output_dtensor
    dcp.save(saved, checkpoint_id=folder)
    target, _ = sharded(unsharded(seed=5), {"t0": RW, "t1": TW}, env=envs[not output_dtensor])
    state = target.state_dict()
    dcp.load(state, checkpoint_id=folder)
    target.load_state_dict(state)
    after = full_state(target.state_dict())
    for key, value in full_state(saved).items():
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize("output_dtensor", [False, True])
def test_dcp_moves_cores_between_sharded_tensors_and_dtensors(
    two_ranks: Ranks, tmp_path: Path, output_dtensor: bool
) -> None:
    two_ranks.run(change_form, str(tmp_path), output_dtensor)


def first_values(rank: int, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(7 + rank)  # rank 0's seed counts
    model, _ = sharded(unsharded(seed=7 + rank), {"t0": kind, "t1": kind}, load=False)
    return {k: v for k, v in full_state(model.state_dict()).items() if "tt_cores" in k}


def test_first_values_are_the_same_whatever_the_sharding(two_ranks: Ranks) -> None:
    torch.manual_seed(7)
    source = unsharded(seed=7)
    source.ec.reset_parameters()
    expected = source.state_dict()
    for kind in KINDS:
        for values in two_ranks.run(first_values, kind):
            assert len(values) == 5
            for key, value in values.items():
                assert torch.equal(value, expected[key]), (kind, key)


def values_of_a_cpu_module(rank: int) -> dict[str, Tensor]:
    source = unsharded(seed=rank)
    sharders = [sharder()]
    plan = plan_for(on_meta(source), {"t0": TW, "t1": RW}, sharders)
    model = DistributedModelParallel(source, plan=plan, sharders=sharders)
    return {k: v for k, v in full_state(model.state_dict()).items() if "tt_cores" in k}


def test_a_module_with_values_keeps_those_of_rank_0(two_ranks: Ranks) -> None:
    expected = unsharded(seed=0).state_dict()
    for values in two_ranks.run(values_of_a_cpu_module):
        for key, value in values.items():
            assert torch.equal(value, expected[key]), key


def devices_on_meta(rank: int) -> set[str]:
    meta = on_meta(unsharded())
    sharders = [sharder("adagrad")]
    plan = plan_for(meta, {"t0": TW, "t1": RW, "r0": TW, "r1": TW}, sharders)
    model = DistributedModelParallel(
        meta.ec,
        plan=ShardingPlan({"": plan.plan["ec"]}),
        sharders=sharders,
        device=torch.device("meta"),
        init_parameters=False,
        init_data_parallel=False,
    )
    return {str(parameter.device) for parameter in model.parameters() if parameter.numel()}


def test_a_model_sharded_on_meta_allocates_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(devices_on_meta) == [{"meta"}, {"meta"}]
