"""What a run says while it trains: a bar on a terminal, lines in a log, TensorBoard's files.

Rank 0 alone says it.
"""

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from files import naming
from progress import progress
from tqdm import tqdm

_PROBE_BYTES = 4096  # a full disk takes an empty file


class Log:
    """Lines and scalars of rank 0; on other ranks nothing.

    Args:
        tensorboard_dir: a folder for TensorBoard's files.

    Raises:
        ValueError: if TensorBoard is asked for and not installed.
        OSError: if its folder cannot be written; what cannot later is left out with a warning.
    """

    def __init__(self, tensorboard_dir: str | None) -> None:
        self._is_silent = dist.get_rank() != 0
        self._tensorboard_dir = tensorboard_dir
        self._writer: Any = None
        if tensorboard_dir is None:
            return
        try:  # on every rank, lest one goes on alone
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard_dir needs the package tensorboard: pip install tensorboard"
            ) from None
        check_writable(Path(tensorboard_dir))
        if not self._is_silent:
            threading.excepthook = _without_os_errors
            self._writer = SummaryWriter(tensorboard_dir)

    def line(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        if not self._is_silent:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def scalars(self, group: str, values: Mapping[str, float], *, step: int) -> None:
        """Writes values of a step for TensorBoard."""
        try:
            for name, value in values.items() if self._writer is not None else ():
                self._writer.add_scalar(f"{group}/{name}", value, step)
        except OSError as error:
            self._end_tensorboard(error)

    def steps(self, description: str, *, total: int, first: int = 0) -> tqdm:
        """Returns what shows the steps from `first` to `total`: a bar, lines, or nothing."""
        return progress(
            description, total=total, unit=" steps", first=first, is_silent=self._is_silent
        )

    def close(self) -> None:
        """Writes what TensorBoard's writer still holds."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._end_tensorboard(error)

    def _end_tensorboard(self, error: OSError) -> None:
        """Training is worth more than its curves."""
        self._writer = None
        self.line(f"warning: --tensorboard_dir {self._tensorboard_dir} ends here: {error}")


def check_writable(folder: Path) -> None:
    """Makes the folder, before hours of training and not after.

    Raises:
        OSError: if nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".rank{dist.get_rank()}"
    try:
        with naming(folder):
            probe.write_bytes(bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)


def _without_os_errors(args: threading.ExceptHookArgs) -> None:
    """Those of TensorBoard's thread, which its next call raises again."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)
