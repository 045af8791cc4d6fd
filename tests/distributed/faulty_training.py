"""A training script that saves, resumes, and fails where it is told to; test_faults.py runs it.

Under torchrun it is a rank; alone it is torchrun's agent for two, which forks them: they start at
once, as this process has imported everything. After each failure the agent starts the ranks anew
with the next fault of the list; after the last fault they are left alone.
"""

import argparse
import json
import os
import signal
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.toy_model import BATCH_SIZE, batches, kjt, sharded, sharder, unsharded
from torchrec_tt import TTEmbeddingBagCollectionSharder
from torchrec_tt.checkpoint import latest

TYPES = {"t0": "row_wise", "t1": "table_wise"}
NUM_STEPS = 6
STEPS_PER_CHECKPOINT = 2
FAULT_STEP = 3  # the fourth, one after the first checkpoint


class Faults:
    """Fails as `fault` says, on one rank, and notes when."""

    def __init__(self, folder: Path, fault: str | None) -> None:
        self.fault = fault
        self._path = folder / f"rank{dist.get_rank()}.jsonl"

    def note(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.time(), **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def fail(self, fault: str, *, rank: int) -> None:
        if self.fault == fault and dist.get_rank() == rank:
            self.note("fault", fault=fault)
            if fault.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"the fault in {fault}")


class FailingSharder(TTEmbeddingBagCollectionSharder):
    faults: Faults

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        self.faults.fail("sharding", rank=1)
        return super().shard(*args, **kwargs)


class FailingWriter(dcp.FileSystemWriter):
    """Fails when its rank has written its data and nobody yet the metadata."""

    faults: Faults

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        written = super().write_data(*args, **kwargs)
        self.faults.fail("kill in save", rank=1)
        return written


def features_of(step: int, *, faults: Faults) -> KeyedJaggedTensor:
    rank = dist.get_rank()
    (batch,) = batches(1, size=BATCH_SIZE * dist.get_world_size(), seed=step)
    features = kjt(batch, start=rank * BATCH_SIZE, stop=(rank + 1) * BATCH_SIZE)
    if faults.fault == "data" and step == FAULT_STEP and rank == 1:
        faults.note("fault", fault="data")
        features.values()[-1] = 10_000  # no row of any table; its lookup raises
    return features


def train(folder: Path, *, fault: str | None = None) -> None:
    """Trains from the last checkpoint in `folder`, or from the beginning, to the last step."""
    faults = Faults(folder, fault)
    faults.note("start")
    faults.fail("planning", rank=0)
    tt_sharder = FailingSharder(fused_params=sharder("adagrad").fused_params)
    tt_sharder.faults = faults
    model, optimizer = sharded(unsharded(), TYPES, optimizer="adagrad", tt_sharder=tt_sharder)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    first, checkpoint = 0, latest(folder)
    if checkpoint is not None:
        dcp.load(state, checkpoint_id=checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(checkpoint.name)
    faults.note("ready", step=first)
    for step in range(first, NUM_STEPS):
        optimizer.zero_grad()
        loss = model(features_of(step, faults=faults)).square().mean()
        if step == FAULT_STEP:
            faults.fail("step", rank=0)
            faults.fail("kill in step", rank=1)
        loss.backward()
        optimizer.step()
        faults.note("step", step=step, loss=loss.item())
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            writer = FailingWriter(folder / str(step + 1))
            writer.faults = faults
            dcp.save(state, storage_writer=writer)


def run_rank(folder: Path, faults: list[str]) -> None:
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    try:
        train(folder, fault=faults[restart] if restart < len(faults) else None)
    except Exception:  # a forked rank does not print it
        traceback.print_exc()
        raise
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("faults", nargs="*")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args.folder, args.faults)
        return
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=len(args.faults),
        start_method="fork",
    )
    elastic_launch(config, run_rank)(args.folder, args.faults)


if __name__ == "__main__":
    main()
