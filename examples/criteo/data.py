"""Criteo click logs as published (TSV, plain or gzip), streamed as TorchRec batches.

A line is a label, 13 integers and 26 hexadecimal ids, tab-separated, blank where missing, and
lines are in time order. `scan` reads the file once and refuses what training could not use;
`read_batches` reads it again for each epoch. They hold a byte a row and a batch, never the file.
"""

import gzip
import itertools
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
from torch import Tensor
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# Rows per categorical column of the Kaggle data set, as in facebookresearch/dlrm.
KAGGLE_NUM_EMBEDDINGS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

Split = Literal["train", "test"]

_NUM_INTS = len(DEFAULT_INT_NAMES)
_NUM_CATS = len(DEFAULT_CAT_NAMES)
_NUM_FIELDS = 1 + _NUM_INTS + _NUM_CATS
_INTEGER = rb"(?:-?[0-9]{1,18})?"
_HEX_ID = rb"[0-9a-fA-F]{0,15}"  # 15 digits always fit int64
_LINE = re.compile(rb"[01](?:\t%b){%d}(?:\t%b){%d}" % (_INTEGER, _NUM_INTS, _HEX_ID, _NUM_CATS))
_TRAIN_DAYS, _DAYS = 6, 7  # the Kaggle file holds seven days; the last is for testing


@dataclass(frozen=True, kw_only=True, slots=True)
class CriteoFile:
    """A scanned file: its first `num_train_rows` rows are for training, the rest for testing."""

    path: Path
    num_train_rows: int
    num_test_rows: int

    @property
    def num_rows(self) -> int:
        return self.num_train_rows + self.num_test_rows

    def split_rows(self, split: Split) -> tuple[int, int]:
        """Returns the split's first row and the row after its last."""
        if split == "train":
            return 0, self.num_train_rows
        return self.num_train_rows, self.num_rows

    def num_batches(self, split: Split, *, batch_size: int, world_size: int) -> int:
        """Returns the batches every rank reads in an epoch, at `batch_size` rows a rank."""
        start, stop = self.split_rows(split)
        return -(-(stop - start) // (batch_size * world_size))


def num_training_rows(num_rows: int) -> int:
    """Returns how many of `num_rows` rows in time order are for training: six sevenths."""
    return num_rows * _TRAIN_DAYS // _DAYS


def scan(path: Path) -> CriteoFile:
    """Checks every line and splits the rows by time: the first six sevenths for training.

    Raises:
        ValueError: for a malformed line (names the file, the line and what is wrong), an empty
            file, or a split in which every label is the same (its AUROC is undefined).
        OSError: for a file that cannot be opened.
    """
    labels = bytearray()  # one byte a row: the split is known only at the end
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            row = line.rstrip(b"\r\n")
            if _LINE.fullmatch(row) is None:
                raise ValueError(f"{path}, line {number}: {_fault(row)}")
            labels.append(row[0])
    if not labels:
        raise ValueError(f"{path}: must hold Criteo rows, got an empty file")
    num_train_rows = num_training_rows(len(labels))
    for name, part in (("training", labels[:num_train_rows]), ("test", labels[num_train_rows:])):
        num_positive = part.count(b"1")
        if num_positive in {0, len(part)}:
            raise ValueError(
                f"{path}: the {name} rows must hold both labels for an AUROC, "
                f"got {num_positive} positive of {len(part)}"
            )
    return CriteoFile(
        path=path, num_train_rows=num_train_rows, num_test_rows=len(labels) - num_train_rows
    )


def read_batches(
    file: CriteoFile,
    split: Split,
    *,
    num_embeddings: Sequence[int],
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Yields one rank's batches of one epoch.

    Rows go to the ranks in turn. Every rank yields equally many batches of equal sizes, so that no
    collective is missed: a rank that has a row less repeats its last one.

    Args:
        file: a scanned file.
        split: which rows.
        num_embeddings: rows of each categorical column's table; an id is taken modulo these.
        batch_size: rows of a batch on one rank; the last batch may be smaller.
        rank: which share of the rows.
        world_size: number of shares.
    """
    start, stop = file.split_rows(split)
    sizes = torch.tensor(num_embeddings, dtype=torch.int64)
    with _open(file.path) as lines:
        rows = _share(itertools.islice(lines, start, stop), rank=rank, world_size=world_size)
        while batch := list(itertools.islice(rows, batch_size)):
            yield make_batch([line.rstrip(b"\r\n") for line in batch], num_embeddings=sizes)


def make_batch(
    rows: Sequence[bytes],  # B well-formed lines without their ends
    *,
    num_embeddings: Tensor,  # [26] int64
) -> Batch:
    """Parses rows: integers become `log1p(max(x, 0))`, ids their value modulo the table's rows.

    A missing integer or id counts as 0.
    """
    fields = [row.split(b"\t") for row in rows]
    ints = [[int(value or b"0") for value in row[1 : 1 + _NUM_INTS]] for row in fields]
    ids = [[int(value or b"0", 16) for value in row[1 + _NUM_INTS :]] for row in fields]
    values = torch.tensor(ids, dtype=torch.int64) % num_embeddings  # [B, 26]
    return Batch(
        dense_features=torch.tensor(ints, dtype=torch.float32).clamp(min=0).log1p(),  # [B, 13]
        sparse_features=KeyedJaggedTensor(
            keys=DEFAULT_CAT_NAMES,
            values=values.T.reshape(-1),  # [26 * B]
            lengths=torch.ones(values.numel(), dtype=torch.int32),
            stride=len(rows),
        ),
        labels=torch.tensor([int(row[0]) for row in fields]),  # [B]
    )


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Opens a plain or gzip file by its first bytes; a damaged gzip becomes a ValueError."""
    with path.open("rb") as head:
        is_gzip = head.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as lines:
            yield lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: must be a whole gzip file, got {error}") from error


def _share(lines: Iterator[bytes], *, rank: int, world_size: int) -> Iterator[bytes]:
    """Yields every `world_size`-th line from `rank` on, the last line again where short."""
    while group := list(itertools.islice(lines, world_size)):
        yield group[min(rank, len(group) - 1)]


def _fault(row: bytes) -> str:
    """Says what is wrong with a malformed line."""
    fields = row.split(b"\t")
    if len(fields) != _NUM_FIELDS:
        return f"must have {_NUM_FIELDS} tab-separated fields, got {len(fields)}"
    if fields[0] not in {b"0", b"1"}:
        return f"the label must be 0 or 1, got {fields[0]!r}"
    for name, field in zip(DEFAULT_INT_NAMES, fields[1:], strict=False):
        if re.fullmatch(_INTEGER, field) is None:
            return f"{name} must be an integer of at most 18 digits, got {field!r}"
    for name, field in zip(DEFAULT_CAT_NAMES, fields[1 + _NUM_INTS :], strict=True):
        if re.fullmatch(_HEX_ID, field) is None:
            return f"{name} must be at most 15 hexadecimal digits, got {field!r}"
    raise AssertionError(f"no fault in {row!r}")
