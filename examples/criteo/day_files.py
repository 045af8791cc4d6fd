"""The days of Criteo Terabyte in a folder."""

import re
from collections.abc import Sequence
from pathlib import Path


def day_files(folder: Path) -> list[Path]:
    """Returns the folder's day files in the days' order.

    Raises:
        ValueError: for a folder without them, or with two of a day.
        OSError: for a folder that cannot be read.
    """
    days: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(r"day_(\d+)(\.tsv|\.txt)?(\.gz)?", path.name):
            if (day := int(match[1])) in days:
                raise ValueError(f"{folder} must have one file for day {day}, got two")
            days[day] = path
    if not days:
        raise ValueError(
            f"{folder} must have day_0, day_1, ... (plain or .gz) or *_dense.npy, got neither"
        )
    return [days[day] for day in sorted(days)]


def missing_days(paths: Sequence[Path]) -> list[int]:
    """Returns the days between the first and the last that no path is of."""
    matches = [re.match(r"day_(\d+)", path.name) for path in paths]
    days = [int(match[1]) for match in matches if match]
    return sorted(set(range(min(days, default=0), max(days, default=0))) - set(days))
