"""TorchX components: `criteo` trains the example, `ddp` a script of your own; see docs/launch.md.

    torchx run -s local_cwd torchx_components/train.py:criteo -j 1x2 -- --epochs 1

Both are torchx's `dist.ddp` with another interpreter, restarts and threads. Only torchx and the
standard library are imported. torchx 0.7 reads annotations by name: no `str | None` or `list[str]`.
"""

import importlib.util
import os
import re
import shlex
import sys
from typing import Dict, List, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist


def ddp(
    *script_args: str,
    script: Optional[str] = None,  # noqa: UP045
    m: Optional[str] = None,  # noqa: UP045
    image: str = "",
    name: str = "/",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
    max_restarts: int = 0,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
    debug: bool = False,
    python: Optional[str] = None,  # noqa: UP045
) -> specs.AppDef:
    """Runs a script, or a module, on every rank under torchrun.

    Args:
        script_args: flags of the script, after `--`.
        script: the script, from the folder that the job runs in.
        m: a module, in place of a script.
        image: the container's image; none for local_cwd and Slurm.
        name: name of the job.
        h: a named resource, in place of cpu, gpu and memMB.
        cpu: cores per node.
        gpu: GPUs per node.
        memMB: memory per node in MiB.
        j: nodes x ranks per node.
        env: environment variables of every rank; OMP_NUM_THREADS is this shell's, or 1.
        max_retries: how often the scheduler runs a failed job again; local_cwd never does.
        max_restarts: how often torchrun starts the ranks again on their nodes when one fails.
        rdzv_port: port of the first node where several nodes meet.
        rdzv_backend: how the nodes meet.
        mounts: mounts of the container.
        debug: torch's debugging variables.
        python: what runs torchrun; if not given, what runs torchx, or the image's torchrun.
    """
    for argument, value, least in (
        *(("cpu", cpu, 1), ("gpu", gpu, 0), ("memMB", memMB, 1)),
        *(("max_restarts", max_restarts, 0), ("max_retries", max_retries, 0)),
    ):
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")
    if not 0 < rdzv_port < 65536:
        raise ValueError(f"rdzv_port must be in 1 to 65535, got {rdzv_port}")
    if any(part.isdecimal() and int(part) == 0 for part in re.split("[:x]", j)):
        raise ValueError(f"j must be a node and a rank or more, got {j}")  # 0x2 would run nothing
    if python == "":
        raise ValueError("python must be an interpreter, got ''")
    defaults = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if max_restarts > 0:
        # In a shared store new ranks find their dead predecessors (pytorch/pytorch#135712).
        defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    app = dist.ddp(
        *script_args,
        script=script,
        m=m,
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env=defaults | (env or {}),
        max_retries=max_retries,
        rdzv_port=rdzv_port,
        rdzv_backend=rdzv_backend,
        mounts=mounts,
        debug=debug,
    )
    (role,) = app.roles
    shell_flag, command = role.args
    arguments = command.removeprefix("torchrun ")
    assert arguments != command, f"dist.ddp must run torchrun, got {command}"
    torchrun = _torchrun(python, image=image)
    role.args = [shell_flag, f"{torchrun} --max_restarts {max_restarts} {arguments}"]
    return app


def criteo(
    *script_args: str,
    script: str = "examples/criteo/train.py",
    image: str = "",
    name: str = "criteo",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
    max_restarts: int = 0,
    rdzv_port: int = 29500,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
    debug: bool = False,
    python: Optional[str] = None,  # noqa: UP045
) -> specs.AppDef:
    """Trains a DLRM with Tensor-Train tables on Criteo rows.

    Args:
        script_args: flags of the script, after `--`.
        script: the training script.
        image: the container's image; none for local_cwd and Slurm.
        name: name of the job.
        h: a named resource, in place of cpu, gpu and memMB.
        cpu: cores per node.
        gpu: GPUs per node; the script trains on CPUs.
        memMB: memory per node in MiB.
        j: nodes x ranks per node.
        env: environment variables of every rank; OMP_NUM_THREADS is this shell's, or 1.
        max_retries: how often the scheduler runs a failed job again; local_cwd never does.
        max_restarts: how often torchrun starts the ranks again on their nodes when one fails.
        rdzv_port: port of the first node where several nodes meet.
        mounts: mounts of the container.
        debug: torch's debugging variables.
        python: what runs torchrun; if not given, what runs torchx, or the image's torchrun.
    """
    return ddp(
        *script_args,
        script=script,
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env=env,
        max_retries=max_retries,
        max_restarts=max_restarts,
        rdzv_port=rdzv_port,
        mounts=mounts,
        debug=debug,
        python=python,
    )


def _torchrun(python: Optional[str], *, image: str) -> str:  # noqa: UP045
    """Returns the command; PATH may have no torchrun, or another environment's."""
    if python is None:
        if image:
            return "torchrun"
        if importlib.util.find_spec("torch") is None:
            raise ValueError(
                f"torch must be installed beside torchx, or --python name an interpreter that has "
                f"it: {sys.executable} has none"
            )
        python = sys.executable
    return f"{shlex.quote(python)} -m torch.distributed.run"
