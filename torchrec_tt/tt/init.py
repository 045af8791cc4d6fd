"""Fills cores with random values that make a table of a wanted spread."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrec_tt.tt.cores import check_cores, moments
from torchrec_tt.tt.ranks import useful_ranks
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import padded_cores, tt_svd

TTInit = Literal["sampled_gaussian", "gaussian", "uniform", "orthogonal", "tt_svd"]

_CHUNK_ROWS = 4096  # drawn at once

TAIL_START = 2.0  # sampled_gaussian keeps what is at least this many deviations from zero
TAIL_PROBABILITY = 0.5 * math.erfc(TAIL_START / math.sqrt(2.0))  # of one of the two tails


@torch.no_grad()
def init_cores_(
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    *,
    shape: TTShape,
    method: TTInit = "sampled_gaussian",
    generator: torch.Generator | None = None,
) -> None:
    """Fills the cores so that the table has mean near 0 and standard deviation 1/sqrt(3N).

    `N = num_embeddings`; that is the deviation of DLRM's dense tables, uniform in +-1/sqrt(N). The
    entries of all cores are drawn from one symmetric distribution of variance v and multiplied by
    one scale c. A table entry is a sum over `prod(tt_ranks)` paths of a product of d independent
    entries, so in expectation

        variance of the table = prod(tt_ranks) * (c^2 v)^d,
        c = (3 N prod(tt_ranks))^(-1 / 2d) / sqrt(v)

    with v = 1 for "gaussian" and 1/3 for "uniform" on (-1, 1). "sampled_gaussian" draws from
    N(0, 1) what is at least a = 2 from zero; integrating x^2 over the tails by parts gives, with
    the normal density phi and its tail probability Q,

        v = 1 + a phi(a) / Q(a) = 5.7464.

    One draw of few core entries (a small rank, a short core) misses its expectation by more than
    10 %, so c is not taken from this formula but from the standard deviation that the drawn cores
    do have. That is exact and cheap: see `moments`. It is taken over the N rows that can be looked
    up, not over the padded ones, so it is the deviation of what a user sees.

    "orthogonal" draws Gaussian cores and takes, of each, the orthonormal factor of its matrix
    `[r_k, m_k n_k r_{k+1}]` (of the first core `[m_0 n_0, r_1]`), times what makes its mean square
    1. "tt_svd" is TT-SVD of a table that is uniform in +-1/sqrt(N), drawn in blocks: it reads that
    table as often as `tt_svd` does, minutes for 10 million rows.

    The kurtosis of the table is 2.9 to 3.2 with "sampled_gaussian" for 3 cores from rank 8 on: its
    core entries have nearly equal squares, so a sum over the paths is nearly Gaussian and not as
    peaked at 0 as with the others (3.7 to 4.0 with "gaussian" and 3.2 to 3.3 with "uniform" at
    ranks (16, 16) and 20,000 rows, dim 16). Elsewhere "sampled_gaussian" gives, for the same table,
    2.8 at rank 8 to 3.0 at rank 64 with 2 cores, 3.5 to 3.7 at rank 8 and 3.3 to 3.4 at rank 16
    with 4 cores, whose slices are few, and 1.2 to 1.4 at rank 1, where an entry is one product. In
    tables of a few hundred rows it scatters between 2.8 and 3.5 from draw to draw.

    Values are drawn in float32 on the generator's device and cast, so a table is the same in every
    dtype (up to rounding) and on every device.

    Args:
        cores: written in place; any floating dtype; on the meta device nothing is drawn.
        shape: the table's shape.
        method: the distribution of the core entries.
        generator: by default torch's global CPU generator.

    Raises:
        ValueError: if the method is unknown or a core does not have its shape.

    Example:
        >>> shape = TTShape(num_embeddings=6, embedding_dim=4, row_factors=(2, 3),
        ...                 col_factors=(2, 2), tt_ranks=(3,))
        >>> cores = [torch.empty(s) for s in shape.core_shapes]
        >>> init_cores_(cores, shape=shape, generator=table_generator("t_cat_0", seed=0))

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021 (sampled Gaussian).
    """
    if method not in get_args(TTInit):
        raise ValueError(f"method must be one of {get_args(TTInit)}, got {method!r}")
    check_cores(cores, shape=shape)
    if cores[0].is_meta:
        return
    if method == "tt_svd":
        drawn = _svd_of_a_random_table(shape, generator=generator)
    elif method == "orthogonal":
        drawn = [_draw(core, method="gaussian", generator=generator) for core in cores]
        for k, (core, (r_in, _, r_out)) in enumerate(zip(drawn, shape.slice_shapes, strict=True)):
            _orthogonalize_(core, rank=r_in if k else r_out, is_first=k == 0)
    else:
        drawn = [_draw(core, method=method, generator=generator) for core in cores]
    target = 1.0 / math.sqrt(3.0 * shape.num_embeddings)
    # A Python float times float32 rounds to float32 first, so the last bits of the float64 sums,
    # which the machine's BLAS decides, do not reach the cores.
    scale = (target / _spread(drawn, shape=shape)) ** (1.0 / shape.num_cores)
    for core, values in zip(cores, drawn, strict=True):
        core.copy_(values.mul_(scale))


def table_generator(name: str, *, seed: int) -> torch.Generator:
    """Returns a CPU generator that depends on the table's name and the seed alone.

    Every rank and every process gets the same stream, whatever order tables are made in and
    whichever of them a rank owns. (Python's `hash` differs between processes.)
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def _draw(core: Tensor, *, method: TTInit, generator: torch.Generator | None) -> Tensor:
    """Unscaled float32 values in the core's shape, on the generator's device."""
    device = torch.device("cpu") if generator is None else generator.device
    if method == "gaussian":
        return torch.randn(core.shape, generator=generator, device=device, dtype=torch.float32)
    # In [-1, 1), 24 random bits: a sign, and a magnitude made to lie in (0, 1], without 0.
    signed = torch.rand(core.shape, generator=generator, device=device, dtype=torch.float32)
    signed.mul_(2.0).sub_(1.0)
    magnitude = (signed >= 0.0).to(torch.float32).sub_(signed)
    if method == "sampled_gaussian":
        # The inverse of the lower tail's distribution, of which only the size is kept.
        magnitude = torch.special.ndtri(magnitude.mul_(TAIL_PROBABILITY))
    return magnitude.copysign_(signed)


def _orthogonalize_(core: Tensor, *, rank: int, is_first: bool) -> None:
    """Makes the rows of `[rank, rest]` orthogonal, or its columns where those are fewer."""
    slices = core.view(-1, rank) if is_first else core.view(len(core), rank, -1).transpose(0, 1)
    matrix = slices.reshape(-1, rank) if is_first else slices.reshape(rank, -1).T
    is_wide = matrix.shape[0] < rank
    q, r = torch.linalg.qr(matrix.T if is_wide else matrix)
    q = q * r.diagonal().sign()  # else the signs are the algorithm's, and not random
    q = (q.T if is_wide else q) / q.square().mean().sqrt()
    slices.copy_(q if is_first else q.T.reshape(slices.shape))


def _svd_of_a_random_table(shape: TTShape, *, generator: torch.Generator | None) -> list[Tensor]:
    device = torch.device("cpu") if generator is None else generator.device
    seed = torch.randint(2**40, (1,), generator=generator, device=device)
    useful = useful_ranks(shape)
    found = tt_svd(
        _UniformRows(shape.num_embeddings, shape.embedding_dim, int(seed)),
        tt_ranks=useful,
        row_factors=shape.row_factors,
        col_factors=shape.col_factors,
    )
    draws = torch.Generator().manual_seed(int(seed))
    return padded_cores(found.cores, shape=found.shape, grown=shape, generator=draws)


@dataclass(frozen=True, slots=True)
class _UniformRows:
    """Rows uniform in +-1/sqrt(N); a chunk of them is drawn from its own seed."""

    num_rows: int
    dim: int
    seed: int

    def rows(self, begin: int, end: int) -> Tensor:
        first = begin // _CHUNK_ROWS
        chunks = [self._chunk(chunk) for chunk in range(first, -(-end // _CHUNK_ROWS))]
        return torch.cat(chunks)[begin - first * _CHUNK_ROWS : end - first * _CHUNK_ROWS]

    def _chunk(self, chunk: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + chunk)
        values = torch.rand(_CHUNK_ROWS, self.dim, generator=generator)
        return values.mul_(2.0).sub_(1.0).div_(math.sqrt(self.num_rows))


def _spread(cores: Sequence[Tensor], *, shape: TTShape) -> float:
    """The standard deviation of the table's entries about their mean."""
    total, total_squares = moments(cores, shape=shape)
    num_entries = shape.num_embeddings * shape.embedding_dim
    mean, mean_square = total / num_entries, total_squares / num_entries
    variance = mean_square - mean * mean
    # Only a table of a few entries can be nearly constant. Its spread is an accident of the draw,
    # and dividing by it would make huge values, so such a table is scaled by its size instead.
    return math.sqrt(max(variance, 0.5 * mean_square))
