"""Runs of the example that stop and go on: the same result, at the right row, or a refusal."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import find

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/criteo/train.py"
FLAGS = (
    *("--made_rows", "1400", "--epochs", "2", "--num_embeddings_per_feature"),
    ",".join(str(40 + 100 * column) for column in range(26)),
    *("--tt_tables", "4", "--tt_rank", "4", "--tt_cache", "0.1", "--test_batch_size", "64"),
    *("--dense_arch_layer_sizes", "32,16", "--over_arch_layer_sizes", "32,1"),
    *("--lr_warmup_steps", "12", "--lr_decay_start", "14", "--lr_decay_steps", "5"),
)
SAVE = ("--save_every", "4", "--keep_checkpoints", "99")
TIMES = {"samples_per_second", "data_wait_ratio", "time_ratio"}
MEASURED = {*TIMES, *(f"dense_{name}" for name in TIMES), "peak_memory_bytes"}  # not twice the same

pytestmark = pytest.mark.slow


def command(*flags, folder, ranks, restarts=0):
    launcher = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)),
        *("--max_restarts", str(restarts)),
    )
    paths = ("--output_dir", folder / "out", "--checkpoint_dir", folder / "checkpoints")
    return [
        *(sys.executable, *(launcher if ranks > 1 else ()), SCRIPT, *FLAGS),
        *(*flags, *map(str, paths)),
    ]


def start(*flags, folder, ranks, restarts=0):
    return subprocess.Popen(
        command(*flags, folder=folder, ranks=ranks, restarts=restarts),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*flags, folder, ranks):
    """Runs to the end and returns what the ranks wrote to stderr."""
    process = start(*flags, folder=folder, ranks=ranks)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 0, text
    return text


def result(folder):
    metrics = json.loads((folder / "out/metrics.json").read_text())
    return {name: value for name, value in metrics.items() if name not in MEASURED}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two ranks that was never stopped, with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    run(*SAVE, folder=folder, ranks=2)
    return folder


def copy(whole, folder, steps):
    """Leaves `folder` as a run does that died after the last of `steps`."""
    for step in steps:
        shutil.copytree(whole / f"checkpoints/{step}", folder / f"checkpoints/{step}")


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_is_kept_at_each_step_asked_for_and_after_each_epoch(whole):
    assert steps_in(whole) == [4, 8, 10, 12, 16, 20]


def test_a_resumed_run_ends_as_one_that_was_never_stopped(whole, tmp_path):
    copy(whole, tmp_path, [12, 16])
    text = run(*SAVE, "--resume", folder=tmp_path, ranks=2)
    assert f"resumed from {tmp_path}/checkpoints/16: epoch 1, row 768" in text
    assert result(tmp_path) == result(whole)
    assert len(result(tmp_path)["validations"]) == 2


def test_another_number_of_ranks_goes_on_at_the_right_row(whole, tmp_path):
    copy(whole, tmp_path, [16])
    text = run("--resume", "--save_every", "3", folder=tmp_path, ranks=1)
    assert "epoch 1, row 768" in text
    found, expected = result(tmp_path), result(whole)
    assert (found["ranks"], found["steps"]) == (1, 20)
    for name in ("auroc", "logloss", "normalized_entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
    assert steps_in(tmp_path) == [18, 20]  # the newest two


def test_a_row_need_not_be_a_multiple_of_the_new_batch(whole, tmp_path):
    copy(whole, tmp_path, [16])
    run("--resume", "--batch_size", "100", folder=tmp_path, ranks=1)
    rows = 1200 - 768
    assert result(tmp_path)["steps"] == 16 + -(-rows // 100)
    saved = json.loads((tmp_path / f"checkpoints/{16 + 5}/run.json").read_text())
    assert saved["progress"]["rows_trained"] == 2 * 1200


def test_what_died_in_a_save_is_passed_over(whole, tmp_path):
    copy(whole, tmp_path, [16])
    shutil.copytree(whole / "checkpoints/20", tmp_path / "checkpoints/20")
    (tmp_path / "checkpoints/20/.metadata").unlink()  # which is written last
    text = run("--resume", folder=tmp_path, ranks=2)
    assert "checkpoints/16: epoch 1, row 768" in text
    assert result(tmp_path) == result(whole)
    assert (tmp_path / "checkpoints/20/.metadata").exists()


def test_a_run_that_died_in_the_uncompressed_model_trains_only_that(tmp_path):
    folder, again = tmp_path / "whole", tmp_path / "again"
    run("--compare_dense", *SAVE, folder=folder, ranks=1)
    copy(folder, again, [20, "dense/16"])
    text = run("--compare_dense", "--resume", folder=again, ranks=1)
    assert f"resumed from {again}/checkpoints/20: epoch 2, row 0" in text
    assert f"resumed from {again}/checkpoints/dense/16: epoch 1, row 768" in text
    assert result(again) == result(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.json", "{path}/run.json must be of a run of this script, got "),
        (".metadata", "{path} must be a whole checkpoint, got "),
        ("__0_0.distcp", "{path} must be a whole checkpoint, got "),
    ],
)
def test_a_damaged_checkpoint_is_named_in_one_line(whole, tmp_path, name, message):
    copy(whole, tmp_path, [16])
    path = tmp_path / "checkpoints/16"
    (path / name).write_text("{}")
    process = start("--resume", folder=tmp_path, ranks=1)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 1
    assert text.splitlines()[-1].startswith(f"train.py: error: {message.format(path=path)}")
    assert "Traceback" not in text


@pytest.mark.parametrize("reason", ["the disk is full", "a file is in its place"])
def test_a_checkpoint_that_cannot_be_written_is_named_in_one_line(
    whole, tmp_path, limit_files, reason
):
    copy(whole, tmp_path, [16])
    path = tmp_path / "checkpoints/20"
    if reason == "the disk is full":
        limit_files(100_000)
    else:
        path.touch()
    process = start("--resume", folder=tmp_path, ranks=2)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 1
    (line,) = {line for line in text.splitlines() if "train.py: error: " in line}  # of both ranks
    start_of_line = f"train.py: error: checkpoint {path} cannot be written, those before it stay: "
    assert line.startswith(start_of_line)
    assert "MB free on its disk" in line
    assert 'train.py", line' not in text  # no traceback of ours
    assert (tmp_path / "checkpoints/16/.metadata").exists()


def test_folders_of_other_names_stay(whole, tmp_path):
    copy(whole, tmp_path, [16])
    shutil.copytree(whole / "checkpoints/16", tmp_path / "checkpoints/best")
    run("--resume", "--keep_checkpoints", "1", folder=tmp_path, ranks=1)
    (numbered,) = [path for path in (tmp_path / "checkpoints").iterdir() if path.name != "best"]
    assert numbered.name != "16"
    assert (tmp_path / "checkpoints/best/.metadata").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--tt_rank", "8", "--resume"),
            "table t_cat_22 must be 2240 rows of dim 16, TT ranks [4, 4], row factors "
            "[10, 14, 16], column factors [2, 2, 4] to resume from {path}, got 2240 rows of dim "
            "16, TT ranks [8, 8], row factors [10, 14, 16], column factors [2, 2, 4]",
        ),
        (
            ("--over_arch_layer_sizes", "16,1", "--resume"),
            "--over_arch_layer_sizes must be [32, 1] to resume from {path}, got [16, 1]",
        ),
        (
            ("--made_rows", "700", "--resume"),
            "the number of training rows must be 1200 to resume from {path}, got 600",
        ),
        ((), "--checkpoint_dir must be without checkpoints unless --resume is given, got {path}"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(whole, tmp_path, flags, message):
    copy(whole, tmp_path, [16])
    process = start(*flags, folder=tmp_path, ranks=1)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 1
    path = tmp_path / "checkpoints/16"
    assert f"train.py: error: {message.format(path=path)}\n" in text
    assert steps_in(tmp_path) == [16]


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


def test_a_killed_run_resumes_and_ends_as_if_it_was_not_killed(whole, tmp_path):
    expected = tmp_path / "expected"
    run(*SAVE, folder=expected, ranks=1)
    folder = tmp_path / "killed"
    process = start("--save_every", "1", folder=folder, ranks=1)
    wait_for(folder / "checkpoints/12", process)  # in its save, or just after it
    process.kill()
    process.communicate()
    assert not (folder / "out/metrics.json").exists()
    run("--resume", "--save_every", "4", folder=folder, ranks=1)
    assert result(folder) == result(expected)


def test_torchrun_restarts_a_job_whose_rank_was_killed(whole, tmp_path):
    process = start("--resume", *SAVE, folder=tmp_path, ranks=2, restarts=1)
    wait_for(tmp_path / "checkpoints/8/.metadata", process)
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    os.kill(int(" ".join(path.read_text() for path in tasks).split()[-1]), signal.SIGKILL)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert "resumed from" in text
    assert result(tmp_path) == result(whole)


def test_a_checkpoint_in_place_of_their_folder_is_refused(tmp_path):
    (tmp_path / ".metadata").touch()
    message = (
        f"--checkpoint_dir must be the folder that holds checkpoints, got one of them, {tmp_path}"
    )
    with pytest.raises(ValueError, match=message):
        find(tmp_path, resume=True)
