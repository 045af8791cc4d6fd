"""A progress bar with rate and time left; in a log, a line from time to time."""

import sys

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10
_LINE = (
    "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt}{unit}, "
    "{rate_fmt}, {remaining} left{postfix}"
)


def progress(
    description: str, *, total: int, unit: str, first: int = 0, is_silent: bool = False
) -> tqdm:
    """Returns a bar on stderr, or what looks like one and writes lines.

    Args:
        description: what is done.
        total: how much of it there is.
        unit: what is counted; of bytes ("B") thousands are written as k, M, G.
        first: how much was done before.
        is_silent: whether nothing is shown.
    """
    settings = {"desc": description, "total": total, "initial": first, "disable": is_silent}
    settings |= {"unit": unit, "unit_scale": unit == "B", "smoothing": 0}
    if sys.stderr.isatty():
        return tqdm(**settings, mininterval=1, dynamic_ncols=True)
    return tqdm(
        **settings,
        file=_Lines(),
        bar_format=_LINE,
        mininterval=_SECONDS_BETWEEN_LINES,
        delay=_SECONDS_BETWEEN_LINES,
        miniters=1,
        leave=False,
    )


def move(bar: tqdm, done: int) -> None:
    """Shows how much is done; what was by the first call was done before."""
    if not bar.n:
        bar.initial = done
    bar.update(done - bar.n)


class _Lines:
    """A file that takes what tqdm writes over a line as a line of its own."""

    def write(self, text: str) -> None:
        if words := text.split():
            sys.stderr.write(" ".join(words) + "\n")

    def flush(self) -> None:
        sys.stderr.flush()
