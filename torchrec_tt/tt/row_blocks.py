"""A table that is read in blocks of rows: its size, and its distance from cores."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchrec_tt.tt.cores import rows
from torchrec_tt.tt.shape import TTShape

BLOCK_BYTES = 2**24  # of a block of rows in float64


class RowBlocks(Protocol):
    """A table that is read in blocks of rows, in order: a file, a reader of shards, made rows."""

    @property
    def num_rows(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def rows(self, begin: int, end: int) -> Tensor:  # [end - begin, dim] floating
        """Returns rows `[begin, end)`, the same at every call."""
        ...


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor (it may be a mapped file) as row blocks."""

    values: Tensor  # [num_rows, dim]

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def dim(self) -> int:
        return self.values.shape[1]

    def rows(self, begin: int, end: int) -> Tensor:
        return self.values[begin:end]


def steps(stop: int, *, step: int, title: str | None) -> Iterable[int]:
    """Returns `range(0, stop, step)`, which shows a progress bar if it has a title."""
    starts = range(0, stop, step)
    if title is None:
        return starts
    from rich.progress import track

    return track(starts, description=title)


def square_sum(source: RowBlocks, *, progress: bool) -> float:
    """Returns the sum of the squares of a table's values.

    Raises:
        ValueError: if a value is not finite, or a block has another shape than asked for.
    """
    step = max(1, BLOCK_BYTES // (8 * source.dim))
    total = 0.0
    for begin in steps(source.num_rows, step=step, title="check" if progress else None):
        end = min(begin + step, source.num_rows)
        block = source.rows(begin, end)
        if block.shape != (end - begin, source.dim):
            raise ValueError(
                f"rows({begin}, {end}) must be [{end - begin}, {source.dim}], "
                f"got {list(block.shape)}"
            )
        squares = block.double().square().sum(1)
        if not math.isfinite(float(squares.sum())):
            row = begin + int((~block.isfinite().all(1)).nonzero()[0])
            raise ValueError(f"table must be finite, got nan or inf in row {row}")
        total += float(squares.sum())
    return total


def square_distance(
    source: RowBlocks,
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    *,
    shape: TTShape,
    progress: bool,
) -> float:
    """Returns the square of the distance of a table and cores over the rows."""
    cores = [core.double() for core in cores]
    m = shape.row_factors[-1]
    step = m * max(1, BLOCK_BYTES // (8 * max(m * source.dim, _largest_slice(shape))))
    lost = 0.0
    for begin in steps(source.num_rows, step=step, title="error" if progress else None):
        end = min(begin + step, source.num_rows)
        made = dense_rows(cores, begin=begin, end=end, shape=shape)
        lost += float((source.rows(begin, end).cpu() - made).square().sum())
    return lost


def dense_rows(
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    *,
    begin: int,
    end: int,
    shape: TTShape,
) -> Tensor:  # [end - begin, D]
    """Returns rows of the table; of those that share all digits but the last, the heads once."""
    m, n, r_in = shape.row_factors[-1], shape.col_factors[-1], shape.tt_ranks[-1]
    first, last = begin // m, -(-end // m)
    heads = _heads(cores, torch.arange(first, last), shape=shape)
    # Rows are (prefix, last digit), columns (column of the head, last digit).
    result = torch.einsum("pcr,mrn->pmcn", heads, cores[-1].view(m, r_in, n))
    return result.reshape(-1, shape.embedding_dim)[begin - first * m : end - first * m]


def _largest_slice(shape: TTShape) -> int:
    return max(math.prod(slice_shape) for slice_shape in shape.slice_shapes)


def _heads(cores: Sequence[Tensor], prefixes: Tensor, *, shape: TTShape) -> Tensor:
    """Rows of the product of all cores but the last, `[prefixes, columns, r_{d-1}]`."""
    r_out = shape.tt_ranks[-1]
    if shape.num_cores == 2:
        return cores[0][prefixes].view(len(prefixes), -1, r_out)
    col_factors = (*shape.col_factors[:-2], shape.col_factors[-2] * r_out)
    head_shape = TTShape(
        num_embeddings=math.prod(shape.row_factors[:-1]),
        embedding_dim=math.prod(col_factors),
        row_factors=shape.row_factors[:-1],
        col_factors=col_factors,
        tt_ranks=shape.tt_ranks[:-1],
    )
    return rows(cores[:-1], prefixes, shape=head_shape).view(len(prefixes), -1, r_out)


def last_head(
    source: RowBlocks,
    head: Tensor,  # [m_0, n_0 * r_1] float64
    tails: Sequence[Tensor],  # the other cores
    *,
    shape: TTShape,
) -> None:
    """Sets the head's slice of the last row's digit by least squares, if it lacks rows."""
    place = math.prod(shape.row_factors[1:])
    digit = (source.num_rows - 1) // place
    if source.num_rows % place == 0:
        return
    n, rank = shape.col_factors[0], shape.tt_ranks[0]
    gram = head.new_zeros(rank, rank)
    image = head.new_zeros(n, rank)
    step = max(1, BLOCK_BYTES // (8 * max(rank * source.dim, _largest_slice(shape))))
    for begin in range(digit * place, source.num_rows, step):
        end = min(begin + step, source.num_rows)
        ids = torch.arange(begin, end) - digit * place
        made = _tails(tails, ids, shape=shape)  # [rows, rank, D / n]
        values = source.rows(begin, end).to("cpu", torch.float64).view(len(ids), n, -1)
        gram += torch.einsum("irc,isc->rs", made, made)
        image += torch.einsum("inc,irc->nr", values, made)
    inverse = torch.linalg.pinv(gram, rtol=1e-10, hermitian=True)
    head[digit] = (image @ inverse).view(-1)


def _tails(tails: Sequence[Tensor], ids: Tensor, *, shape: TTShape) -> Tensor:
    """Rows of the product of all cores but the first, `[rows, r_1, D / n_0]`."""
    rank = shape.tt_ranks[0]
    if len(tails) == 1:
        return tails[0][ids].view(len(ids), rank, -1)
    col_factors = (rank * shape.col_factors[1], *shape.col_factors[2:])
    tail_shape = TTShape(
        num_embeddings=math.prod(shape.row_factors[1:]),
        embedding_dim=math.prod(col_factors),
        row_factors=shape.row_factors[1:],
        col_factors=col_factors,
        tt_ranks=shape.tt_ranks[1:],
    )
    return rows(tails, ids, shape=tail_shape).view(len(ids), rank, -1)
