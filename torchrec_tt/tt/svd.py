"""TT-SVD: cores from a table, of lower ranks from cores, and of higher ranks from cores."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_tt.tt.cores import check_cores, moments
from torchrec_tt.tt.factorize import factorize_columns, factorize_rows, make_shape
from torchrec_tt.tt.ranks import clipped
from torchrec_tt.tt.row_blocks import (
    RowBlocks,
    TensorRows,
    last_head,
    square_distance,
    square_sum,
)
from torchrec_tt.tt.shape import TTShape, positive_ints
from torchrec_tt.tt.unfolding import Unfolding, leading_space, peak_bytes, project

DEFAULT_NUM_CORES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TTApproximation:
    """Cores that stand for a table, and how far they are from it.

    Attributes:
        shape: of the table.
        cores: d of `[m_k, r_k * n_k * r_{k+1}]`.
        relative_error: `||table - TT|| / ||table||` (Frobenius) over the rows
            `[0, num_embeddings)`, of the cores as they are; 0 for a table of zeros.
    """

    shape: TTShape
    cores: list[Tensor]
    relative_error: float


@torch.no_grad()
def tt_svd(
    table: Tensor | RowBlocks,  # [num_embeddings, D] floating
    *,
    tt_ranks: Sequence[int] | None = None,
    row_factors: Sequence[int] | None = None,
    col_factors: Sequence[int] | None = None,
    max_error: float | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> TTApproximation:
    """Returns cores near a table, of given ranks or within a given error.

    From the last core to the first, core k is the leading right singular vectors of the unfolding
    `[(i_0 j_0 ... i_{k-1} j_{k-1}), (i_k j_k, r_{k+1})]`, onto which the table is projected. Rows
    that pad the factors do not count: they become what costs nothing.

    The table is never held: it is read in blocks of rows, in order, some 2 times (Gram matrices)
    to 4 times (an unfolding of more than 2048 columns, by a random basis and power iterations) and
    once more for the error. Sums are float64; what is kept is float32 (float64 for such a table).
    It all happens on the CPU.

    Args:
        table: the rows; a tensor (also of a mapped file) or what reads them in blocks.
        tt_ranks: the inner ranks. Those above what is useful are clipped, with one warning.
        row_factors: one per core; by default those of `factorize_rows`.
        col_factors: one per core; by default those of `factorize_columns`.
        max_error: the relative error allowed, in place of `tt_ranks`; the ranks are the least that
            TT-SVD needs. 3 cores unless factors are given.
        dtype: of the cores.
        progress: shows a bar for every pass over the table.

    Raises:
        ValueError: if the table is no matrix of finite floating values, not exactly one of
            `tt_ranks` and `max_error` is given, or factors and ranks do not fit.

    Example:
        >>> table = torch.outer(torch.arange(6.0), torch.ones(4))
        >>> tt_svd(table, tt_ranks=[2], row_factors=[2, 3]).relative_error < 1e-6
        True

    Reference:
        Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput. 33 (2011), algorithm 1;
        Halko, Martinsson, Tropp, "Finding Structure with Randomness", SIAM Review 53 (2011).
    """
    source = _source(table)
    shape = _chosen_shape(
        source,
        tt_ranks=tt_ranks,
        row_factors=row_factors,
        col_factors=col_factors,
        max_error=max_error,
    )
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype, got {dtype}")
    energy = square_sum(source, progress=progress)
    budget = None if max_error is None else max_error**2 * energy
    first = source.rows(0, 1).dtype
    kept_dtype = torch.float64 if torch.float64 in (first, dtype) else torch.float32
    cores: list[Tensor] = []
    ranks: list[int] = []
    current, r_out = source, 1
    for k in range(shape.num_cores - 1, 0, -1):
        unfolding = Unfolding(
            table=current,
            num_digits=shape.row_factors[k],
            width=shape.col_factors[k] * r_out,
            title=f"core {k + 1} of {shape.num_cores}" if progress else None,
        )
        if budget is None:
            space = leading_space(unfolding, rank=shape.tt_ranks[k - 1])
        else:
            space = leading_space(unfolding, max_lost=budget / k)
            budget = max(0.0, budget - space.lost)
        r_out = space.basis.shape[1]
        slices = space.basis.view(unfolding.num_digits, unfolding.width, r_out)
        cores.insert(0, slices.transpose(1, 2).reshape(unfolding.num_digits, -1))
        ranks.insert(0, r_out)
        if budget is None and _is_open(unfolding, shape=shape, k=k):
            space = dataclasses.replace(space, partial=None)
        current = TensorRows(project(unfolding, space, dtype=kept_dtype))
    head = torch.zeros(shape.row_factors[0], current.dim, dtype=torch.float64)
    head[: current.num_rows] = current.rows(0, current.num_rows)
    shape = dataclasses.replace(shape, tt_ranks=tuple(ranks))
    last_head(source, head, cores, shape=shape)
    cores = [core.to(dtype) for core in _balanced([head, *cores])]
    lost = square_distance(source, cores, shape=shape, progress=progress)
    return TTApproximation(shape=shape, cores=cores, relative_error=_ratio(lost, energy))


def tt_svd_bytes(shape: TTShape) -> int:
    """Returns about the most bytes that `tt_svd` allocates for ranks, beside its result.

    The largest over the cores of, in float64,

        8 * (8 * block + held + prefixes * columns * r_k)

    and the projected table that is read. A block is 2 MiB of values or the rows of one prefix. An
    unfolding of `prefixes * columns` rows and `side = m_k n_k r_{k+1}` columns is held itself,
    twice, up to 2^25 values; else 8 matrices of `side^2` for `side <= 2048`; else 5 of
    `(max(64, 2 r_k) + columns) * side`. Nothing but the number of prefixes grows with the rows.
    Threads' buffers and what the allocator keeps come on top, some 100 MB for two threads.
    """
    num_rows, dim, r_out = shape.num_embeddings, shape.embedding_dim, 1
    most = 0
    for k in range(shape.num_cores - 1, 0, -1):
        rank = shape.tt_ranks[k - 1]
        table = torch.empty(num_rows, dim, device="meta")
        unfolding = Unfolding(
            table=TensorRows(table),
            num_digits=shape.row_factors[k],
            width=shape.col_factors[k] * r_out,
        )
        read = 0 if k == shape.num_cores - 1 else 8 * num_rows * dim
        most = max(most, read + peak_bytes(unfolding, rank=rank))
        num_rows = -(-num_rows // shape.row_factors[k])
        dim, r_out = unfolding.num_columns * rank, rank
    return most


@torch.no_grad()
def round_cores(
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    *,
    shape: TTShape,
    tt_ranks: Sequence[int] | None = None,
    max_error: float | None = None,
) -> TTApproximation:
    """Returns cores of lower ranks near given ones, in their dtype and on their device.

    A sweep of QR decompositions and one of SVDs, in float64; the table is never made. First digits
    of which no row is valid do not count.

    Args:
        cores: of the table.
        shape: of the table.
        tt_ranks: the inner ranks wanted, none above the cores'.
        max_error: the relative error allowed, in place of `tt_ranks`.

    Raises:
        ValueError: if cores have other shapes or are not finite, not exactly one of `tt_ranks` and
            `max_error` is given, or a rank is above the cores'.

    Reference:
        Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput. 33 (2011), algorithm 2.
    """
    check_cores(cores, shape=shape)
    _check_choice(tt_ranks, max_error)
    if not all(bool(core.isfinite().all()) for core in cores):
        raise ValueError("cores must be finite, got nan or inf")
    if tt_ranks is not None:
        tt_ranks = _checked_ranks(tt_ranks, shape=shape)
        if any(rank > now for rank, now in zip(tt_ranks, shape.tt_ranks, strict=True)):
            raise ValueError(
                f"tt_ranks must be at most the cores' {shape.tt_ranks}, got {tt_ranks}"
            )
    given = [core.double() for core in cores]
    used = -(-shape.num_embeddings // math.prod(shape.row_factors[1:]))
    given[0] = given[0].clone()
    given[0][used:] = 0
    slices = _orthogonal_to_the_right(given, shape=shape)
    energy = float(slices[-1].square().sum())
    budget = None if max_error is None else max_error**2 * energy
    ranks: list[int] = []
    for k in range(shape.num_cores - 1, 0, -1):
        m, r_in, n, r_out = slices[k].shape
        left, singular, right = torch.linalg.svd(
            slices[k].transpose(0, 1).reshape(r_in, -1), full_matrices=False
        )
        lost = singular.square().flip(0).cumsum(0).flip(0)  # [i]: without i and what follows
        if budget is None:
            assert tt_ranks is not None
            rank = min(tt_ranks[k - 1], len(singular))
        else:
            rank = max(1, int((lost > budget / k).sum()))
            budget -= float(lost[rank]) if rank < len(lost) else 0.0
        slices[k] = right[:rank].view(rank, m, n, r_out).transpose(0, 1)
        slices[k - 1] = slices[k - 1] @ (left[:, :rank] * singular[:rank])
        ranks.insert(0, rank)
    rounded = _balanced([s.reshape(len(s), -1) for s in slices])
    result = [new.to(core) for new, core in zip(rounded, cores, strict=True)]
    new_shape = dataclasses.replace(shape, tt_ranks=tuple(ranks))
    error = _difference(given, [c.double() for c in result], shape=shape, other=new_shape)
    total = moments(given, shape=shape)[1]
    return TTApproximation(shape=new_shape, cores=result, relative_error=_ratio(error, total))


@torch.no_grad()
def grow_ranks(
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    *,
    shape: TTShape,
    tt_ranks: Sequence[int],
    generator: torch.Generator | None = None,
) -> tuple[TTShape, list[Tensor]]:
    """Returns the shape and cores of the same table with higher ranks.

    The new columns of a slice are drawn with the standard deviation of its core, the new rows are
    0: every new path adds 0, and the new rows have gradients from the first step on.

    Args:
        cores: of the table.
        shape: of the table.
        tt_ranks: the inner ranks wanted, none below the cores'. Those above what is useful are
            clipped, with one warning.
        generator: on the CPU; by default torch's global one.

    Raises:
        ValueError: if cores have other shapes or a rank is below the cores'.
    """
    check_cores(cores, shape=shape)
    wanted = _checked_ranks(tt_ranks, shape=shape)
    if any(rank < now for rank, now in zip(wanted, shape.tt_ranks, strict=True)):
        raise ValueError(f"tt_ranks must be at least the cores' {shape.tt_ranks}, got {wanted}")
    useful = clipped(dataclasses.replace(shape, tt_ranks=wanted)).tt_ranks
    ranks = tuple(max(pair) for pair in zip(useful, shape.tt_ranks, strict=True))
    grown = dataclasses.replace(shape, tt_ranks=ranks)
    return grown, padded_cores(cores, shape=shape, grown=grown, generator=generator)


def padded_cores(
    cores: Sequence[Tensor], *, shape: TTShape, grown: TTShape, generator: torch.Generator | None
) -> list[Tensor]:
    """Returns the cores that `grow_ranks` does, in a shape whose ranks are nowhere lower."""
    result = []
    for k, core in enumerate(cores):
        m = shape.row_factors[k]
        r_in, n, r_out = shape.slice_shapes[k]
        new_in, _, new_out = grown.slice_shapes[k]
        slices = core.new_zeros(m, new_in, n, new_out)
        drawn = torch.randn(m, r_in, n, new_out - r_out, generator=generator)
        deviation = float(core.double().square().mean().sqrt())
        slices[:, :r_in, :, r_out:] = (drawn * deviation).to(core)
        slices[:, :r_in, :, :r_out] = core.view(m, r_in, n, r_out)
        result.append(slices.view(grown.core_shapes[k]))
    return result


def _is_open(unfolding: Unfolding, *, shape: TTShape, k: int) -> bool:
    """Whether a partial prefix has too few rows to say its coordinates, and can be done without.

    `last_head` then finds them. It can be left out of the next unfolding, if that has more rows
    than its rank without it.
    """
    if unfolding.num_rest * unfolding.width >= shape.tt_ranks[k - 1]:
        return False
    if k == 1:
        return unfolding.num_prefixes > 0
    prefixes = unfolding.num_prefixes // shape.row_factors[k - 1]
    return prefixes * unfolding.num_columns // shape.col_factors[k - 1] > shape.tt_ranks[k - 2]


def _source(table: Tensor | RowBlocks) -> RowBlocks:
    if not isinstance(table, Tensor):
        return table
    if table.ndim != 2 or table.numel() == 0 or not table.is_floating_point() or table.is_meta:
        raise ValueError(
            f"table must be a matrix of floating values that are there, "
            f"got {table.dtype} {list(table.shape)} on {table.device}"
        )
    return TensorRows(table)


def _chosen_shape(
    source: RowBlocks,
    *,
    tt_ranks: Sequence[int] | None,
    row_factors: Sequence[int] | None,
    col_factors: Sequence[int] | None,
    max_error: float | None,
) -> TTShape:
    _check_choice(tt_ranks, max_error)
    if tt_ranks is not None:
        shape = make_shape(
            source.num_rows,
            source.dim,
            tt_ranks=tt_ranks,
            row_factors=row_factors,
            col_factors=col_factors,
        )
        return clipped(shape)
    given = row_factors if row_factors is not None else col_factors
    num_cores = DEFAULT_NUM_CORES if given is None else len(given)
    if row_factors is None:
        row_factors = factorize_rows(source.num_rows, num_cores=num_cores)
    if col_factors is None:
        col_factors = factorize_columns(source.dim, num_cores=num_cores)
    return TTShape(
        num_embeddings=source.num_rows,
        embedding_dim=source.dim,
        row_factors=positive_ints(row_factors, name="row_factors"),
        col_factors=positive_ints(col_factors, name="col_factors"),
        tt_ranks=(1,) * (num_cores - 1),
    )


def _check_choice(tt_ranks: Sequence[int] | None, max_error: float | None) -> None:
    if (tt_ranks is None) == (max_error is None):
        raise ValueError(
            f"tt_ranks or max_error must be given, and one of them only, "
            f"got {tt_ranks} and {max_error}"
        )
    if max_error is not None and not 0 < max_error < 1:
        raise ValueError(f"max_error must be between 0 and 1, got {max_error}")


def _checked_ranks(tt_ranks: Sequence[int], *, shape: TTShape) -> tuple[int, ...]:
    return dataclasses.replace(shape, tt_ranks=tuple(tt_ranks)).tt_ranks


def _balanced(cores: Sequence[Tensor]) -> list[Tensor]:
    """Cores of the same product whose entries have one root mean square."""
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    if min(sizes) == 0.0:
        return list(cores)
    mean = math.exp(sum(math.log(size) for size in sizes) / len(sizes))
    return [core * (mean / size) for core, size in zip(cores, sizes, strict=True)]


def _orthogonal_to_the_right(cores: Sequence[Tensor], *, shape: TTShape) -> list[Tensor]:
    """Slices `[m_k, r_k, n_k, r_{k+1}]` of the same table; all but the last core's orthonormal."""
    result: list[Tensor] = []
    carried = cores[0].new_ones(1, 1)
    for k, (core, m, (r_in, n, r_out)) in enumerate(
        zip(cores, shape.row_factors, shape.slice_shapes, strict=True)
    ):
        slices = torch.einsum("ar,mrns->mans", carried, core.view(m, r_in, n, r_out))
        if k == shape.num_cores - 1:
            return [*result, slices]
        left = slices.shape[1]
        q, carried = torch.linalg.qr(slices.transpose(0, 1).reshape(-1, r_out))
        result.append(q.view(left, m, n, -1).transpose(0, 1))
    raise AssertionError


def _difference(
    cores: Sequence[Tensor], others: Sequence[Tensor], *, shape: TTShape, other: TTShape
) -> float:
    """The square of two tables' distance over the valid rows, by a TT of block diagonal slices."""
    ranks = tuple(a + b for a, b in zip(shape.tt_ranks, other.tt_ranks, strict=True))
    both = dataclasses.replace(shape, tt_ranks=ranks)
    joined = []
    for k, (a, b) in enumerate(zip(cores, others, strict=True)):
        m = shape.row_factors[k]
        r_in, n, r_out = shape.slice_shapes[k]
        s_in, _, s_out = other.slice_shapes[k]
        t_in, _, t_out = both.slice_shapes[k]
        slices = a.new_zeros(m, t_in, n, t_out)
        slices[:, :r_in, :, :r_out] = a.view(m, r_in, n, r_out)
        slices[:, t_in - s_in :, :, t_out - s_out :] += (b if k else -b).view(m, s_in, n, s_out)
        joined.append(slices.view(both.core_shapes[k]))
    return max(0.0, moments(joined, shape=both)[1])


def _ratio(lost: float, energy: float) -> float:
    return math.sqrt(lost / energy) if energy > 0 else math.sqrt(lost)
