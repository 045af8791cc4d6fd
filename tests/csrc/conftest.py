"""The CUDA operators, emulated, in the place of the CPU's."""

import pytest
import torch

from tests.csrc.emulation import ROOT, Emulation, build

CUDA = ROOT / "csrc/cuda"


@pytest.fixture(scope="session")
def cuda_operators() -> Emulation:
    """csrc/cuda, glue and kernels, as `torch.ops.torchrec_tt_emulated` for tensors on the CPU."""
    sources = [*sorted(CUDA.glob("*.cpp")), *sorted(CUDA.glob("*.cu"))]
    emulation = build(
        "cuda_operators",
        [ROOT / "csrc/ops.cpp", *sources],
        flags=[
            "-fvisibility=hidden",
            "-DTT_OPERATORS=torchrec_tt_emulated",
            "-DTORCHREC_TT_WITH_CUDA",
            '-DTT_CUDA_ARCHITECTURES="90"',
        ],
        with_torch=True,
    )
    torch.ops.load_library(str(emulation.path))
    return emulation
