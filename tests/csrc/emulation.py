"""Builds CUDA sources into libraries that run on the CPU, and drives them (cuda_emulation.h)."""

import concurrent.futures
import contextlib
import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import torch

ROOT = pathlib.Path(__file__).parents[2]
HERE = ROOT / "tests/csrc"
BUILD = ROOT / "build/emulation"
SCHEDULES = (0, 1, 2)  # in order, reversed, shuffled (every number above 1 is another shuffle)

# As nvcc sees a kernel, but with a hook at every load and store.
_KERNEL_FLAGS = (
    *("-x", "c++", "-DTT_CUDA_EMULATION", "-fsanitize=thread"),
    *("--param", "tsan-instrument-func-entry-exit=0"),
)
_RUNTIME = sorted(HERE.glob("cuda_emulation*.cpp"))


class EmulationError(RuntimeError):
    """What the emulation found in a kernel."""


class Emulation:
    """A library of emulated kernels: `calls` are its `extern "C"` functions."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.calls = ctypes.CDLL(str(path))
        self.calls.emulation_barrier.restype = ctypes.c_char_p
        self.calls.emulation_take_error.restype = ctypes.c_char_p

    def set_schedule(self, seed: int) -> None:
        """Chooses the order of blocks and threads, see SCHEDULES."""
        self.calls.emulation_set_schedule(seed)

    def set_shared_limit(self, num_bytes: int) -> None:
        """Says how much shared memory a block may have; 99 KiB at first, as on sm_120."""
        self.calls.emulation_set_shared_limit(num_bytes)

    def fail_cub_call(self, number: int) -> None:
        """Lets one of the next calls of CUB fail, the first of them is number 1; 0: none."""
        self.calls.emulation_fail_cub_call(number)

    def check(self) -> None:
        """Raises EmulationError if a kernel that ran since the last check was at fault."""
        error = self.calls.emulation_take_error()
        if error is not None:
            raise EmulationError(self.with_lines(error.decode()))

    def with_lines(self, message: str) -> str:
        """Returns an error's message with places in the source for places in the library."""

        def line(match: re.Match) -> str:
            command = ["addr2line", "-s", "-e", str(self.path), match[1]]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            return f"at {result.stdout.strip() or match[1]}"

        if shutil.which("addr2line") is None:
            return message
        return re.sub(r"at \+(0x[0-9a-f]+)", line, message)

    def barriers(self) -> list[str]:
        """Returns the barriers that were reached so far, by file, line and kind."""
        calls = self.calls
        return [calls.emulation_barrier(i).decode() for i in range(calls.emulation_num_barriers())]

    @contextlib.contextmanager
    def without_barrier(self, barrier: str) -> Iterator[None]:
        """Switches one barrier off: its threads go on at once."""
        self.calls.emulation_disable_barrier(self.barriers().index(barrier))
        try:
            yield
        finally:
            self.calls.emulation_disable_barrier(-1)


def build(
    name: str,
    sources: Sequence[pathlib.Path],  # .cu: emulated kernels; .cpp: compiled as they are
    *,
    text: str | None = None,
    flags: Sequence[str] = (),
    with_torch: bool = False,
) -> Emulation:
    """Compiles sources, and `text` as one more, where they changed; returns their library."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*sources, *_RUNTIME]
    if text is not None:
        source = folder / f"{name}.cu"
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        sources.append(source)
    torch_dir = pathlib.Path(torch.__file__).parent
    common = ["-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    common += [f"-I{HERE}", f"-I{ROOT / 'csrc/cuda'}", "-isystem", str(torch_dir / "include")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, common), sources))
    key = hashlib.sha256(" ".join(map(str, objects)).encode()).hexdigest()[:16]
    library = folder / f"lib{name}-{key}.so"
    if not library.exists():
        linked = library.with_suffix(f".{os.getpid()}")
        libraries = ["-Wl,--no-as-needed", f"-L{torch_dir / 'lib'}", "-ltorch"]
        libraries += ["-ltorch_cpu", "-lc10"]
        command = [_compiler(), "-shared", *map(str, objects), "-o", str(linked), "-ldl"]
        _run([*command, *(libraries if with_torch else [])])
        linked.rename(library)
    return Emulation(library)


def _compile(source: pathlib.Path, folder: pathlib.Path, flags: list[str]) -> pathlib.Path:
    """Returns the object of a source; its name holds the hash of what the compiler sees."""
    if source.suffix == ".cu":
        flags = [*flags, *_KERNEL_FLAGS]
    elif source in _RUNTIME:
        flags = [*flags, "-O3", "-fvisibility=default"]
    else:
        flags = [*flags, "-DTT_CUDA_EMULATION"]
    seen = _run([_compiler(), *flags, "-E", str(source)])
    key = hashlib.sha256("\0".join([*flags, seen]).encode()).hexdigest()[:16]
    target = folder / f"{source.stem}-{key}.o"
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}")
        _run([_compiler(), *flags, "-c", str(source), "-o", str(part)])
        part.rename(target)
    return target


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    return result.stdout
