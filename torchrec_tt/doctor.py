"""Whether what is installed fits together, and how to mend it."""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

import torch

import torchrec_tt
from torchrec_tt.ops import library

_PACKAGES = ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchx", "rich", "matplotlib")
_TORCHREC = ((1, 6, 1), (1, 10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What `torchrec-tt doctor` finds.

    Attributes:
        versions: of the package, Python, torch and what it works with; None: not installed.
        operators: whether they load.
        isa: the CPU instruction set that they use.
        devices: that torch sees.
        threads: of torch in this process.
        problems: each with its remedy.
    """

    versions: dict[str, str | None]
    operators: str
    isa: str | None
    devices: list[str]
    threads: int
    problems: list[str]

    def text(self) -> str:
        """Returns the diagnosis for a terminal."""
        lines = [f"{name:<14} {found or 'not installed'}" for name, found in self.versions.items()]
        lines.append(f"{'operators':<14} {self.operators}")
        lines.append(f"{'devices':<14} {', '.join(self.devices)}; {self.threads} threads of torch")
        lines += [f"{'problem':<14} {problem}" for problem in self.problems]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Returns what is installed and what does not fit together."""
    versions: dict[str, str | None] = {
        "torchrec_tt": torchrec_tt.__version__,
        "python": f"{platform.python_version()} on {platform.machine()}",
        "torch": torch.__version__,
    }
    versions |= {package: _version(package) for package in _PACKAGES}
    problems, isa = [], None
    try:
        library.load()
        from torchrec_tt.ops.embedding_bag import cpu_isa

        isa = cpu_isa()
        operators = f"ready, CPU instruction set {isa}"
    except (RuntimeError, ValueError) as error:
        operators = "not ready"
        first, last = (".".join(map(str, version)) for version in library.SUPPORTED_TORCH)
        problems.append(f"{error} (supported: torch {first} to {last}, see README.md, Install)")
    devices = [f"{os.cpu_count()} processors"]
    devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Diagnosis(
        versions=versions,
        operators=operators,
        isa=isa,
        devices=devices,
        threads=torch.get_num_threads(),
        problems=[*problems, *_mismatches(versions)],
    )


def _mismatches(versions: dict[str, str | None]) -> list[str]:
    problems = []
    torchrec = versions["torchrec"]
    if torchrec is not None:
        number = tuple(
            int(part) for part in torchrec.split("+")[0].split(".")[:3] if part.isdigit()
        )
        if not _TORCHREC[0] <= number < _TORCHREC[1]:
            problems.append(
                f"TorchRec {torchrec} is not among the supported 1.6.1 to 1.9: "
                "pip install 'torchrec>=1.6.1,<1.10'"
            )
        if versions["fbgemm-gpu"] is None and versions["fbgemm-gpu-cpu"] is None:
            problems.append(
                "TorchRec needs FBGEMM: pip install fbgemm-gpu, or fbgemm-gpu-cpu without a GPU"
            )
    if versions["fbgemm-gpu"] is not None and versions["fbgemm-gpu-cpu"] is not None:
        problems.append(
            "fbgemm-gpu and fbgemm-gpu-cpu overwrite each other: uninstall both, install one"
        )
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        problems.append(
            "this machine has an NVIDIA driver and torch is built for CPUs: install a CUDA build "
            "of torch, see pytorch.org"
        )
    return problems


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
