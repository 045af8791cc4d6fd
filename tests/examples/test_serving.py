"""The serving example: exported, packaged, and run by a C++ program without Python."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchrec_tt.inference  # noqa: F401  registers the operators
from torchrec_tt.ops.library import library_path

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving"
OUTPUT = "output.pt"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what export_model.py writes, and the program."""
    folder = tmp_path_factory.mktemp("serving")
    export = [sys.executable, EXAMPLE / "export_model.py", "--output_dir", folder]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    exporting = subprocess.Popen(export, env={**os.environ, **caches})
    cmake = Path(sys.executable).with_name("cmake")
    configure = [cmake, "-S", EXAMPLE, "-B", folder, f"-DTORCH_DIR={torch.__path__[0]}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", folder], check=True, stdout=subprocess.DEVNULL)
    assert exporting.wait(timeout=240) == 0
    return folder


@pytest.fixture
def serve(served: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs the program with no environment, so that no Python is found."""

    def run(inputs: Path, operators: str | None = None) -> subprocess.CompletedProcess:
        command = [served / "serve", operators or library_path(), served / "model.pt2", inputs]
        return subprocess.run(
            [*command, tmp_path / OUTPUT],
            env={},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.mark.parametrize("batch_size", [5, 1])
def test_the_program_gives_what_python_gives(
    served: Path, serve: Callable, tmp_path: Path, batch_size: int
) -> None:
    result = serve(served / f"inputs_{batch_size}.pt")
    assert (result.returncode, result.stderr) == (0, "")
    output = torch.load(tmp_path / OUTPUT)
    expected = torch.load(served / f"expected_{batch_size}.pt")
    assert output.shape == (batch_size, 1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


def test_the_program_takes_empty_bags(served: Path, serve: Callable, tmp_path: Path) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    inputs = [torch.rand(3, 4), none, torch.zeros(9, dtype=torch.int64)]
    torch.save(inputs, tmp_path / "empty.pt")
    assert serve(tmp_path / "empty.pt").returncode == 0
    program = torch.export.load(served / "exported.pt2").module()
    output = torch.load(tmp_path / OUTPUT)
    torch.testing.assert_close(output, program(*inputs), rtol=0, atol=1e-6)


def test_the_program_links_no_python(served: Path) -> None:
    for binary in (served / "serve", library_path()):
        needed = subprocess.run(["ldd", binary], check=True, capture_output=True, text=True).stdout
        assert "libtorch_cpu" in needed
        assert "libpython" not in needed
        assert "libtorch_python" not in needed


@pytest.mark.parametrize("batch_size", [5, 1])
def test_the_exported_program_is_saved_and_loaded(served: Path, batch_size: int) -> None:
    program = torch.export.load(served / "exported.pt2").module()
    output = program(*torch.load(served / f"inputs_{batch_size}.pt"))
    expected = torch.load(served / f"expected_{batch_size}.pt")
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_an_id_out_of_range_ends_the_program_with_its_message(
    served: Path, serve: Callable, tmp_path: Path
) -> None:
    dense, ids, lengths = torch.load(served / "inputs_5.pt")
    ids[0] = 1_000_000
    torch.save([dense, ids, lengths], tmp_path / "wrong.pt")
    result = serve(tmp_path / "wrong.pt")
    assert result.returncode == 1
    assert "indices must be in [0, 1000000) for table 0, got 1000000" in result.stderr


def test_operators_that_are_not_there_end_the_program(served: Path, serve: Callable) -> None:
    result = serve(served / "inputs_5.pt", operators="nowhere/_C.so")
    assert result.returncode == 1
    assert "nowhere/_C.so: cannot open shared object file" in result.stderr
