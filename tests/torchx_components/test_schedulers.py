"""Dry runs on Kubernetes and Slurm; and Slurm's script run by bash, with an srun of one machine."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml
from torchx.runner import get_runner

from torchx_components import train

RESUMED = ("--data", "/data/day_0", "--checkpoint_dir", "/data/checkpoints", "--resume")
JOB = {"j": "2x4", "cpu": 8, "memMB": 16384, "max_retries": 2, "env": {"LOGLEVEL": "INFO"}}

# As srun does with the groups of a job: starts each at once, and fails if one of them does.
SRUN = f"""#!{sys.executable}
import itertools, os, subprocess, sys
nodes = []
for is_colon, group in itertools.groupby(sys.argv[1:], ":".__eq__):
    if is_colon:
        continue
    words = list(group)
    options = list(itertools.takewhile(lambda word: word.startswith("--"), words))
    (exported,) = [o.removeprefix("--export=ALL,") for o in options if o.startswith("--export=")]
    env = dict(pair.split("=", 1) for pair in exported.split(","))
    nodes.append(subprocess.Popen(words[len(options):], env=os.environ | env))
sys.exit(max(node.wait() for node in nodes))
"""
FAILS_ONCE = """
import pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
done = pathlib.Path("attempted")
print("attempt", 1 + done.exists(), "of", int(total), "ranks", flush=True)
dist.barrier()
if not done.exists():
    dist.barrier()
    if dist.get_rank() == 0:
        done.touch()
    sys.exit(3)
dist.destroy_process_group()
"""


def dry_run(app, scheduler, cfg):
    return get_runner().dryrun(app, scheduler, cfg=cfg).request


@pytest.mark.filterwarnings("ignore:.*Volcano")
def test_a_kubernetes_dry_run_is_a_valid_volcano_job(monkeypatch):
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    app = train.criteo(
        *RESUMED,
        **JOB,
        gpu=1,
        image="registry/torchrec_tt:1",
        mounts=["type=volume", "src=rows", "dst=/data"],
    )
    cfg = {"queue": "night"}
    if get_runner().scheduler_run_opts("kubernetes").get("validate_spec") is not None:
        cfg["validate_spec"] = False  # what follows torchx 0.7 else asks a cluster
    job = yaml.safe_load(str(dry_run(app, "kubernetes", cfg)))
    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    assert (job["spec"]["queue"], job["spec"]["maxRetry"]) == ("night", 2)
    tasks = job["spec"]["tasks"]
    assert [(task["name"], task["replicas"]) for task in tasks] == [("train-0", 1), ("train-1", 1)]
    hosts = ["TORCHX_RANK0_HOST", "VC_TRAIN_0_HOSTS"]
    for task, host in zip(tasks, hosts, strict=True):
        assert task["maxRetry"] == 2
        pod = task["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "registry/torchrec_tt:1"
        assert container["resources"]["limits"] == {
            "cpu": "8000m",
            "memory": "16384M",
            "nvidia.com/gpu": "1",
        }
        assert {"name": "LOGLEVEL", "value": "INFO"} in container["env"]
        assert {"name": "OMP_NUM_THREADS", "value": "3"} in container["env"]
        assert {"containerPort": 29500, "name": "c10d"} in container["ports"]
        assert "/data" in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {"claimName": "rows"} in [
            volume.get("persistentVolumeClaim") for volume in pod["volumes"]
        ]
        bash, shell_flag, text = container["command"]
        assert (bash, shell_flag) == ("bash", "-c")
        words = shlex.split(text)
        assert words[0] == "torchrun"
        assert words[words.index("--rdzv_endpoint") + 1] == f"${{{host}:=localhost}}:29500"
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--nproc_per_node") + 1] == "4"
        assert words[words.index("--rdzv_id") + 1] == job["metadata"]["name"]
        assert words[-6:] == ["examples/criteo/train.py", *RESUMED]


@pytest.mark.filterwarnings("ignore:Error running. `sinfo --version`")  # torchx after 0.7
def test_a_slurm_dry_run_is_a_valid_batch_script():
    request = dry_run(
        train.criteo(*RESUMED, **JOB, gpu=1), "slurm", {"partition": "night", "time": "60"}
    )
    script = request.materialize()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    groups = [text for text in script.splitlines() if text.startswith("#SBATCH --job-name")]
    for node, group in enumerate(groups):
        assert set(group.split()[1:]) - {"--ntasks=1"} == {  # which torchx adds after 0.7
            *(f"--job-name=train-{node}", "--partition=night", "--time=60", "--requeue"),
            *("--ntasks-per-node=1", "--cpus-per-task=8", "--mem=16384", "--gpus-per-task=1"),
        }
    assert len(groups) == 2
    assert "#SBATCH hetjob" in script.splitlines()
    assert "export TORCHX_MAX_RETRIES=2" in script
    start = script.index("srun ")
    words = shlex.split(script[start : script.index("exitcode=$?")].replace("\\\n", " "))
    for command in " ".join(words).split(" : "):
        assert "LOGLEVEL=INFO" in command
    texts = [word for word in words if "torch.distributed.run" in word]
    assert len(texts) == 2
    for text in texts:
        inner = shlex.split(text)
        assert inner[:3] == [sys.executable, "-m", "torch.distributed.run"]
        endpoint = inner[inner.index("--rdzv_endpoint") + 1]
        assert endpoint == "${SLURM_JOB_NODELIST_HET_GROUP_0:=localhost}:29500"
        assert inner[inner.index("--rdzv_id") + 1] == "$SLURM_JOB_ID"
        assert inner[inner.index("--nproc_per_node") + 1] == "4"
        assert inner[-6:] == ["examples/criteo/train.py", *RESUMED]


@pytest.mark.slow
def test_slurms_script_runs_two_nodes_and_requeues_a_failed_job(tmp_path, free_port):
    (tmp_path / "once.py").write_text(FAILS_ONCE)
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/bash\necho "$@" > requeued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    app = train.ddp(script="once.py", j="2x1", max_retries=1, rdzv_port=free_port)
    script = dry_run(app, "slurm", {}).materialize()

    def run(restarts):
        return subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=os.environ
            | {
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "SLURM_JOB_ID": "77",
                "SLURM_RESTART_COUNT": str(restarts),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    first = run(0)
    assert first.returncode == 1, first.stderr
    assert "attempt 1 of 2 ranks" in first.stdout
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    again = run(1)
    assert again.returncode == 0, again.stderr
    assert "attempt 2 of 2 ranks" in again.stdout
