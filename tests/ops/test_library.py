import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest
import torch

import torchrec_tt.ops
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


HOST_ONLY = {"advise_huge_pages", "place_rows"}  # they take no tensor of a device


def test_every_operator_has_cpu_cuda_and_fake_registrations():
    """A build without CUDA has the CUDA key as well, to refuse; the glue's own names are read."""
    for module in pkgutil.iter_modules(torchrec_tt.ops.__path__):
        importlib.import_module(f"torchrec_tt.ops.{module.name}")
    library.load()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {
        name.removeprefix("torchrec_tt::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torchrec_tt::") and not has(name, "CompositeExplicitAutograd")
    }
    glue = "".join(path.read_text() for path in (ROOT / "csrc/cuda").glob("*.cpp"))
    assert names >= {"plan", "embedding_bag_forward", *HOST_ONLY}
    for name in names:
        assert has(f"torchrec_tt::{name}", "CPU"), name
        entry = torch._library.simple_registry.singleton.find(f"torchrec_tt::{name}")
        assert entry.fake_impl.kernel is not None, name
        if name not in HOST_ONLY:
            assert has(f"torchrec_tt::{name}", "CUDA"), name
            assert f'm.impl("{name}"' in glue, name
