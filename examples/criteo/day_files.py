"""The days of Criteo Terabyte in a folder."""

import re
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
