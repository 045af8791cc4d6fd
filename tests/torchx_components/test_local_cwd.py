"""Jobs that torchx's local_cwd scheduler really runs, as the command line starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPONENTS = ROOT / "torchx_components" / "train.py"
SMALL_FLAGS = (
    *("--batch_size", "32", "--test_batch_size", "64"),
    *("--num_embeddings_per_feature", ",".join(str(40 + 100 * column) for column in range(26))),
    *("--tt_tables", "4", "--tt_rank", "4"),
    *("--dense_arch_layer_sizes", "32,16", "--over_arch_layer_sizes", "32,1"),
)
LONG_ENOUGH_TO_KILL = (*SMALL_FLAGS, "--made_rows", "10000", "--save_every", "10", "--resume")
SHOWS_ITS_RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
print("ranks:", int(total), "threads:", os.environ["OMP_NUM_THREADS"], flush=True)
dist.destroy_process_group()
"""
DIES_ONCE = """
import os, pathlib, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
died = pathlib.Path("died").exists()
dist.barrier()
if os.environ["RANK"] == "1" and not died:
    pathlib.Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(())
dist.all_reduce(total)
print("ranks:", int(total), "died:", died, flush=True)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.slow


def started(component, *flags, script_flags=(), cwd=ROOT, cfg=()):
    """Starts a job from a shell whose PATH has no torchrun."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torchx.cli.main", "run", "--scheduler", "local_cwd"),
            *cfg,
            *(f"{COMPONENTS}:{component}", *flags, "--", *script_flags),
        ],
        cwd=cwd,
        env=os.environ | {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job):
    """Waits for the job; returns its exit status and its log."""
    _, log = job.communicate(timeout=200)
    return job.returncode, log


def trained(*flags, script_flags=(), output_dir):
    """Runs the example and returns what it measured, and the log."""
    job = started(
        "criteo",
        *flags,
        script_flags=(*SMALL_FLAGS, *script_flags, "--output_dir", str(output_dir)),
    )
    code, log = ended(job)
    assert code == 0, log
    return json.loads((output_dir / "metrics.json").read_text()), log


def rank_processes(output_dir):
    """Returns the process of each rank that runs with this folder, by its rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(output_dir) not in (process / "cmdline").read_text().split("\0"):
                continue
            environment = (process / "environ").read_text().split("\0")
        except OSError:  # it has ended
            continue
        found |= {
            int(text.removeprefix("RANK=")): int(process.name)
            for text in environment
            if text.startswith("RANK=")
        }
    return found


def wait_for_checkpoint(folder, job):
    """Waits until a checkpoint is complete."""
    while not list(folder.glob("*/.metadata")):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.02)


# U80, U81
def test_a_script_of_ones_own_runs_with_no_torchrun_on_the_path(tmp_path):
    (tmp_path / "mine.py").write_text(SHOWS_ITS_RANKS)
    cfg = ("-cfg", "auto_set_cuda_visible_devices=True")  # which needs no nvidia-smi without --gpu
    code, log = ended(started("ddp", "--script", "mine.py", cwd=tmp_path, cfg=cfg))
    assert code == 0, log
    for rank in range(2):
        assert f"mine/0 [{rank}]:ranks: 2 threads: 1" in log
    assert "CUDA" not in log


def test_two_nodes_meet(tmp_path, free_port):
    (tmp_path / "mine.py").write_text(SHOWS_ITS_RANKS)
    flags = ("--script", "mine.py", "-j", "2x2", "--rdzv_port", str(free_port))
    code, log = ended(started("ddp", *flags, cwd=tmp_path))
    assert code == 0, log
    for node in range(2):
        for rank in range(2):
            assert f"mine/{node} [{rank}]:ranks: 4 threads: 1" in log


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_die_are_started_again(tmp_path, free_port, nodes):
    (tmp_path / "mine.py").write_text(DIES_ONCE)
    flags = ("--script", "mine.py", "-j", f"{nodes}x2", "--rdzv_port", str(free_port))
    code, log = ended(started("ddp", *flags, "--max_restarts", "1", cwd=tmp_path))
    assert code == 0, log
    assert log.count(f"ranks: {2 * nodes} died: True") == 2 * nodes


# U80
def test_the_reason_of_a_failure_is_kept(tmp_path):
    job = started(
        "criteo",
        script_flags=("--data", str(tmp_path / "none.tsv"), "--output_dir", str(tmp_path / "run")),
        cfg=("-cfg", f"log_dir={tmp_path / 'logs'}"),
    )
    code, _ = ended(job)
    assert code == 1
    (folder,) = (tmp_path / "logs" / "torchx").iterdir()
    assert json.loads((folder / "SUCCESS").read_text())["final_state"] == "FAILED"
    stderr = (folder / "train" / "0" / "stderr.log").read_text()
    assert "train.py: error: " in stderr
    assert "none.tsv" in stderr


def test_two_nodes_train_and_resume(tmp_path, free_port):
    flags = ("-j", "2x2", "--rdzv_port", str(free_port))
    checkpoints = (
        *("--made_rows", "6000"),
        *("--checkpoint_dir", str(tmp_path / "checkpoints"), "--resume"),
    )
    metrics, log = trained(*flags, script_flags=checkpoints, output_dir=tmp_path / "first")
    assert metrics["ranks"] == 4
    assert "resumed from" not in log
    again, log = trained(
        *flags, script_flags=(*checkpoints, "--epochs", "2"), output_dir=tmp_path / "second"
    )
    assert f"resumed from {tmp_path}/checkpoints/{metrics['steps']}: epoch 1, row 0" in log
    assert again["steps"] == 2 * metrics["steps"]


def test_a_job_whose_rank_dies_goes_on_from_its_checkpoint(tmp_path):
    folders = ("--checkpoint_dir", f"{tmp_path}/checkpoints", "--output_dir", f"{tmp_path}/run")
    job = started("criteo", "--max_restarts", "1", script_flags=(*LONG_ENOUGH_TO_KILL, *folders))
    wait_for_checkpoint(tmp_path / "checkpoints", job)
    os.kill(rank_processes(tmp_path / "run")[1], signal.SIGKILL)
    code, log = ended(job)
    assert code == 0, log
    assert f"resumed from {tmp_path}/checkpoints/" in log
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == -(-metrics["train_rows"] // 64)


def test_a_job_that_is_run_again_goes_on_from_its_checkpoint(tmp_path):
    folders = ("--checkpoint_dir", f"{tmp_path}/checkpoints", "--output_dir", f"{tmp_path}/run")
    job = started("criteo", script_flags=(*LONG_ENOUGH_TO_KILL, *folders))
    wait_for_checkpoint(tmp_path / "checkpoints", job)
    os.kill(rank_processes(tmp_path / "run")[0], signal.SIGKILL)
    code, _ = ended(job)
    assert code == 1
    assert not (tmp_path / "run" / "metrics.json").exists()
    code, log = ended(started("criteo", script_flags=(*LONG_ENOUGH_TO_KILL, *folders)))
    assert code == 0, log
    assert f"resumed from {tmp_path}/checkpoints/" in log
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["steps"] == -(-metrics["train_rows"] // 64)
