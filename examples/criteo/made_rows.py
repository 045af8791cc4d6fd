"""Made-up rows in Criteo's format whose labels only Tensor-Train (TT) tables can explain.

A label is Bernoulli and its logit depends on the ids of a few columns that are kept in TT form, and
on nothing else: in each of them an id has a hidden coordinate, smooth in the digits by which the
table's cores are indexed, plus a part of its own for the hottest ids. The other columns and the
integers carry no signal, so a model whose TT tables do not learn stays below an AUROC of 0.6, and
the probabilities that the labels were drawn from give the best AUROC that any model can reach.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch
from data import num_training_rows
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.criteo import DEFAULT_INT_NAMES

from torchrec_tt.tt.factorize import factorize_rows

# An id is rows * u**_POWER for uniform u, so id i has a probability of about i**(1 / _POWER - 1).
# Small ids are the frequent ones, as where a vocabulary is numbered by first appearance.
_POWER = 9
_LOGIT_SCALE = 3.0  # the logit's standard deviation over the rows, about
_LOGIT_BIAS = -1.0
_NUM_HOT_IDS = 20
_HOT_SCALE = 0.3
_MISSING_RATIO = 0.05  # of the integers
_CHUNK_ROWS = 8192


def write_made_rows(
    path: Path,
    *,
    num_rows: int,
    num_embeddings: Sequence[int],
    signal_columns: Sequence[int],
    seed: int,
) -> float:
    """Writes rows to `path` and returns the best AUROC that a model can reach on its test rows.

    Args:
        path: the TSV file to write.
        num_rows: how many rows.
        num_embeddings: rows of each categorical column's table; ids are below these.
        signal_columns: the categorical columns that the labels depend on.
        seed: the same seed makes the same file.

    Returns:
        The AUROC of the labels' true probabilities over the rows that `data.scan` leaves for
        testing.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = {c: _HiddenCoordinate(num_embeddings[c], generator) for c in signal_columns}
    scale = _LOGIT_SCALE / math.sqrt(len(signal_columns))
    probabilities, labels = [], []
    with path.open("w", encoding="ascii") as file:
        for start in range(0, num_rows, _CHUNK_ROWS):
            size = min(_CHUNK_ROWS, num_rows - start)
            ids = [_draw_ids(size, rows, generator) for rows in num_embeddings]  # 26 of [size]
            coordinates = torch.stack([hidden[c](ids[c]) for c in signal_columns])
            chance = (coordinates.sum(dim=0) * scale + _LOGIT_BIAS).sigmoid()  # [size]
            clicks = torch.bernoulli(chance, generator=generator).long()
            _write_lines(file, clicks, ints=_draw_ints(size, generator), ids=ids)
            probabilities.append(chance)
            labels.append(clicks)
    start = num_training_rows(num_rows)
    return binary_auroc(torch.cat(probabilities)[start:], torch.cat(labels)[start:]).item()


class _HiddenCoordinate:
    """h(id) = sqrt(2 / d) * sum_k cos(2 pi (digit_k / m_k + phase_k)), plus the id's own part."""

    def __init__(self, num_embeddings: int, generator: torch.Generator) -> None:
        self.row_factors = factorize_rows(num_embeddings)
        self.phases = torch.rand(len(self.row_factors), generator=generator).tolist()
        self.own = _HOT_SCALE * torch.randn(
            min(_NUM_HOT_IDS, num_embeddings), generator=generator, dtype=torch.float64
        )

    def __call__(self, ids: Tensor) -> Tensor:  # [N] to [N] float64
        smooth = torch.zeros(ids.shape, dtype=torch.float64)
        rest = ids
        for m, phase in zip(reversed(self.row_factors), reversed(self.phases), strict=True):
            smooth += torch.cos(2 * math.pi * (rest % m / m + phase))
            rest = rest // m
        is_hot = ids < len(self.own)
        own = torch.where(is_hot, self.own[ids * is_hot], 0.0)
        return smooth * math.sqrt(2 / len(self.row_factors)) + own


def _draw_ids(size: int, num_embeddings: int, generator: torch.Generator) -> Tensor:  # [size] int64
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    return (num_embeddings * uniform**_POWER).long().clamp_(max=num_embeddings - 1)


def _draw_ints(size: int, generator: torch.Generator) -> list[list[int | None]]:
    """Draws `size` rows of log-normal counts, a few of them -1, a few missing."""
    shape = (size, len(DEFAULT_INT_NAMES))
    counts = torch.randn(shape, generator=generator).mul_(1.5).exp_().long() - 1
    is_missing = torch.rand(shape, generator=generator) < _MISSING_RATIO
    return [
        [None if missing else count for count, missing in zip(*row, strict=True)]
        for row in zip(counts.tolist(), is_missing.tolist(), strict=True)
    ]


def _write_lines(
    file: TextIO,
    labels: Tensor,  # [size]
    *,
    ints: list[list[int | None]],
    ids: list[Tensor],  # 26 of [size]
) -> None:
    columns = torch.stack(ids, dim=1).tolist()
    for label, row_ints, row_ids in zip(labels.tolist(), ints, columns, strict=True):
        numbers = "\t".join("" if value is None else str(value) for value in row_ints)
        file.write(f"{label}\t{numbers}\t" + "\t".join(f"{i:08x}" for i in row_ids) + "\n")
