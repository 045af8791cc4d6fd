"""Checkpoints of a run: what they hold, when one fits, which are kept.

A checkpoint is a folder named by its step, written by torch.distributed.checkpoint, and `run.json`
in it. It counts once its `.metadata` is there, which is written last; its removal begins with that.
"""

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_tt import checkpoint

_RUN_FILE = "run.json"
_METADATA_FILE = ".metadata"  # of torch.distributed.checkpoint


class CheckpointError(Exception):
    """A checkpoint that cannot be read or written; its text is a line that names it."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        epoch: passes through the rows that are done.
        row: of this epoch's rows, all before it are trained on, whichever rank had them.
        epoch_step: steps of this epoch that are done.
        step: steps of all epochs.
        seconds: in training steps.
        wait_seconds: of these, what the slowest rank waited for rows.
        validations: a record for each.
    """

    epoch: int = 0
    row: int = 0
    epoch_step: int = 0
    step: int = 0
    rows_trained: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    validations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint's `run.json`.

    Attributes:
        path: the checkpoint.
        ranks: of the run that wrote it.
        settings: what a run that resumes from it must have too, each by its name.
        sharding_types: of its tables.
        progress: how far it was.
    """

    path: Path
    ranks: int
    settings: dict[str, Any]
    sharding_types: dict[str, str]
    progress: dict[str, Any]


def find(folder: Path, *, resume: bool) -> Saved | None:
    """Returns the newest complete checkpoint in `folder`, the same on every rank, or None.

    Raises:
        ValueError: if there is one, and the run is not to resume: it would be mixed with others; if
            its `run.json` is damaged, or of another version; if `folder` is a checkpoint itself.
        OSError: if that cannot be read.
    """
    if (folder / _METADATA_FILE).is_file():
        raise ValueError(
            f"--checkpoint_dir must be the folder that holds checkpoints, got one of them, {folder}"
        )
    path = checkpoint.latest(folder)
    if path is None:
        return None
    if not resume:
        raise ValueError(
            f"--checkpoint_dir must be without checkpoints unless --resume is given, got {path}"
        )
    return _read(path)


def _read(path: Path) -> Saved:
    file = path / _RUN_FILE
    try:
        saved = Saved(path=path, **json.loads(file.read_text()))
        Progress(**saved.progress)
        dict(**saved.settings, **saved.sharding_types)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} must be of a run of this script, got {error}") from None
    return saved


def check_settings(saved: Saved, settings: Mapping[str, Any]) -> None:
    """Refuses a run with other settings.

    Raises:
        ValueError: that names the first setting that differs, and both values.
    """
    for name in {**saved.settings, **settings}:
        old, new = saved.settings.get(name), settings.get(name)
        if old != new:
            raise ValueError(f"{name} must be {old} to resume from {saved.path}, got {new}")


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    progress: Progress,
    settings: Mapping[str, Any],
    sharding_types: Mapping[str, str],
    keep: int,
) -> None:
    """Writes a checkpoint and removes all but the newest `keep`; a collective.

    Raises:
        CheckpointError: if it cannot be written; on every rank; those before stay.
    """
    path = folder / str(progress.step)
    run = {
        "ranks": dist.get_world_size(),
        "settings": settings,
        "sharding_types": sharding_types,
        "progress": dataclasses.asdict(progress),
    }

    def begin() -> None:
        shutil.rmtree(path, ignore_errors=True)  # what a run left that died in this save
        path.mkdir(parents=True)
        (path / _RUN_FILE).write_text(json.dumps(run))

    _on_first_rank(begin, path=path)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {str(dist.get_rank()): torch.get_rng_state()},
    }
    try:
        dcp.save(state, checkpoint_id=path)
    except CheckpointException as error:
        raise CheckpointError(_unwritten(path, _first_failure(error))) from None
    _on_first_rank(lambda: _remove_old(folder, keep=keep), path=path)


def restore(saved: Saved, *, model: nn.Module, optimizer: KeyedOptimizer) -> Progress:
    """Loads the checkpoint into the model and its optimizer, and returns how far the run was.

    Raises:
        CheckpointError: if it cannot be read; on every rank.
    """
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    has_rng = dist.get_rank() < saved.ranks
    if has_rng:
        state["rng"] = {str(dist.get_rank()): torch.get_rng_state()}
    try:
        checkpoint.load(state, model=model, checkpoint_id=saved.path)
    except CheckpointException as error:
        raise CheckpointError(_damaged(saved.path, _first_failure(error))) from None
    except (pickle.UnpicklingError, EOFError, OSError) as error:
        raise CheckpointError(_damaged(saved.path, error)) from None
    optimizer.load_state_dict(state["optimizer"])
    if has_rng:
        torch.set_rng_state(state["rng"][str(dist.get_rank())])
    return Progress(**saved.progress)


def _on_first_rank(action: Callable[[], None], *, path: Path) -> None:
    """Runs it on rank 0; what fails there fails on every rank."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = [_unwritten(path, error)]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def _first_failure(error: CheckpointException) -> BaseException:
    return error.failures[min(error.failures)][0]


def _damaged(path: Path, error: BaseException) -> str:
    return f"{path} must be a whole checkpoint, got {_reason(error)}"


def _unwritten(path: Path, error: BaseException) -> str:
    """PyTorch's file writer loses the system's reason, so the free space is said too."""
    free = shutil.disk_usage(path.parent).free
    return (
        f"checkpoint {path} cannot be written, those before it stay: {_reason(error)} "
        f"({free / 1e6:.0f} MB free on its disk)"
    )


def _reason(error: BaseException) -> str:
    (reason, *_) = str(error).splitlines() or [type(error).__name__]
    return reason


def _remove_old(folder: Path, *, keep: int) -> None:
    """Folders of other names, such as a copy of the best checkpoint, stay."""
    found = [path.parent for path in folder.glob(f"*/{_METADATA_FILE}")]
    complete = [path for path in found if path.name.isdecimal()]
    for path in sorted(complete, key=lambda path: int(path.name))[:-keep]:
        (path / _METADATA_FILE).unlink()
        shutil.rmtree(path)
