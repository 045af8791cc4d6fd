"""Ranks that die or raise under torchrun: the job ends soon, and resumes where it was saved."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed import faulty_training
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.slow

# Far less than the half hour after which the collective gives up in which the other rank waits.
SECONDS_TO_END = 30


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    root = Path(faulty_training.__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        # Else restarted ranks may find the addresses of dead ones (pytorch/pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def noted(folder: Path, rank: int, kind: str, what: str) -> list[Any]:
    """What a rank noted of all events of a kind."""
    return [event[what] for event in events(folder, rank) if event["event"] == kind]


def saved(folder: Path, step: int) -> dict[str, Any]:
    """A checkpoint, every tensor whole."""
    dcp_to_torch_save(folder / str(step), folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=True)


def assert_equal(a: Any, b: Any) -> None:
    """Bit for bit, however nested."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_equal(value, b[key])
    else:
        assert torch.equal(a, b)


def train_undisturbed(rank: int, folder: str) -> None:
    faulty_training.train(Path(folder))


def test_a_job_whose_rank_is_killed_ends_as_if_it_were_not(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Killed in a step, then in the next save; torchrun starts the ranks anew each time."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    faults = ["kill in step", "kill in save"]
    result = run(*torchrun, "--max_restarts=2", faulty_training.__file__, killed, *faults)
    assert result.returncode == 0, result.stderr
    two_ranks.run(train_undisturbed, str(whole))
    assert noted(killed, 1, "fault", "fault") == faults
    for rank in range(2):
        assert noted(killed, rank, "ready", "step") == [0, 2, 2]  # the killed save of 4 is none
        losses = noted(whole, rank, "step", "loss")
        assert noted(killed, rank, "step", "loss")[-4:] == losses[-4:]
    last = faulty_training.NUM_STEPS
    assert_equal(saved(killed, last), saved(whole, last))


def test_an_error_on_one_rank_ends_the_job_in_seconds_with_its_message(tmp_path: Path) -> None:
    faults = ["planning", "sharding", "data", "step", "kill in step"]
    result = run(faulty_training.__file__, tmp_path, *faults)
    end = time.time()
    assert result.returncode == 1
    for fault in ("planning", "sharding", "step"):
        assert f"RuntimeError: the fault in {fault}" in result.stderr
    assert "indices must be in [0, 119) for table 't1', got 10000" in result.stderr
    # The agent reports what it sees first: the killed rank, or the other's lost connection.
    assert re.search("SIGKILL|by peer", result.stderr.rpartition("Root Cause")[2])
    failed = {}
    for rank in range(2):
        names, times = (noted(tmp_path, rank, "fault", what) for what in ("fault", "time"))
        failed.update(zip(names, times, strict=True))
    next_starts = [*noted(tmp_path, 0, "start", "time")[1:], end]
    for fault, next_start in zip(faults, next_starts, strict=True):
        assert 0 < next_start - failed[fault] < SECONDS_TO_END, fault
