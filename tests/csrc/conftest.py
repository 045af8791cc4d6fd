"""The CUDA operators, emulated, in the place of the CPU's."""

import pytest
import torch

from tests.csrc.emulation import HERE, ROOT, Emulation, build

CUDA = ROOT / "csrc/cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests here time to build: each worker may, on cores that others use as well."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


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
