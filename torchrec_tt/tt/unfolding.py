"""Leading spaces of the unfoldings of a table that is read in blocks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_tt.tt.row_blocks import BLOCK_BYTES, RowBlocks, steps

MAX_KEPT = 2**25  # entries of an unfolding up to which it is kept as it is
MAX_GRAM_SIDE = 2048  # columns up to which an unfolding's Gram matrix is made
MAX_SVD = 2**20  # entries of a matrix up to which its SVD is taken, and not that of its Gram matrix
NUM_SKETCH_PASSES = 3
MIN_SKETCH = 64
NUM_FILLS = 3
FILL_PENALTIES = (0.0, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The leading right singular vectors of an unfolding."""

    basis: Tensor  # [side, rank] orthonormal columns
    partial: Tensor | None  # [num_columns, rank], coordinates of the partial prefix
    lost: float  # square of what lies outside, over the real rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfolding:
    """The matrix `[(prefix, column), (last digit, rest of the column)]` of a table's rows.

    Row `prefix * num_digits + digit` of the table is the prefix's part `digit`. The rows need not
    fill the last prefix: that one is the *partial* prefix, of `num_rest` digits.
    """

    table: RowBlocks
    num_digits: int  # m_k
    width: int  # n_k * r_{k+1}
    title: str | None = None  # of a progress bar

    @property
    def side(self) -> int:
        return self.num_digits * self.width

    @property
    def num_columns(self) -> int:
        return self.table.dim // self.width

    @property
    def num_prefixes(self) -> int:
        """The complete ones."""
        return self.table.num_rows // self.num_digits

    @property
    def num_rest(self) -> int:
        return self.table.num_rows % self.num_digits

    @property
    def prefixes_per_block(self) -> int:
        return max(1, BLOCK_BYTES // (8 * self.num_digits * self.table.dim))

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields first prefixes and float64 `[prefixes * num_columns, side]` of complete ones."""
        step = self.prefixes_per_block
        for first in steps(self.num_prefixes, step=step, title=self.title):
            last = min(first + step, self.num_prefixes)
            yield first, self._matrix(first * self.num_digits, last * self.num_digits)

    def partial(self) -> Tensor | None:  # [num_columns, num_rest * width]
        """Returns the partial prefix in float64, if there is one."""
        if self.num_rest == 0:
            return None
        return self._matrix(self.num_prefixes * self.num_digits, self.table.num_rows)

    def _matrix(self, begin: int, end: int) -> Tensor:
        digits = min(end - begin, self.num_digits)
        values = self.table.rows(begin, end).to("cpu", torch.float64)
        values = values.reshape(-1, digits, self.num_columns, self.width)
        return values.transpose(1, 2).reshape(-1, digits * self.width)


def leading_space(
    unfolding: Unfolding, *, rank: int | None = None, max_lost: float | None = None
) -> Space:
    """Returns the space of the given rank, or of the least rank that loses at most `max_lost`.

    What the partial prefix lacks is chosen such that nothing, or little, is lost by it.
    """
    partial = unfolding.partial()
    num_rows = unfolding.num_columns * (unfolding.num_prefixes + (partial is not None))
    max_rank = min(unfolding.side, num_rows)
    sketch = MIN_SKETCH if rank is None else max(MIN_SKETCH, 2 * rank)
    while True:
        fit = _Fit(unfolding, partial=partial, sketch=min(sketch, unfolding.side))
        if rank is not None:
            return fit.refined(min(rank, max_rank))
        assert max_lost is not None
        highest = min(max_rank, len(fit.stacked))
        if fit.space(highest).lost <= max_lost or highest == max_rank:
            break
        sketch *= 2
    low, high = 1, highest
    while low < high:
        middle = (low + high) // 2
        if fit.space(middle).lost <= max_lost:
            high = middle
        else:
            low = middle + 1
    space = fit.refined(low)
    # The search looks at spaces before the partial prefix is filled, which may need a rank more.
    while low > 1 and (less := fit.refined(low - 1)).lost <= max_lost:
        space, low = less, low - 1
    return space


def project(unfolding: Unfolding, space: Space, *, dtype: torch.dtype) -> Tensor:
    """Returns the coordinates of every prefix, `[prefixes, num_columns * rank]`."""
    num_prefixes = unfolding.num_prefixes + (space.partial is not None)
    rank = space.basis.shape[1]
    result = torch.empty(num_prefixes, unfolding.num_columns * rank, dtype=dtype)
    for first, block in unfolding.blocks():
        coordinates = (block @ space.basis).view(-1, result.shape[1])
        result[first : first + len(coordinates)] = coordinates
    if space.partial is not None:
        result[-1] = space.partial.reshape(-1)
    return result


def _condensed(unfolding: Unfolding, *, sketch: int) -> tuple[Tensor, float]:
    """A matrix with (nearly) the Gram matrix of the complete prefixes, and their sum of squares.

    Themselves where they are few; the root of the Gram matrix where that is small; else Nystroem's
    approximation of it from a random basis, after power iterations.
    """
    side = unfolding.side
    if unfolding.num_prefixes * unfolding.num_columns * side <= MAX_KEPT:
        columns = unfolding.num_columns
        matrix = torch.empty(unfolding.num_prefixes * columns, side, dtype=torch.float64)
        for first, block in unfolding.blocks():
            matrix[first * columns : first * columns + len(block)] = block
        return matrix, float(matrix.square().sum())
    if side <= MAX_GRAM_SIDE:
        gram = torch.zeros(side, side, dtype=torch.float64)
        for _, block in unfolding.blocks():
            gram.addmm_(block.T, block)
        squares, vectors = torch.linalg.eigh(gram)
        return squares.clamp(min=0).sqrt()[:, None] * vectors.T, float(gram.trace())
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(side, sketch, dtype=torch.float64, generator=generator)
    energy = 0.0
    for step in range(NUM_SKETCH_PASSES):
        basis = torch.linalg.qr(image).Q
        image = torch.zeros_like(basis)
        for _, block in unfolding.blocks():
            image.addmm_(block.T, block @ basis)
            energy += float(block.square().sum()) if step == 0 else 0.0
    squares, vectors = torch.linalg.eigh(basis.T @ image)
    is_kept = squares > 1e-14 * squares.max().clamp(min=1e-300)
    roots = vectors[:, is_kept] / squares[is_kept].sqrt()
    return (image @ roots).T.contiguous(), energy


class _Fit:
    """Fits spaces to complete prefixes and to what there is of a partial one."""

    def __init__(self, unfolding: Unfolding, *, partial: Tensor | None, sketch: int) -> None:
        complete, energy = _condensed(unfolding, sketch=sketch)
        self.energy = energy
        self.partial = partial  # [num_columns, num_rest * width]
        # The sum of squares that a prefix may have without standing out.
        self.usual = 16.0 * energy / max(1, unfolding.num_prefixes)
        if partial is None:
            self.stacked = complete
            self.spectra = [_Spectrum(complete)]
        else:
            padding = complete.new_zeros(len(partial), complete.shape[1] - partial.shape[1])
            self.stacked = torch.cat([complete, torch.cat([partial, padding], dim=1)])
            self.spectra = [_Spectrum(self.stacked)]
            if len(complete):
                self.spectra.append(_Spectrum(complete))
        self.complete = self.stacked[: len(complete)]  # [L, side]

    def space(self, rank: int) -> Space:
        """The better of those with zeros in the missing rows and without the partial prefix."""
        found = [self._fitted(s.vectors(rank)) for s in self.spectra if s.max_rank >= rank]
        return min(found, key=lambda space: space.lost)

    def refined(self, rank: int) -> Space:
        """The space after the missing rows were filled with what it says of them, some times."""
        best = self.space(rank)
        if self.partial is None:
            return best
        for _ in range(NUM_FILLS):
            assert best.partial is not None
            observed = self.partial.shape[1]
            self.stacked[len(self.complete) :, observed:] = best.partial @ best.basis[observed:].T
            found = self._fitted(_Spectrum(self.stacked).vectors(rank))
            is_enough = found.lost > 0.998 * best.lost
            best = min(best, found, key=lambda space: space.lost)
            if is_enough:
                break
        return best

    def _fitted(self, basis: Tensor) -> Space:
        lost = max(0.0, self.energy - float((self.complete @ basis).square().sum()))
        if self.partial is None:
            return Space(basis=basis, partial=None, lost=lost)
        coordinates = self._coordinates(basis)
        rest = self.partial - coordinates @ basis[: self.partial.shape[1]].T
        return Space(basis=basis, partial=coordinates, lost=lost + float(rest.square().sum()))

    def _coordinates(self, basis: Tensor) -> Tensor:  # [num_columns, rank]
        """Those of the partial prefix, by least squares over its rows.

        The missing rows are penalised as little as keeps the prefix as small as others: where its
        rows say little of a coordinate, least squares alone would make it huge.
        """
        assert self.partial is not None
        observed = basis[: self.partial.shape[1]]
        left, singular, right = torch.linalg.svd(observed, full_matrices=False)
        image = self.partial @ left
        usual = max(self.usual, float(self.partial.square().sum()))
        coordinates = image
        for penalty in FILL_PENALTIES:
            # The columns of the basis are orthonormal: the missing rows' part of s is 1 - s^2.
            squares = (singular.square() + penalty * (1 - singular.square())).clamp(min=1e-24)
            coordinates = (image * (singular / squares)) @ right
            if float(coordinates.square().sum()) <= usual:
                break
        return coordinates


class _Spectrum:
    """A matrix's right singular vectors; a large one's from the Gram matrix of its shorter side."""

    def __init__(self, matrix: Tensor) -> None:  # [L, side]
        self._matrix = matrix
        self.max_rank = min(matrix.shape)
        self._is_left = False
        if matrix.numel() <= MAX_SVD:
            self._vectors = torch.linalg.svd(matrix, full_matrices=False).Vh.T
            return
        self._is_left = matrix.shape[0] < matrix.shape[1]
        gram = matrix @ matrix.T if self._is_left else matrix.T @ matrix
        self._vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)

    def vectors(self, rank: int) -> Tensor:  # [side, rank]
        leading = self._vectors[:, :rank]
        return torch.linalg.qr(self._matrix.T @ leading).Q if self._is_left else leading


def peak_bytes(unfolding: Unfolding, *, rank: int) -> int:
    """Returns about the most bytes that `leading_space` and `project` hold beside the table."""
    side, columns = unfolding.side, unfolding.num_columns
    num_prefixes = unfolding.num_prefixes + (unfolding.num_rest > 0)
    num_rows = num_prefixes * columns
    block = unfolding.prefixes_per_block * unfolding.num_digits * unfolding.table.dim
    if num_rows * side <= MAX_KEPT:
        held = 2 * num_rows * side + 4 * min(num_rows, side) ** 2
    elif side <= MAX_GRAM_SIDE:
        held = 8 * side**2
    else:
        sketch = min(side, max(MIN_SKETCH, 2 * rank))
        held = 5 * (sketch + columns) * side
    return 8 * (8 * block + held + num_prefixes * columns * rank)
