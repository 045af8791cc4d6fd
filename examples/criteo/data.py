"""Criteo rows of every form as one data set of TorchRec batches, split by time and by rank.

| `open_dataset` of | is |
|---|---|
| a file | TSV, plain or gzip, as Criteo Kaggle's `train.txt` |
| a folder with `day_0[.gz]`, `day_1[.gz]`, ... | TSV, as Criteo Terabyte's |
| a folder with `{day_i or train}_{dense,sparse,labels}.npy` | either of TorchRec's npy layouts |

`made_dataset` makes rows up.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blocks import CAT_NAMES, Block, Source, Split, concatenate, split_rows
from day_files import day_files, missing_days
from made_rows import MadeRows, Signal
from npy_files import open_npy
from prefetch import prefetched
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tsv_files import scan

# Rows per categorical column, as in facebookresearch/dlrm; Terabyte's ids capped at 10 million.
KAGGLE_NUM_EMBEDDINGS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TERABYTE_NUM_EMBEDDINGS = (
    *(9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10),
    *(2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36),
)

_PREFETCHED_BATCHES = 8
_LABEL_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CriteoDataset:
    """Rows split into training, validation and test rows, ids taken modulo the tables' rows.

    Attributes:
        source: of the rows.
        splits: which rows are whose.
        num_embeddings: rows of each categorical column's table.
        missing_days: between the first and the last of a folder of days.
        best_auroc: that a model can reach on the test rows; known of made rows alone.
    """

    source: Source
    splits: Mapping[Split, range]
    num_embeddings: Sequence[int]
    missing_days: Sequence[int] = ()
    best_auroc: float | None = None

    def num_rows(self, split: Split) -> int:
        """Returns the rows of a split."""
        return len(self.splits[split])

    def num_batches(
        self, split: Split, *, batch_size: int, world_size: int = 1, start_row: int = 0
    ) -> int:
        """Returns the batches that every rank reads from `start_row` of the split on."""
        return -(-(self.num_rows(split) - start_row) // (batch_size * world_size))

    def batches(
        self,
        split: Split,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        start_row: int = 0,
    ) -> Iterator[Batch]:
        """Yields one rank's batches of one epoch, made ahead in a thread.

        Rows go to the ranks in turn. Every rank yields equally many batches of equal sizes, so that
        no collective is missed: a rank that has a row less repeats the split's last one.

        Args:
            split: which rows.
            batch_size: rows of a batch on one rank; the last batch may be smaller.
            rank: which share of the rows.
            world_size: number of shares.
            start_row: of the split; a resumed run's rows so far.

        Raises:
            ValueError: for a malformed row, if it is this rank's.
            OSError: for a file that cannot be read.
        """
        blocks = self._share(self.splits[split][start_row:], rank=rank, world_size=world_size)
        return prefetched(
            _batches(blocks, num_embeddings=self.num_embeddings, batch_size=batch_size),
            depth=_PREFETCHED_BATCHES,
        )

    def _share(self, rows: range, *, rank: int, world_size: int) -> Iterator[Block]:
        own = rows[rank::world_size]
        yield from self.source.read(own)
        if len(own) < -(-len(rows) // world_size):
            yield from self.source.read(rows[-1:])


def open_dataset(path: Path, *, num_embeddings: Sequence[int]) -> CriteoDataset:
    """Opens rows of any form; TSV is read and checked once.

    Raises:
        ValueError: for a folder that holds no form of rows or two, a malformed line or file, or a
            split in which every label is the same (its AUROC is undefined).
        OSError: for a file that cannot be read.
    """
    if path.is_dir() and not (prefixes := _npy_prefixes(path)):
        return _open_tsv(day_files(path), num_embeddings=num_embeddings)
    if not path.is_dir():
        return _open_tsv([path], num_embeddings=num_embeddings)
    source = open_npy(prefixes)
    splits = split_rows([len(day.labels) for day in source.days])
    labels = [day.labels for day in source.days]
    firsts = np.cumsum([0, *map(len, labels)])
    for split, rows in splits.items():
        parts = (
            part[max(0, rows.start - first) : max(0, rows.stop - first)]
            for part, first in zip(labels, firsts.tolist(), strict=False)
        )
        _check_labels(parts, rows, where=f"{path}: the {split} rows")
    return CriteoDataset(
        source=source,
        splits=splits,
        num_embeddings=num_embeddings,
        missing_days=missing_days(prefixes),
    )


def made_dataset(
    num_rows: int,
    *,
    num_embeddings: Sequence[int],
    signal_columns: Sequence[int],
    seed: int,
    signal: Signal = "digits",
) -> CriteoDataset:
    """Returns made-up rows; see made_rows.py for the arguments.

    Raises:
        ValueError: for a split in which every label is the same.
    """
    source = MadeRows(
        num_rows=num_rows,
        num_embeddings=num_embeddings,
        signal_columns=signal_columns,
        seed=seed,
        signal=signal,
    )
    splits = split_rows([num_rows])
    for split, rows in splits.items():
        labels = (block.labels for block in source.read(rows))
        _check_labels(labels, rows, where=f"--made_rows {num_rows}: the {split} rows")
    return CriteoDataset(
        source=source,
        splits=splits,
        num_embeddings=num_embeddings,
        best_auroc=source.best_auroc(splits["test"]),
    )


def _open_tsv(paths: list[Path], *, num_embeddings: Sequence[int]) -> CriteoDataset:
    source, labels = scan(paths)
    splits = split_rows([file.num_rows for file in source.files])
    first = splits["test"].stop - len(labels)  # of the last file's rows
    for split, rows in splits.items():
        if rows.stop > first or not rows:
            part = labels[max(0, rows.start - first) : rows.stop - first]
            _check_labels([part], rows, where=f"{paths[-1]}: the {split} rows")
    return CriteoDataset(
        source=source,
        splits=splits,
        num_embeddings=num_embeddings,
        missing_days=missing_days(paths),
    )


def _check_labels(parts: Iterable[np.ndarray], rows: range, *, where: str) -> None:
    found: set[int] = set()
    for part in parts:
        for i in range(0, len(part), _LABEL_ROWS):
            found.update(np.unique(part[i : i + _LABEL_ROWS]).tolist())
            if found >= {0, 1}:
                return
    raise ValueError(
        f"{where} must hold both labels for an AUROC, got {sorted(found)} in {len(rows)} rows"
    )


def _npy_prefixes(folder: Path) -> list[Path]:
    """Returns what precedes "_dense.npy" in the folder's files, in the days' order."""
    files = [
        re.fullmatch(r"(.+)_(dense|sparse|labels)\.npy", path.name) for path in folder.iterdir()
    ]
    names = list({match[1] for match in files if match})  # a day that misses a file is an error
    days = {int(match[1]): name for name in names if (match := re.fullmatch(r"day_(\d+)", name))}
    if names == ["train"] or (names and len(days) == len(names)):
        return [folder / days[day] for day in sorted(days)] or [folder / "train"]
    if names:
        raise ValueError(
            f"{folder} must have either day_*_dense.npy or train_dense.npy, got {sorted(names)}"
        )
    return []


def _batches(
    blocks: Iterator[Block], *, num_embeddings: Sequence[int], batch_size: int
) -> Iterator[Batch]:
    sizes = np.array(num_embeddings, np.int64)[:, None]
    parts: list[Block] = []
    num_rows = 0
    for block in blocks:
        np.remainder(block.ids, sizes, out=block.ids)
        start = 0
        while num_rows + len(block) - start >= batch_size:
            stop = start + batch_size - num_rows
            yield _batch(concatenate([*parts, block[start:stop]]))
            parts, num_rows, start = [], 0, stop
        if start < len(block):
            parts.append(block[start:])
            num_rows += len(block) - start
    if parts:
        yield _batch(concatenate(parts))


def _batch(rows: Block) -> Batch:
    return Batch(
        dense_features=torch.from_numpy(rows.dense.copy()),  # [B, 13]
        sparse_features=KeyedJaggedTensor(
            keys=CAT_NAMES,
            values=torch.from_numpy(rows.ids.flatten()),  # [26 * B]
            lengths=_ones(rows.ids.size),
            stride=len(rows),
        ),
        labels=torch.from_numpy(rows.labels.copy()),  # [B]
    )


@functools.lru_cache(maxsize=4)
def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.int32)
