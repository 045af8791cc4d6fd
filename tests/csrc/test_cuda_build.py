"""The library with CUDA operators on a machine without a GPU (`make cuda-check` builds it)."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.csrc.emulation import ROOT
from torchrec_tt.ops import library

IMPORTS = "import torch, torchrec_tt.ops.embedding_bag, torchrec_tt.ops.step_cores"
IMPORTS += ", torchrec_tt.ops.row_cache, torchrec_tt.ops.row_counter"
LIBRARY = ROOT / "build/cuda/_C.so"
OPERATORS = (
    "plan",
    "embedding_bag_forward",
    "embedding_bag_backward_dense",
    "embedding_bag_backward_update",
    "step_cores",
    "step_cached_rows",
    "count_rows",
)


def run(code: str, *, with_library: pathlib.Path) -> str:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{IMPORTS}\n{code}",
        ],
        env=os.environ | {"TORCHREC_TT_LIBRARY": str(with_library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def cuda_library() -> pathlib.Path:
    if not LIBRARY.exists():
        if os.environ.get("FAIL_WITHOUT_CUDA_BUILD") == "1":
            pytest.fail(f"{LIBRARY} must be there, `make cuda-check` builds it")
        pytest.skip("needs `make cuda-check` first")
    return LIBRARY


def test_one_library_registers_both_back_ends(cuda_library):
    code = (
        f"for name in {OPERATORS}:\n"
        "    for key in ('CPU', 'CUDA', 'Meta'):\n"
        "        has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "        assert has('torchrec_tt::' + name, key), (name, key)\n"
        "print(torch.ops.torchrec_tt.cuda_architectures())\n"
    )
    assert run(code, with_library=cuda_library).strip() == "80, 90, 100, 120"


def test_the_cpu_operators_of_the_cuda_library_work(cuda_library):
    code = (
        "import torchrec_tt\n"
        "bag = torchrec_tt.TTEmbeddingBag(50, 8, tt_ranks=[4, 4])\n"
        "bag(torch.tensor([1, 49]), torch.tensor([0, 1])).sum().backward()\n"
        "print(next(bag.parameters()).grad.abs().sum() > 0)\n"
    )
    assert run(code, with_library=cuda_library).strip() == "tensor(True)"


REDISPATCH = (
    "operator = torch.ops.torchrec_tt.plan.default\n"
    "keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)\n"
    "ids = torch.zeros(3, dtype=torch.int64)\n"
    "try:\n"
    "    operator.redispatch(keys, ids, ids, [2, 4, 0, 2, 2, 1, 1, 1], [0, 0], 'fatal', [])\n"
    "except Exception as error:\n"
    "    print(type(error).__name__, error)\n"
)


def test_a_cuda_operator_takes_no_tensor_of_the_cpu(cuda_library):
    """As it would be asked where one of several tensors is on CUDA."""
    said = run(REDISPATCH, with_library=cuda_library)
    assert said.strip() == "ValueError indices must be on a CUDA device like the other tensors"


def test_a_build_without_cuda_says_so_of_cuda_tensors():
    assert library.operators().cuda_architectures() == ""
    said = run(REDISPATCH, with_library=pathlib.Path(library.library_path()))
    assert said.startswith("RuntimeError this build of torchrec_tt has no CUDA operators: build")
