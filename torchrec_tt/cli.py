"""The `torchrec-tt` command."""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Sequence

import torch

import torchrec_tt
from torchrec_tt.ops import library
from torchrec_tt.ops.embedding_bag import cpu_isa


def doctor() -> int:
    """Prints what is installed and whether the operators work; returns 1 if they do not."""
    print(f"torchrec_tt  {torchrec_tt.__version__}")
    print(f"python       {platform.python_version()} on {platform.machine()}")
    print(f"torch        {torch.__version__}")
    for package in ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchx"):
        try:
            print(f"{package:<12} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package:<12} not installed")
    try:
        library.load()
        print(f"operators    ready, CPU instruction set {cpu_isa()}; no CUDA operators")
    except (RuntimeError, ValueError) as error:
        print(f"operators    {error}")
        first, last = (".".join(map(str, version)) for version in library.SUPPORTED_TORCH)
        print(f"             supported: torch {first} to {last}, see README.md, Install")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="torchrec-tt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print versions and whether the operators work")
    parser.parse_args(argv)
    return doctor()


if __name__ == "__main__":
    sys.exit(main())
