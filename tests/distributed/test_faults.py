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

FAULTS = ["planning", "sharding", "data", "step", "kill in step", "kill in save"]
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


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the log of a job that met every fault, one at each start, and went on."""
    folder = tmp_path_factory.mktemp("job")
    result = run(faulty_training.__file__, folder, *FAULTS)
    assert result.returncode == 0, result.stderr
    return folder, result.stderr


def test_a_fault_on_one_rank_ends_all_in_seconds(job: tuple[Path, str]) -> None:
    failed = {}
    for rank in range(2):
        names, times = (noted(job[0], rank, "fault", what) for what in ("fault", "time"))
        failed.update(zip(names, times, strict=True))
    next_starts = noted(job[0], 0, "start", "time")[1:]
    for fault, next_start in zip(FAULTS, next_starts, strict=True):
        assert 0 < next_start - failed[fault] < SECONDS_TO_END, fault


def test_the_log_has_the_error_of_the_rank_that_failed(job: tuple[Path, str]) -> None:
    for fault in ("planning", "sharding", "step"):
        assert f"RuntimeError: the fault in {fault}" in job[1]
    assert "indices must be in [0, 119) for table 't1', got 10000" in job[1]


def train_undisturbed(rank: int, folder: str) -> None:
    faulty_training.train(Path(folder))


def test_a_resumed_job_ends_as_if_nothing_had_happened(
    job: tuple[Path, str], two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(train_undisturbed, str(tmp_path))
    for rank in range(2):
        # From nothing, and once that is there from step 2: the killed save of step 4 is none.
        assert noted(job[0], rank, "ready", "step") == [0, 2, 2, 2, 2]
        losses = noted(tmp_path, rank, "step", "loss")
        assert noted(job[0], rank, "step", "loss")[-4:] == losses[-4:]
    last = faulty_training.NUM_STEPS
    assert_equal(saved(job[0], last), saved(tmp_path, last))


def test_torchrun_fails_where_a_rank_is_killed(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = run(*torchrun, faulty_training.__file__, tmp_path, "kill in step")
    (killed,) = noted(tmp_path, 1, "fault", "time")
    assert time.time() - killed < SECONDS_TO_END
    assert result.returncode == 1
    # The agent reports what it sees first: the killed rank, or the other's lost connection.
    assert re.search(r"\(exitcode: -9\) local_rank: 1|Connection \w+ by peer", result.stderr)
    assert "Root Cause (first observed failure)" in result.stderr
