"""Models and optimizers saved and loaded by torch.distributed.checkpoint alone."""

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.inference.state_dict_transform import state_dict_gather
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.ranks import Ranks
from tests.distributed.toy_model import (
    BATCH_SIZE,
    batches,
    full_state,
    kjt,
    pieces,
    sharded,
    unsharded,
)
from torchrec_tt import TTEmbeddingBagCollectionSharder

pytestmark = pytest.mark.slow

TW, RW, DP, TWRW = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.DATA_PARALLEL.value,
    ShardingType.TABLE_ROW_WISE.value,
)
# The sharding type of every table, and whether state dicts hold DTensors of what has one owner.
FORMS = ((TW, False), (TW, True), (RW, False), (DP, False))
CASES = [*itertools.product((1, 2, 3, 4), FORMS), (4, (TWRW, False)), (4, (TWRW, True))]


def state_of(kind: str, *, env: ShardingEnv) -> dict[str, Any]:
    """What a training script saves of a model whose tables are all sharded as `kind`."""
    types = dict.fromkeys(["r0", "r1", "t0", "t1"], kind)
    model, optimizer = sharded(unsharded(), types, optimizer="adagrad", env=env)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from tensors(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def whole(key: str, value: Any, number: int) -> Tensor:
    """A tensor of the size of `value` that no other key and no other number has."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.rand(value.size(), generator=generator) + number


@torch.no_grad()
def fill_(state: Mapping[str, Any], number: int) -> None:
    for key, value in tensors(state):
        for piece, where in pieces(value):
            piece.copy_(whole(key, value, number)[where])


def check(state: Mapping[str, Any], number: int) -> None:
    for key, value in tensors(state):
        for piece, where in pieces(value):
            assert torch.equal(piece.detach(), whole(key, value, number)[where]), key


def envs_of(size: int) -> dict[bool, ShardingEnv]:
    """The first `size` ranks, by whether state dicts are to hold DTensors; all ranks must call."""
    mesh = init_device_mesh("cpu", (size,))
    envs = {}
    for output_dtensor in (False, True):
        env = ShardingEnv(size, dist.get_rank(), output_dtensor=output_dtensor)
        env.device_mesh = mesh
        env.process_group = mesh.get_group() if dist.get_rank() < size else None
        envs[output_dtensor] = env
    return envs


def move_between_all(rank: int, folder: str) -> int:
    """Saves every case, loads each into every other; returns the number of loads."""
    envs = {size: envs_of(size) for size in (1, 2, 3, 4)}
    states = {}
    for number, (size, (kind, output_dtensor)) in enumerate(CASES):
        if rank < size:
            env = envs[size][output_dtensor]
            states[number] = state_of(kind, env=env)
            fill_(states[number], number)
            pg = env.process_group
            dcp.save(states[number], checkpoint_id=f"{folder}/{number}", process_group=pg)
    dist.barrier()
    pairs = list(itertools.product(range(len(CASES)), states))
    for source, target in pairs:
        size, (kind, _) = CASES[target]
        # A data-parallel table's optimizer state is the dense optimizer's.
        is_alike = (CASES[source][1][0] == DP) == (kind == DP)
        part = {name: states[target][name] for name in ("model", "optimizer")[: 1 + is_alike]}
        pg = envs[size][False].process_group
        dcp.load(part, checkpoint_id=f"{folder}/{source}", process_group=pg)
        check(part, source)
    return len(pairs)


# U42, and U45: by `dcp` alone.
def test_dcp_moves_model_and_optimizer_between_all_plans_and_world_sizes(
    two_nodes: Ranks, tmp_path: Path
) -> None:
    loads = two_nodes.run(move_between_all, str(tmp_path), seconds=200)
    assert loads == [18 * 18, 18 * 14, 18 * 10, 18 * 6]


def trained_on(model: Any, optimizer: Any, steps: range) -> None:
    """Steps on the global batches of these numbers, the same whatever the plan."""
    rank, size = dist.get_rank(), BATCH_SIZE * dist.get_world_size()
    for step in steps:
        (batch,) = batches(1, size=size, seed=step)
        optimizer.zero_grad()
        features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
        model(features).square().mean().backward()
        optimizer.step()


def train_under_another_plan(rank: int, folder: str, optim_type: EmbOptimType) -> None:
    """Four steps under one plan against two, a checkpoint, and two under another."""

    def make(seed: int, t0: str, t1: str, output_dtensor: bool) -> tuple[Any, Any]:
        # TBE has no Adam on the CPU, so the regular tables are the dense optimizer's.
        types = {"t0": t0, "t1": t1, "r0": DP, "r1": DP}
        tt_sharder = TTEmbeddingBagCollectionSharder(fused_params={"optimizer": optim_type})
        env = envs_of(dist.get_world_size())[output_dtensor]
        model, _ = sharded(
            unsharded(seed=seed), types, optimizer="adagrad", tt_sharder=tt_sharder, env=env
        )
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())), torch.optim.Adam
        )
        dense.init_state()
        return model, CombinedOptimizer([model.fused_optimizer, dense])

    model, optimizer = make(0, TW, RW, False)
    trained_on(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    trained_on(model, optimizer, range(2, 4))

    other, other_optimizer = make(5, RW, TW, True)
    state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    trained_on(other, other_optimizer, range(2, 4))
    torch.testing.assert_close(full_state(other.state_dict()), full_state(model.state_dict()))


# U42
@pytest.mark.parametrize(
    "optim_type",
    [EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM],
)
def test_training_goes_on_under_another_plan(
    two_ranks: Ranks, tmp_path: Path, optim_type: EmbOptimType
) -> None:
    two_ranks.run(train_under_another_plan, str(tmp_path), optim_type)


def load_messages(rank: int, folder: str) -> list[str]:
    """What dcp.load says to a state dict that wants more, or other, than was saved."""
    source, _ = sharded(unsharded(), {"t0": TW, "t1": DP}, optimizer="adagrad")
    saved = {"model": source.state_dict(), "optimizer": source.fused_optimizer.state_dict()}
    key = "ebc.embedding_bags.t0.tt_cores.1"
    without = {k: v for k, v in saved["model"].items() if k != key}
    other_size = {**saved["model"], key: torch.zeros(5, 31)}
    wanted, _ = sharded(unsharded(seed=5), {"t0": RW, "t1": TW}, optimizer="adagrad")
    state = {"model": wanted.state_dict(), "optimizer": wanted.fused_optimizer.state_dict()}
    before = full_state(wanted.state_dict())
    messages = []
    for number, checkpoint in enumerate(
        ({"model": without}, {"model": other_size}, saved),
    ):
        dcp.save(checkpoint, checkpoint_id=f"{folder}/{number}")
        with pytest.raises(CheckpointException) as error:
            dcp.load({k: state[k] for k in checkpoint}, checkpoint_id=f"{folder}/{number}")
        messages.append(str(error.value))
    for name, value in full_state(wanted.state_dict()).items():
        assert torch.equal(value, before[name]), name
    return messages


def test_a_load_that_does_not_fit_names_the_key_on_every_rank_and_changes_nothing(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    core = "model.ebc.embedding_bags.t0.tt_cores.1"
    for missing, size, data_parallel in two_ranks.run(load_messages, str(tmp_path)):
        assert f"Missing key in checkpoint state_dict: {core}" in missing
        expected = "saved torch.Size([5, 31]) and current: torch.Size([5, 30])"
        assert f"{expected} for {core}" in size
        state = "optimizer.state.ebc.embedding_bags.t1.tt_cores.0.sum"
        assert f"Missing key in checkpoint state_dict: {state}" in data_parallel


def save_while_training(rank: int, folder: str, output_dtensor: bool) -> dict[str, Tensor]:
    env = envs_of(dist.get_world_size())[output_dtensor]
    model, optimizer = sharded(unsharded(), {"t0": TW, "t1": RW}, optimizer="adagrad", env=env)
    trained_on(model, optimizer, range(1))
    before = full_state(model.state_dict())
    # In a group of its own: the thread that saves must not meet the steps' collectives.
    saving = dist.new_group(backend="gloo")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # The default stager knows DTensors but not ShardedTensors, be they TorchRec's own.
    stager = None if output_dtensor else BlockingAsyncStager()
    future = dcp.async_save(state, checkpoint_id=folder, process_group=saving, async_stager=stager)
    trained_on(model, optimizer, range(1, 3))
    future.result()
    return before


@pytest.mark.parametrize("output_dtensor", [False, True])
def test_async_save_writes_the_values_of_its_call(
    two_ranks: Ranks, tmp_path: Path, output_dtensor: bool
) -> None:
    before, _ = two_ranks.run(save_while_training, str(tmp_path), output_dtensor)
    state = {key: torch.zeros_like(value) for key, value in before.items()}
    dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    for key, value in before.items():
        assert torch.equal(state[key], value), key


def export(rank: int, folder: str) -> dict[str, Tensor]:
    """Saves, and gathers on rank 0 what TorchRec's inference wants."""
    model, optimizer = sharded(unsharded(seed=5), {"t0": TW, "t1": RW}, optimizer="adagrad")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    gathered = {key: torch.zeros(value.size()) for key, value in state["model"].items()}
    state_dict_gather(state["model"], gathered)
    return gathered


def test_a_checkpoint_becomes_one_file_that_the_unsharded_model_loads(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    gathered, _ = two_ranks.run(export, str(tmp_path / "checkpoint"))
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "model.pt")
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(exported["model"]) == set(gathered)
    (batch,) = batches(1, size=4)
    features = kjt(batch, start=0, stop=4)
    expected = unsharded(seed=5)(features)
    for state in (exported["model"], gathered):
        model = unsharded(seed=0)
        model.load_state_dict(state)
        torch.testing.assert_close(model(features), expected, rtol=0, atol=0)


def run_blocks(rank: int, blocks: list[str], folder: str) -> dict[str, Tensor]:
    """Runs the code of a document as one script, on a model that has made a step."""
    model, optimizer = sharded(unsharded(), {"t0": TW, "t1": RW}, optimizer="adagrad")
    trained_on(model, optimizer, range(1))
    names = {"model": model, "optimizer": optimizer, "folder": folder, "step": 1}
    for block in blocks:
        exec(block, names)
    return full_state(model.state_dict())


# U45
def test_the_code_of_the_document_runs(two_ranks: Ranks, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    state, _ = two_ranks.run(run_blocks, blocks, str(tmp_path))
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    for key, value in state.items():
        assert torch.equal(exported["model"][key], value), key
