import os
import pathlib
import re
import subprocess
import sys

import pytest

import torchrec_tt
from torchrec_tt import doctor

ROOT = pathlib.Path(__file__).parents[1]


def test_every_public_name_resolves():
    for name in torchrec_tt.__all__:
        assert getattr(torchrec_tt, name).__name__ == name
        assert name in dir(torchrec_tt)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'torchrec_tt' has no attribute 'TTBag'"):
        torchrec_tt.TTBag  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_torchrec():
    code = (
        "import sys, torchrec_tt\n"
        "assert not {'torch', 'torchrec', 'fbgemm_gpu'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# U15
def test_every_torchrec_that_is_supported_has_its_test_run():
    first, end = re.search(
        r'"torchrec>=1\.(\d+)[.\d]*,<1\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    ).groups()
    others = re.search(r"^TORCHREC_VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    pinned = re.search(r"^torchrec==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.M)[1]
    tested = [tuple(map(int, version.split("."))) for version in (*others.split(), pinned)]
    assert {version[:2] for version in tested} == {(1, k) for k in range(int(first), int(end))}
    assert (min(tested), (1, int(end))) == doctor._TORCHREC


@pytest.mark.slow
def test_u88_a_build_without_torch_stops_with_one_sentence(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ImportError('hidden by the test')\n")
    cmake = pathlib.Path(sys.executable).with_name("cmake")
    result = subprocess.run(
        [
            cmake if cmake.exists() else "cmake",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-S",
            ROOT,
            "-B",
            tmp_path / "build",
        ],
        env={**os.environ, "PYTHONPATH": str(hidden)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "found none: install torch, then run `pip install --no-build-isolation .`" in message


@pytest.mark.slow
def test_u57_the_cuda_switch_says_that_it_needs_a_compiler(tmp_path):
    cmake = pathlib.Path(sys.executable).with_name("cmake")
    result = subprocess.run(
        [
            cmake if cmake.exists() else "cmake",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DTORCHREC_TT_WITH_CUDA=ON",
            "-DNVCC=OFF",  # as where none is found
            "-S",
            ROOT,
            "-B",
            tmp_path / "build",
        ],
        env={k: v for k, v in os.environ.items() if "CUDA" not in k},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode != 0
    assert "TORCHREC_TT_WITH_CUDA=ON needs nvcc" in " ".join(result.stderr.split())
