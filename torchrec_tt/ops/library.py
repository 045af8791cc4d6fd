"""Finds and loads the compiled operators."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

SUPPORTED_TORCH = ((2, 11), (2, 15))  # first and last minor version the library loads in
_BUILD_HINT = (
    "install torch, then build the operators against it with "
    "`pip install --no-build-isolation torchrec_tt` (or `make build` in a checkout)"
)


def torch_version() -> tuple[int, int]:
    """Returns the major and minor version of the torch in use."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def find_problem() -> str | None:
    """Returns in one sentence why the operators cannot be used here, or None if they can."""
    if os.environ.get("TORCHREC_TT_SKIP_LIBRARY") == "1":
        return "the compiled operators were skipped because TORCHREC_TT_SKIP_LIBRARY=1 is set"
    first, last = SUPPORTED_TORCH
    if not first <= torch_version() <= last:
        return (
            f"torchrec_tt's operators were built for torch {first[0]}.{first[1]} to "
            f"{last[0]}.{last[1]}, found {torch.__version__}: install a torch in that range"
        )
    if library_path() is None:
        return f"torchrec_tt's compiled operators (torchrec_tt/_C.so) are missing: {_BUILD_HINT}"
    return None


def library_path() -> str | None:
    """Returns where the compiled library lies, or None where it was never built.

    TORCHREC_TT_LIBRARY names another one, as `make sanitize` does.
    """
    if named := os.environ.get("TORCHREC_TT_LIBRARY"):
        return named
    spec = importlib.util.find_spec("torchrec_tt._C")
    return spec.origin if spec else None


def load() -> None:
    """Loads the operators into `torch.ops.torchrec_tt`.

    Raises:
        RuntimeError: one sentence that says what is missing and how to get it.
    """
    problem = find_problem()
    if problem is not None:
        raise RuntimeError(problem)
    try:
        torch.ops.load_library(library_path())
    except OSError as error:
        raise RuntimeError(
            f"torchrec_tt's compiled operators do not load in torch {torch.__version__} "
            f"({error}): {_BUILD_HINT}"
        ) from error


def _try_to_load() -> str | None:
    """Loads the operators; returns what is wrong, if anything is."""
    try:
        load()
    except RuntimeError as error:
        return str(error)
    return None


_problem = _try_to_load()


def operators() -> Any:
    """Returns the operators' namespace.

    Raises:
        RuntimeError: one sentence that says why there is none.
    """
    if _problem is not None:
        raise RuntimeError(_problem)
    return torch.ops.torchrec_tt


def register_fake(name: str) -> Callable[[Callable], Callable]:
    """Registers the decorated function as what an operator does to fake tensors, if it is there."""

    def register(fake: Callable) -> Callable:
        if _problem is None:
            torch.library.register_fake(f"torchrec_tt::{name}", fake)
        return fake

    return register
