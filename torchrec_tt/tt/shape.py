"""TTShape, the one value that says how a table is cut into Tensor-Train cores."""

import math
import operator
from dataclasses import dataclass
from typing import Any

MIN_CORES = 2
MAX_CORES = 4
_MAX_ROWS = 2**63  # ids are int64
_MAX_SLICE = 2**31  # as kernels count elements of a slice
_MAX_PARAMETERS = 2**60  # their bytes are counted in 64 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class TTShape:
    """The factors and ranks of a table of `num_embeddings` rows in Tensor-Train (TT) form.

    Row `i` has digits `i_0 ... i_{d-1}` in the mixed radix `row_factors` (digit 0 is the most
    significant), column `j` likewise in `col_factors`, and

        table[i, j] = G_0[i_0, j_0] @ G_1[i_1, j_1] @ ... @ G_{d-1}[i_{d-1}, j_{d-1}]

    where `G_k[i_k, j_k]` is a matrix `[r_k, r_{k+1}]` and the outer ranks are 1.

    Args:
        num_embeddings: rows of the table; ids in `[num_embeddings, prod(row_factors))` are invalid
            although the cores could answer them.
        embedding_dim: columns of the table.
        row_factors: `m_k`, one per core; their product is at least `num_embeddings`.
        col_factors: `n_k`, one per core; their product is `embedding_dim`.
        tt_ranks: the `d - 1` inner ranks.

    Raises:
        ValueError: if there are fewer than 2 or more than 4 cores, a factor does not fit, or there
            is more than can be counted: 2^63 rows, 2^31 elements of a slice or 2^60 of the cores.

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021, section 3.
    """

    num_embeddings: int
    embedding_dim: int
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    tt_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, name, positive_int(getattr(self, name), name=name))
        for name in ("row_factors", "col_factors", "tt_ranks"):
            object.__setattr__(self, name, positive_ints(getattr(self, name), name=name))
        d = len(self.row_factors)
        if not MIN_CORES <= d <= MAX_CORES:
            raise ValueError(
                f"row_factors must have {MIN_CORES} to {MAX_CORES} entries, got {self.row_factors}"
            )
        if len(self.col_factors) != d:
            raise ValueError(
                f"col_factors must have {d} entries for {d} row_factors, got {self.col_factors}"
            )
        if len(self.tt_ranks) != d - 1:
            raise ValueError(
                f"tt_ranks must have {d - 1} entries for {d} cores, got {self.tt_ranks}"
            )
        if self.num_rows_padded < self.num_embeddings:
            raise ValueError(
                f"row_factors must have a product of at least num_embeddings="
                f"{self.num_embeddings}, got {self.row_factors} with product {self.num_rows_padded}"
            )
        if math.prod(self.col_factors) != self.embedding_dim:
            raise ValueError(
                f"col_factors must have the product embedding_dim={self.embedding_dim}, "
                f"got {self.col_factors} with product {math.prod(self.col_factors)}"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.num_rows_padded >= _MAX_ROWS:
            raise ValueError(f"row_factors must have a product below 2^63, got {self.row_factors}")
        largest = max(math.prod(shape) for shape in self.slice_shapes)
        if largest >= _MAX_SLICE:
            raise ValueError(
                f"tt_ranks must give slices r_k * n_k * r_{{k+1}} below 2^31 elements, got "
                f"{self.tt_ranks} with {largest} for col_factors {self.col_factors}"
            )
        if self.num_parameters > _MAX_PARAMETERS:
            raise ValueError(
                f"tt_ranks must give cores of at most 2^60 elements, got {self.tt_ranks} with "
                f"{self.num_parameters} for row_factors {self.row_factors}"
            )

    @property
    def num_cores(self) -> int:
        return len(self.row_factors)

    @property
    def num_rows_padded(self) -> int:
        """Rows the cores can express: `prod(row_factors)`."""
        return math.prod(self.row_factors)

    @property
    def slice_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """`(r_k, n_k, r_{k+1})` of one row-digit's slice of each core."""
        ranks = (1, *self.tt_ranks, 1)
        return tuple(zip(ranks[:-1], self.col_factors, ranks[1:], strict=True))

    @property
    def core_shapes(self) -> tuple[tuple[int, int], ...]:
        """`(m_k, r_k * n_k * r_{k+1})` of each core."""
        return tuple(
            (m, math.prod(s)) for m, s in zip(self.row_factors, self.slice_shapes, strict=True)
        )

    @property
    def num_parameters(self) -> int:
        return sum(rows * cols for rows, cols in self.core_shapes)


def positive_int(value: Any, *, name: str) -> int:
    """Returns `value` (an int, or what NumPy calls one) as an int.

    Raises:
        ValueError: if it is none, or below 1; the message calls it `name`.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number


def positive_ints(values: Any, *, name: str) -> tuple[int, ...]:
    """Returns the elements of a sequence as `positive_int` does.

    Raises:
        ValueError: if it is no sequence, or an element no positive integer.
    """
    try:
        return tuple(positive_int(value, name=name) for value in values)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be positive integers, got {values!r}") from None
