"""Criteo rows as npy files, memory-mapped, in both of TorchRec's layouts.

`{day_i|train}_{dense,sparse,labels}.npy`: float32 [N, 13], int64 (ids as published) or int32
(renumbered, shuffled) [N, 26], and int32 [N, 1].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blocks import INT_NAMES, NUM_CATS, NUM_INTS, Block
from numpy.typing import NDArray

_BLOCK_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyDay:
    """The three files of a day."""

    prefix: Path  # what precedes "_dense.npy"
    dense: NDArray[np.float32]  # [N, 13]
    sparse: NDArray[np.integer]  # [N, 26] int32 or int64
    labels: NDArray[np.int32]  # [N] or [N, 1]

    def block(self, rows: range) -> Block:
        """Returns those rows.

        Raises:
            ValueError: for a value that cannot be; names the file and the row.
        """
        part = slice(rows.start, rows.stop, rows.step)
        dense = np.array(self.dense[part], np.float32)
        labels = np.array(self.labels[part], np.int64).reshape(-1)
        if not np.isfinite(dense).all():
            row, column = np.argwhere(~np.isfinite(dense))[0]
            raise ValueError(
                f"{self.prefix}_dense.npy, row {rows[row]}: {INT_NAMES[column]} must be finite, "
                f"got {dense[row, column]}"
            )
        if (labels >> 1).any():
            row = np.flatnonzero(labels >> 1)[0]
            raise ValueError(
                f"{self.prefix}_labels.npy, row {rows[row]}: the label must be 0 or 1, "
                f"got {labels[row]}"
            )
        ids = np.array(self.sparse[part].T, np.int64, order="C")
        return Block(labels=labels, dense=dense, ids=ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyFiles:
    """Rows of days in their order."""

    days: list[NpyDay]

    def read(self, rows: range) -> Iterator[Block]:
        """See `blocks.Source`."""
        first = 0
        for day in self.days:
            num_rows = len(day.labels)
            skipped = max(0, -(-(first - rows.start) // rows.step))
            start = rows.start + skipped * rows.step - first
            own = range(start, min(rows.stop - first, num_rows), rows.step)
            for i in range(0, len(own), _BLOCK_ROWS):
                yield day.block(own[i : i + _BLOCK_ROWS])
            first += num_rows


def open_npy(prefixes: list[Path]) -> NpyFiles:
    """Maps the files of the days.

    Raises:
        ValueError: for arrays of another shape or dtype; names the file.
        OSError: for a file that is not there.
    """
    days = []
    for prefix in prefixes:
        dense = _array(prefix, "dense", width=NUM_INTS, dtypes=("float32",))
        sparse = _array(prefix, "sparse", width=NUM_CATS, dtypes=("int32", "int64"))
        labels = _array(prefix, "labels", width=1, dtypes=("int32",))
        lengths = {"dense": len(dense), "sparse": len(sparse), "labels": len(labels)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{prefix}_*.npy must have equally many rows, got {lengths}")
        if not len(labels):
            raise ValueError(f"{prefix}_labels.npy: must hold Criteo rows, got an empty file")
        days.append(NpyDay(prefix=prefix, dense=dense, sparse=sparse, labels=labels))
    return NpyFiles(days=days)


def _array(prefix: Path, kind: str, *, width: int, dtypes: tuple[str, ...]) -> NDArray:
    path = Path(f"{prefix}_{kind}.npy")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} must be a whole npy file, got {error}") from None
    is_shaped = (array.ndim == 2 and array.shape[1] == width) or (width == 1 and array.ndim == 1)
    if not is_shaped or array.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        raise ValueError(
            f"{path} must be [N, {width}] of {' or '.join(dtypes)}, "
            f"got {list(array.shape)} of {array.dtype}"
        )
    return array
