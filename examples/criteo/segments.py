"""The first pass of prepare.py: TSV into segments of rows, each of them safe once it is logged.

A segment's labels and integers go to the npy files that are kept, its raw ids to one file a TSV
file, and how often each id occurs in it to one file a column. All are flushed to the disk before
the segment is logged; what a killed run wrote after its last segment is cut off.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from blocks import CAT_NAMES, NUM_CATS, NUM_INTS, dense_of
from files import naming
from numpy.typing import NDArray
from tsv import Rows, parse
from tsv_files import chunks, open_lines

MAX_HEX_DIGITS = 8  # of an id: 32 bits, as Criteo publishes them
NPY_HEADER_BYTES = 128
_SHOWN_BAD_LINES = 10

_RECORD = np.dtype(
    [
        ("file", "<i8"),
        ("num_rows", "<i8"),
        ("end_bytes", "<i8"),  # of the file's text, uncompressed, up to the segment's end
        ("end_lines", "<i8"),
        ("bad_lines", "<i8"),  # of all files so far
        ("num_ids", "<i8", NUM_CATS),  # distinct ones of each column
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """Where what is not finished lies, by the prefix of a TSV file ("day_0", "train")."""

    path: Path

    def output(self, name: str) -> Path:
        """Returns a file that is kept in the end."""
        return self.path / "outputs" / name

    def raw_ids(self, prefix: str) -> Path:
        """Returns the file of a TSV file's ids: a [26, N] uint32 block for each segment."""
        return self.path / f"{prefix}_ids.bin"

    def counts(self, column: int) -> Path:
        """Returns a column's runs, one a segment: uint64 `id << 32 | count` in ascending order."""
        return self.path / f"{CAT_NAMES[column]}_counts.bin"

    @property
    def log(self) -> Path:
        """The segments so far."""
        return self.path / "segments.bin"

    def segments(self) -> NDArray[np.void]:
        """Returns the logged segments; one whose record is incomplete is none."""
        if not self.log.exists():
            return np.empty(0, _RECORD)
        data = self.log.read_bytes()
        return np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How TSV is read.

    Attributes:
        paths: the files.
        prefixes: of their outputs.
        segment_rows: after how many rows, about, a segment ends.
        max_bad_lines: more malformed lines than these are an error.
    """

    paths: list[Path]
    prefixes: list[str]
    segment_rows: int
    max_bad_lines: int


def read_segments(
    reading: Reading, folder: Folder, *, on_bytes: Callable[[int, int], None]
) -> None:
    """Reads what no logged segment has; at the end every row is in one.

    Args:
        reading: what to read.
        folder: where to write.
        on_bytes: called with a file's number and the bytes read of it, as they lie on the disk.

    Raises:
        ValueError: for too many malformed lines, a file without rows, or a damaged folder.
        OSError: for what cannot be read or written.
    """
    _cut_to_log(reading, folder)
    segments = folder.segments()
    num_bad_lines = int(segments["bad_lines"][-1]) if len(segments) else 0
    for number, path in enumerate(reading.paths):
        own = segments[segments["file"] == number]
        last = own[-1] if len(own) else np.zeros((), _RECORD)
        segment = _Segment(file=number, start=last, bad_lines=num_bad_lines)
        for text, position in _texts(path, skipped=int(last["end_bytes"])):
            rows = parse(text, max_hex_digits=MAX_HEX_DIGITS)
            for fault in rows.faults:
                segment.bad_lines += 1
                message = f"{path}, line {segment.end_lines + fault.line + 1}: {fault.message}"
                _check_bad_line(segment.bad_lines, message, allowed=reading.max_bad_lines)
            segment.add(rows, num_bytes=len(text))
            if segment.num_rows >= reading.segment_rows:
                segment.write(folder, prefix=reading.prefixes[number])
            on_bytes(number, position)
        if segment.num_rows or segment.bad_lines > num_bad_lines:
            segment.write(folder, prefix=reading.prefixes[number])
        num_bad_lines = segment.bad_lines
        segments = folder.segments()
        if not segments["num_rows"][segments["file"] == number].sum():
            raise ValueError(f"{path}: must hold Criteo rows, got none")


def npy_header(dtype: str, *, num_rows: int, width: int) -> bytes:
    """Returns the header of a C-ordered [num_rows, width] array, always NPY_HEADER_BYTES long."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({num_rows}, {width}), }}"
    size = NPY_HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"


def append(path: Path, data: bytes | NDArray) -> None:
    """Appends to a file and waits until the disk has it.

    Raises:
        OSError: if it cannot be written; names it.
    """
    with naming(path), path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _Segment:
    """The rows read since the last segment was written."""

    def __init__(self, *, file: int, start: np.void, bad_lines: int) -> None:
        self.file = file
        self.end_bytes = int(start["end_bytes"])
        self.end_lines = int(start["end_lines"])
        self.bad_lines = bad_lines
        self.num_rows = 0
        self._parts: list[tuple[NDArray, NDArray, NDArray]] = []

    def add(self, rows: Rows, *, num_bytes: int) -> None:
        self._parts.append(
            (
                rows.labels.astype("<i4"),
                np.ascontiguousarray(dense_of(rows.ints).T),
                rows.ids.astype("<u4", order="C"),
            )
        )
        self.num_rows += len(rows.labels)
        self.end_bytes += num_bytes
        self.end_lines += len(rows.labels) + len(rows.faults)

    def write(self, folder: Folder, *, prefix: str) -> None:
        """Writes the rows, logs them and starts anew."""
        labels, dense, ids = zip(*self._parts, strict=True)
        self._parts.clear()
        for kind, arrays in (("labels", labels), ("dense", dense)):
            path = folder.output(f"{prefix}_{kind}.npy")
            header = b"" if path.exists() and path.stat().st_size else bytes(NPY_HEADER_BYTES)
            append(path, header + b"".join(array.tobytes() for array in arrays))
        raw_ids = np.concatenate(ids, axis=1)
        append(folder.raw_ids(prefix), raw_ids)
        num_ids = []
        for column in range(NUM_CATS):
            run = _counted(raw_ids[column])
            append(folder.counts(column), run)
            num_ids.append(len(run))
        record = np.array(
            (self.file, self.num_rows, self.end_bytes, self.end_lines, self.bad_lines, num_ids),
            _RECORD,
        )
        append(folder.log, record.tobytes())
        self.num_rows = 0


def _counted(ids: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Returns `id << 32 | count` of each distinct id, in ascending order; sorts `ids` in place."""
    ids.sort()
    starts = np.flatnonzero(np.diff(ids, prepend=~ids[:1]))
    counts = np.diff(starts, append=len(ids)).astype(np.uint64)
    return (ids[starts].astype(np.uint64) << np.uint64(32)) | counts


def _texts(path: Path, *, skipped: int) -> Iterator[tuple[bytes, int]]:
    """Yields texts of whole lines after `skipped` bytes, and how far into the file that is."""
    with open_lines(path) as (lines, is_gzip):
        lines.seek(skipped)
        raw: IO[bytes] = lines.fileobj if is_gzip else lines  # type: ignore[attr-defined]
        for text in chunks(lines, path=path):
            yield text, raw.tell()


def _check_bad_line(num_bad_lines: int, message: str, *, allowed: int) -> None:
    if num_bad_lines > allowed:
        raise ValueError(
            f"--max_bad_lines {allowed} must not be exceeded, got {num_bad_lines}; the last is "
            f"{message}"
        )
    if num_bad_lines <= _SHOWN_BAD_LINES:
        sys.stderr.write(f"left out: {message}\n")
        if num_bad_lines == _SHOWN_BAD_LINES:
            sys.stderr.write("left out: further lines are counted\n")


def _cut_to_log(reading: Reading, folder: Folder) -> None:
    """Cuts off what lies behind the last logged segment."""
    segments = folder.segments()
    sizes = {folder.log: len(segments) * _RECORD.itemsize}
    for column in range(NUM_CATS):
        sizes[folder.counts(column)] = 8 * int(segments["num_ids"][:, column].sum())
    for number, prefix in enumerate(reading.prefixes):
        num_rows = int(segments["num_rows"][segments["file"] == number].sum())
        sizes[folder.raw_ids(prefix)] = 4 * NUM_CATS * num_rows
        header = NPY_HEADER_BYTES if np.any(segments["file"] == number) else 0
        sizes[folder.output(f"{prefix}_dense.npy")] = header + 4 * NUM_INTS * num_rows
        sizes[folder.output(f"{prefix}_labels.npy")] = header + 4 * num_rows
    for path, size in sizes.items():
        actual = path.stat().st_size if path.exists() else 0
        if actual < size:
            raise ValueError(f"{path} must have {size} bytes, got {actual}: delete {folder.path}")
        if actual > size:
            os.truncate(path, size)
