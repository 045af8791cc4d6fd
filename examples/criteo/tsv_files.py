"""Criteo TSV files, plain or gzip, as one source of rows: checked once, then streamed."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from blocks import Block
from tsv import Rows, parse

# Large enough that a call's cost is small, small enough that a column of words stays in the cache.
_CHUNK_BYTES = 1 << 18
_MARK_ROWS = 1 << 16  # a plain file's rows are found again this exactly


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedFile:
    """A file whose lines are all well formed."""

    path: Path
    num_rows: int
    marks: list[tuple[int, int]]  # rows and the bytes that precede them; only (0, 0) where gzip


@dataclass(frozen=True, kw_only=True, slots=True)
class TsvFiles:
    """Rows of files in their order."""

    files: list[ScannedFile]

    def read(self, rows: range) -> Iterator[Block]:
        """See `blocks.Source`; only the lines of `rows` are parsed."""
        first = 0
        for file in self.files:
            yield from _read(file, _within(rows, first, first + file.num_rows))
            first += file.num_rows


def scan(paths: Sequence[Path]) -> tuple[TsvFiles, np.ndarray]:
    """Checks every line and returns the rows and the last file's labels, [N] uint8.

    Takes a byte of memory for each row of the largest file.

    Raises:
        ValueError: for a malformed line (names the file, the line and what is wrong), or an empty
            file.
        OSError: for a file that cannot be opened.
    """
    files = []
    for path in paths:
        labels, marks, num_rows, num_bytes = bytearray(), [(0, 0)], 0, 0
        with open_lines(path) as (lines, is_gzip):
            for text in chunks(lines, path=path):
                if not is_gzip and num_rows >= marks[-1][0] + _MARK_ROWS:
                    marks.append((num_rows, num_bytes))
                rows = _parsed(text, path=path, first_row=num_rows)
                labels += rows.labels.astype(np.uint8).tobytes()
                num_rows += len(rows.labels)
                num_bytes += len(text)
        if not num_rows:
            raise ValueError(f"{path}: must hold Criteo rows, got an empty file")
        files.append(ScannedFile(path=path, num_rows=num_rows, marks=marks))
    return TsvFiles(files=files), np.frombuffer(labels, np.uint8)


@contextmanager
def open_lines(path: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """Opens a plain or gzip file, told by its first bytes; a damaged gzip becomes a ValueError."""
    with path.open("rb") as head:
        is_gzip = head.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb", buffering=0) as lines:
            yield lines, is_gzip
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: must be a whole gzip file, got {error}") from error


def chunks(lines: IO[bytes], *, path: Path, size: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """Yields the rest of an open file as texts of whole lines, each line with its end."""
    rest = b""
    while data := lines.read(size):
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut]
            rest = data[cut:]
        else:
            rest += data
        if len(rest) > size:
            raise ValueError(f"{path}: a line must have at most {size} bytes, got more")
    if rest:
        yield rest + b"\n"


def _read(file: ScannedFile, rows: range) -> Iterator[Block]:
    if not len(rows):
        return
    row, offset = max(mark for mark in file.marks if mark[0] <= rows[0])
    with open_lines(file.path) as (lines, _):
        lines.seek(offset)
        for text in chunks(lines, path=file.path):
            stop = row + text.count(b"\n")
            if len(wanted := _within(rows, row, stop)):
                selected = slice(wanted.start, wanted.stop, wanted.step)
                block = _parsed(text, path=file.path, first_row=row, lines=selected).block()
                yield block
            row = stop
            if row > rows[-1]:
                return
    raise ValueError(f"{file.path}: must still have {file.num_rows} rows, got {row}")


def _within(rows: range, start: int, stop: int) -> range:
    """Returns those of `rows` that are in [start, stop), counted from `start`."""
    skipped = max(0, -(-(start - rows.start) // rows.step))
    first = rows.start + skipped * rows.step
    return range(first - start, min(rows.stop, stop) - start, rows.step)


def _parsed(text: bytes, *, path: Path, first_row: int, lines: slice = slice(None)) -> Rows:
    rows = parse(text, lines=lines)
    if rows.faults:
        fault = rows.faults[0]
        raise ValueError(f"{path}, line {first_row + fault.line + 1}: {fault.message}")
    return rows
