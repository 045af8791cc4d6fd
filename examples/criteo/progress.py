"""A progress bar with rate and time left; in a log, a line from time to time."""

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30


class Progress:
    """Counts bytes towards a total.

    Args:
        description: what is done.
        total: bytes.
    """

    def __init__(self, description: str, *, total: int) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            desc=description,
            total=total,
            unit="B",
            unit_scale=True,
            disable=not self._is_terminal,
            mininterval=0.5,
        )
        self._description, self._total = description, total
        self._first: int | None = None
        self._started = self._last_line = time.monotonic()

    def at(self, done: int) -> None:
        """Shows that `done` bytes of the total are done; the first call's were before."""
        if self._first is None:
            self._first = done
            self._bar.initial = done
        self._bar.n = done
        self._bar.update(0)
        now = time.monotonic()
        if self._is_terminal or now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        rate = (done - self._first) / (now - self._started)
        left = (self._total - done) / max(rate, 1)
        sys.stderr.write(
            f"{self._description}: {100 * done / max(1, self._total):.0f} %, "
            f"{rate / 1e6:.1f} MB/s, {left / 60:.0f} minutes left\n"
        )
        sys.stderr.flush()

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
