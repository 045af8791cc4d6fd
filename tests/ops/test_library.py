import pathlib
import re
import subprocess
import sys

import pytest
import torch

from torchrec_tt.ops import library

ROOT = pathlib.Path(__file__).parents[2]


def test_u86_importing_and_shaping_need_no_library_and_an_operator_says_what_is_missing(
    monkeypatch,
):
    monkeypatch.setenv("TORCHREC_TT_SKIP_LIBRARY", "1")
    code = (
        "import torch, torchrec_tt\n"
        "bag = torchrec_tt.TTEmbeddingBag(50, 8, tt_ranks=[4, 4])\n"
        "try:\n"
        "    bag(torch.tensor([1]), torch.tensor([0]))\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == (
        "the compiled operators were skipped because TORCHREC_TT_SKIP_LIBRARY=1 is set"
    )


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.0"])
def test_u86_u87_another_torch_is_told_before_the_library_is_loaded(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.ops, "load_library", None)  # not reached
    with pytest.raises(
        RuntimeError, match=rf"built for torch 2.11 to 2.15, found {re.escape(version)}"
    ):
        library.load()


def test_u89_versions_are_compared_as_numbers(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert library.torch_version() == (2, 9) < (2, 11)
    assert library.find_problem() is not None


def test_u86_a_missing_library_is_one_sentence_that_says_how_to_build(monkeypatch):
    monkeypatch.setattr(library, "library_path", lambda: None)
    with pytest.raises(RuntimeError, match="are missing: install torch, then build") as error:
        library.load()
    assert "\n" not in str(error.value)


def test_u86_a_broken_library_is_one_sentence(monkeypatch, tmp_path):
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "library_path", lambda: str(broken))
    with pytest.raises(RuntimeError, match=r"operators do not load in torch 2\."):
        library.load()


def test_u58_the_sources_include_only_the_stable_headers_of_torch():
    includes = re.compile(r'#include [<"](torch|ATen|c10)/([^>"]*)')
    found = {
        f"{match[1]}/{match[2]}"
        for source in (ROOT / "csrc").rglob("*.*")
        for match in includes.finditer(source.read_text())
    }
    assert found
    assert all(path.startswith(("torch/csrc/stable/", "torch/headeronly/")) for path in found)


def test_u58_u86_the_library_needs_no_cxx_symbol_of_torch():
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library.library_path()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "aoti_torch" in symbols
    assert not re.findall(r"\b_ZN?K?\w*(?:2at|3c10|5torch)\w+", symbols)


def test_loading_leaves_denormal_numbers_alone():
    library.load()
    tiny = torch.tensor([1e-40])
    assert (tiny * 0.5).item() > 0
