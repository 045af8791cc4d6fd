"""Blocks of Criteo rows as arrays: what every source of rows yields, and how rows are split."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val", "test"]

# TorchRec's names; importing them from it takes seconds and half a gigabyte.
NUM_INTS, NUM_CATS = 13, 26
INT_NAMES = [f"int_{i}" for i in range(NUM_INTS)]
CAT_NAMES = [f"cat_{i}" for i in range(NUM_CATS)]

# Of one file in time order, as the Kaggle file is: six of seven days train, the last is halved.
_TRAIN_DAYS, _DAYS = 6, 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some rows in their order."""

    labels: NDArray[np.int64]  # [N] 0 or 1
    dense: NDArray[np.float32]  # [N, 13] finite
    ids: NDArray[np.int64]  # [26, N]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> "Block":
        return Block(labels=self.labels[rows], dense=self.dense[rows], ids=self.ids[:, rows])


class Source(Protocol):
    """Rows of a data set, numbered from 0 in time order."""

    def read(self, rows: range) -> Iterator[Block]:
        """Yields those rows in blocks of any size.

        Raises:
            ValueError: for a malformed row; names the file, the row and the rule.
            OSError: for a file that cannot be read.
        """
        ...


def concatenate(blocks: list[Block]) -> Block:
    """Returns the blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        labels=np.concatenate([block.labels for block in blocks]),
        dense=np.concatenate([block.dense for block in blocks]),
        ids=np.concatenate([block.ids for block in blocks], axis=1),
    )


def split_rows(num_rows_per_file: list[int]) -> dict[Split, range]:
    """Splits rows by time: the last day is for validation (its first half) and testing.

    The last file of several is the last day; one file is seven days, as Criteo Kaggle's.
    """
    num_rows = sum(num_rows_per_file)
    if len(num_rows_per_file) > 1:
        last_day = num_rows - num_rows_per_file[-1]
    else:
        last_day = num_rows * _TRAIN_DAYS // _DAYS
    middle = last_day + (num_rows - last_day + 1) // 2  # the larger half validates, as in TorchRec
    return {
        "train": range(last_day),
        "val": range(last_day, middle),
        "test": range(middle, num_rows),
    }


def dense_of(ints: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns integers as a model reads them, finite whatever their sign: `log1p(max(x, 0))`."""
    return np.log1p(np.maximum(ints, 0).astype(np.float32))
