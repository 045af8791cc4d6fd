"""TorchX component that trains the Criteo example: `torchx run torchx_components/train.py:criteo`.

Only torchx and the standard library are imported, and annotations are those that torchx 0.7
accepts (no `str | None`, no `list[str]`).
"""

from typing import Dict, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist


def criteo(
    *script_args: str,
    script: str = "examples/criteo/train.py",
    image: str = "",
    name: str = "criteo",
    j: str = "1x2",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # noqa: N803
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
) -> specs.AppDef:
    """Trains a DLRM with Tensor-Train tables on Criteo rows under torchrun.

    Args:
        script_args: flags of the script, after `--`.
        script: the training script.
        image: image or, for local schedulers, nothing.
        name: name of the job.
        j: nodes x ranks per node.
        h: a named resource, in place of cpu, gpu and memMB.
        cpu: cores per node.
        gpu: GPUs per node.
        memMB: memory per node in MiB.
        env: environment variables; OMP_NUM_THREADS is 1 unless given.
        max_retries: retries of the whole job.
    """
    return dist.ddp(
        *script_args,
        script=script,
        image=image,
        name=name,
        j=j,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env={"OMP_NUM_THREADS": "1", **(env or {})},
        max_retries=max_retries,
    )
