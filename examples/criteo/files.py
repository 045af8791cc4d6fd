"""Errors of the file system that say which file they are about."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets an OSError from inside name the path: a full disk's names none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
