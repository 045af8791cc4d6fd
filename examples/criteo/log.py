"""What a run says while it trains: a bar on a terminal, lines in a log, TensorBoard's files.

Rank 0 alone says it.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10


class Log:
    """Lines and scalars of rank 0; on other ranks nothing.

    Args:
        tensorboard_dir: a folder for TensorBoard's files.

    Raises:
        ValueError: if TensorBoard is asked for and not installed.
    """

    def __init__(self, tensorboard_dir: str | None) -> None:
        self._is_silent = dist.get_rank() != 0
        self._writer: Any = None
        if tensorboard_dir is None:
            return
        try:  # on every rank, lest one goes on alone
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard_dir needs the package tensorboard: pip install tensorboard"
            ) from None
        if not self._is_silent:
            self._writer = SummaryWriter(tensorboard_dir)

    def line(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        if not self._is_silent:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def scalars(self, group: str, values: Mapping[str, float], *, step: int) -> None:
        """Writes values of a step for TensorBoard."""
        for name, value in values.items() if self._writer is not None else ():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def steps(self, description: str, *, total: int, first: int = 0) -> "tqdm | StepLines":
        """Returns what shows the steps from `first` to `total`: a bar, lines, or nothing."""
        if sys.stderr.isatty() or self._is_silent:
            return tqdm(
                desc=description,
                initial=first,
                total=total,
                unit="step",
                mininterval=1,
                dynamic_ncols=True,
                disable=self._is_silent,
            )
        return StepLines(description, first=first, total=total)

    def close(self) -> None:
        """Writes what TensorBoard's writer still holds."""
        if self._writer is not None:
            self._writer.close()


class StepLines:
    """Stands for a bar where there is no terminal: a line every ten seconds.

    Args:
        description: how a line begins.
        first: the number of steps already done.
        total: the number at the end.
    """

    def __init__(self, description: str, *, first: int, total: int) -> None:
        self._description = description
        self._first = self._done = first
        self._total = total
        self._postfix = ""
        self._start = self._last = time.monotonic()

    def __enter__(self) -> "StepLines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Sets what a line ends with."""
        self._postfix = text

    def update(self) -> None:
        """Counts a step."""
        self._done += 1
        now = time.monotonic()
        if now < self._last + _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        seconds = (now - self._start) / (self._done - self._first) * (self._total - self._done)
        left = tqdm.format_interval(seconds)
        sys.stderr.write(
            f"{self._description}: {self._done} of {self._total} steps, {left} left"
            f"{self._postfix and ', ' + self._postfix}\n"
        )
        sys.stderr.flush()


def check_writable(folder: Path) -> None:
    """Makes the folder, before hours of training and not after.

    Raises:
        OSError: if nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".rank{dist.get_rank()}"
    probe.touch()
    probe.unlink()
