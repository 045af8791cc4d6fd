"""The checks of gpu_check.py as tests, where there is a GPU; what it says where there is none."""

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu_check import CHECKS, ROOT


# U54
@pytest.mark.gpu
@pytest.mark.parametrize("check", [name for name in CHECKS if name != "dmp"])
def test_on_a_gpu(check):
    if not torch.cuda.is_available():
        if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
            pytest.fail("FAIL_WITHOUT_CUDA=1 asks for a GPU, and torch sees none")
        pytest.skip("needs a GPU")
    command = [sys.executable, str(ROOT / "tests/gpu_check.py"), "--only", check]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--only", "graph"]])
def test_gpu_check_says_that_there_is_no_gpu(arguments, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "tests/gpu_check.py"), "--json", str(report)]
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 2
    assert result.stdout.startswith("gpu-check needs a GPU")
    assert not report.exists()
