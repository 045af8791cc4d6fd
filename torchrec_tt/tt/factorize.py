"""Chooses a table's factors: balanced or fast ones for its rows, exact ones for its columns."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from torchrec_tt.tt.cost import (
    chunk_sum_bytes,
    core_bytes,
    dense_bytes,
    expected_unique,
    step_cost,
)
from torchrec_tt.tt.shape import (
    MAX_CORES,
    MIN_CORES,
    TTShape,
    positive_int,
    positive_ints,
)

MAX_PADDING_RATIO = 1.25  # padded rows over rows, from 20 rows on
MAX_FACTOR_RATIO = 3  # largest row factor over smallest

RowStrategy = Literal["balanced", "fast"]
BATCH_ROWS = 8192  # distinct rows of the batch that `fast` is for: 16384 Zipf ids have as many
MAX_CHUNK_SUM_BYTES = 2**20  # of `fast`: what is read and summed per row should be in a cache
STEP_RATIOS = (4.0, 2.0, 1.5, 1.2, 1.1, 1.03)  # by which `fast` moves factors, in this order


def factorize_rows(
    num_embeddings: int,
    *,
    num_cores: int = 3,
    row_strategy: RowStrategy = "balanced",
    col_factors: Sequence[int] | None = None,
    tt_ranks: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Returns `row_factors` whose product is at least `num_embeddings`.

    `balanced`: ascending factors near each other, hence few parameters whatever the ranks. `fast`:
    few prefixes (all factors but the last) and a long last factor, hence few flops: the factors of
    the least `step_cost` that a search from the balanced ones finds among those whose cores

    - hold at most the bytes of the balanced ones' cores,
    - have at most `MAX_CHUNK_SUM_BYTES` of `chunk_sum_bytes` (or the balanced ones' bytes, where
      those are more), so that the slices that every row reads stay in a processor's cache,

    and which pad at most `MAX_PADDING_RATIO`. So `fast` never costs more than `balanced`, in
    bytes or by the model.

    How balanced ones are found: the counts tried are `num_embeddings` rounded up to a multiple of
    1, 10, 100, ...: round counts have many divisors, so some of them fall into nearly equal
    factors. Factors are the better balanced, the nearer their arithmetic mean is to their
    geometric mean; each count stands for its best factors, the best of these is taken, and of
    equals the smallest count. This is the method of the paper's code, which measures balance by
    entropy and agrees on its Kaggle tables. It pads without limit there; here only counts up to
    `MAX_PADDING_RATIO` times the rows are tried, of factors within `MAX_FACTOR_RATIO` of each
    other. Where none has such factors, as happens to small tables, the smallest count that has is
    taken, whatever its last digits; from 20 rows on that keeps within the same padding.

    Args:
        num_embeddings: rows of the table.
        num_cores: how many factors, 2 to 4.
        row_strategy: "balanced" or "fast".
        col_factors: of the table, one per core; for "fast" only, which must have them.
        tt_ranks: of the table, `num_cores - 1`; for "fast" only, which must have them.

    Raises:
        ValueError: if `num_embeddings` is not positive, `num_cores` is out of range, the strategy
            is unknown, or "fast" is without columns and ranks that fit.

    Example:
        >>> factorize_rows(10_131_227)
        (200, 220, 250)
        >>> factorize_rows(
        ...     10_131_227, row_strategy="fast", col_factors=(4, 4, 4), tt_ranks=(32, 32)
        ... )
        (206, 27, 1822)

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021; `suggested_tt_shapes` in facebookresearch/FBTT-Embedding.
    """
    num_embeddings = _check(num_embeddings, num_cores=num_cores, name="num_embeddings")
    if row_strategy not in get_args(RowStrategy):
        raise ValueError(
            f"row_strategy must be one of {get_args(RowStrategy)}, got {row_strategy!r}"
        )
    balanced = _balanced_rows(num_embeddings, num_cores=num_cores)
    if row_strategy == "balanced":
        return balanced
    if col_factors is None or tt_ranks is None:
        raise ValueError(
            f"col_factors and tt_ranks must be given for row_strategy='fast', "
            f"got {col_factors} and {tt_ranks}"
        )
    col_factors = positive_ints(col_factors, name="col_factors")
    return _fast_rows(
        TTShape(
            num_embeddings=num_embeddings,
            embedding_dim=math.prod(col_factors),
            row_factors=balanced,
            col_factors=col_factors,
            tt_ranks=positive_ints(tt_ranks, name="tt_ranks"),
        )
    )


def factorize_columns(embedding_dim: int, *, num_cores: int = 3) -> tuple[int, ...]:
    """Returns ascending `col_factors` with the product `embedding_dim`, as balanced as there are.

    Columns cannot be padded, so a prime dimension gives ones.

    Raises:
        ValueError: if `embedding_dim` is not positive or `num_cores` is out of range.

    Example:
        >>> factorize_columns(16), factorize_columns(128), factorize_columns(7)
        ((2, 2, 4), (4, 4, 8), (1, 1, 7))
    """
    embedding_dim = _check(embedding_dim, num_cores=num_cores, name="embedding_dim")
    factors = _smallest_sum(embedding_dim, num_factors=num_cores, smallest=1)
    assert factors is not None  # (1, ..., 1, embedding_dim) always is one
    return factors


def make_shape(
    num_embeddings: int,
    embedding_dim: int,
    *,
    tt_ranks: Sequence[int],
    row_factors: Sequence[int] | None = None,
    col_factors: Sequence[int] | None = None,
    row_strategy: RowStrategy = "balanced",
) -> TTShape:
    """Returns the shape of a table with `len(tt_ranks) + 1` cores.

    Warns where the cores hold more bytes than the uncompressed table.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        tt_ranks: the inner ranks, 1 to 3 of them.
        row_factors: one per core; by default those of `factorize_rows`.
        col_factors: one per core; by default those of `factorize_columns`.
        row_strategy: how `factorize_rows` chooses `row_factors` where they are not given.

    Raises:
        ValueError: if a number is not positive, factors and ranks do not fit, or `row_factors`
            come with a strategy other than the default.

    Example:
        >>> make_shape(10_131_227, 16, tt_ranks=[32, 32]).num_parameters
        495360
    """
    tt_ranks = positive_ints(tt_ranks, name="tt_ranks")
    num_cores = len(tt_ranks) + 1
    if not MIN_CORES <= num_cores <= MAX_CORES:
        raise ValueError(
            f"tt_ranks must have {MIN_CORES - 1} to {MAX_CORES - 1} entries, got {tt_ranks}"
        )
    if col_factors is None:
        col_factors = factorize_columns(embedding_dim, num_cores=num_cores)
    if row_factors is None:
        row_factors = factorize_rows(
            num_embeddings,
            num_cores=num_cores,
            row_strategy=row_strategy,
            col_factors=col_factors,
            tt_ranks=tt_ranks,
        )
    elif row_strategy != "balanced":
        raise ValueError(
            f"row_strategy must be left out where row_factors are given, got {row_strategy!r}"
        )
    shape = TTShape(
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        row_factors=positive_ints(row_factors, name="row_factors"),
        col_factors=positive_ints(col_factors, name="col_factors"),
        tt_ranks=tt_ranks,
    )
    if core_bytes(shape) > dense_bytes(shape):
        warnings.warn(
            f"tt_ranks={shape.tt_ranks} make a table of {num_embeddings} x {embedding_dim} larger "
            f"than the dense one: {core_bytes(shape)} bytes of float32 cores against "
            f"{dense_bytes(shape)}",
            stacklevel=2,
        )
    return shape


def _balanced_rows(num_embeddings: int, *, num_cores: int) -> tuple[int, ...]:
    candidates = []
    for exponent in range(len(str(num_embeddings))):
        count = -(-num_embeddings // 10**exponent) * 10**exponent
        if count <= MAX_PADDING_RATIO * num_embeddings:
            factors = _balanced(count, num_factors=num_cores)
            if factors is not None:
                candidates.append(factors)
    if candidates:
        return min(candidates, key=_imbalance)
    count = num_embeddings
    while (found := _balanced(count, num_factors=num_cores)) is None:
        count += 1
    return found


def _fast_rows(balanced: TTShape) -> tuple[int, ...]:
    """The fast factors of the table that `balanced` is a shape of; see `factorize_rows`."""
    num_rows = expected_unique(BATCH_ROWS, balanced.num_embeddings)
    max_bytes = core_bytes(balanced)
    max_sum_bytes = max(MAX_CHUNK_SUM_BYTES, chunk_sum_bytes(balanced))
    best, best_cost = balanced, step_cost(balanced, num_rows=num_rows)
    for ratio in STEP_RATIOS:
        is_better = True
        while is_better:
            is_better = False
            for factors in _neighbours(best, ratio=ratio):
                if math.prod(factors) > MAX_PADDING_RATIO * balanced.num_embeddings:
                    continue
                shape = dataclasses.replace(balanced, row_factors=factors)
                if core_bytes(shape) > max_bytes or chunk_sum_bytes(shape) > max_sum_bytes:
                    continue
                cost = step_cost(shape, num_rows=num_rows)
                if cost < best_cost:
                    best, best_cost, is_better = shape, cost, True
    return best.row_factors


def _neighbours(shape: TTShape, *, ratio: float) -> Iterator[tuple[int, ...]]:
    """Leading factors each smaller, equal or larger by `ratio`, with the last one to fit."""
    choices = [
        sorted({max(1, round(m / ratio)), m, round(m * ratio)}) for m in shape.row_factors[:-1]
    ]
    for leading in itertools.product(*choices):
        if leading != shape.row_factors[:-1]:
            yield (*leading, -(-shape.num_embeddings // math.prod(leading)))


def _balanced(product: int, *, num_factors: int) -> tuple[int, ...] | None:
    """The best factors of `product`, or None if they are not within MAX_FACTOR_RATIO."""
    # The largest is at least the root, so none can be below the root over the ratio.
    smallest = -(-_integer_root(product, num_factors) // MAX_FACTOR_RATIO)
    factors = _smallest_sum(product, num_factors=num_factors, smallest=smallest)
    if factors is None or factors[-1] > MAX_FACTOR_RATIO * factors[0]:
        return None
    return factors


def _smallest_sum(product: int, *, num_factors: int, smallest: int) -> tuple[int, ...] | None:
    """The ascending factors of at least `smallest` with the smallest sum, or None.

    For one product the geometric mean is fixed: the smallest sum is the best balance.
    """
    if num_factors == 1:
        return (product,) if product >= smallest else None
    best: tuple[int, ...] | None = None
    for first in range(_integer_root(product, num_factors), smallest - 1, -1):
        if best is not None:
            # Equal factors after `first` would have the smallest sum, which grows as it falls.
            others = (product / first) ** (1.0 / (num_factors - 1))
            if first + (num_factors - 1) * others >= sum(best):
                break
        if product % first == 0:
            rest = _smallest_sum(product // first, num_factors=num_factors - 1, smallest=first)
            if rest is not None and (best is None or first + sum(rest) < sum(best)):
                best = (first, *rest)
    return best


def _imbalance(factors: tuple[int, ...]) -> float:
    """Arithmetic over geometric mean: 1 for equal factors, more for all others."""
    return sum(factors) / len(factors) / math.prod(factors) ** (1.0 / len(factors))


def _integer_root(value: int, degree: int) -> int:
    """The largest integer whose power `degree` is at most `value`."""
    root = round(value ** (1.0 / degree))
    while root**degree > value:
        root -= 1
    while (root + 1) ** degree <= value:
        root += 1
    return root


def _check(value: int, *, num_cores: int, name: str) -> int:
    if not MIN_CORES <= num_cores <= MAX_CORES:
        raise ValueError(f"num_cores must be {MIN_CORES} to {MAX_CORES}, got {num_cores}")
    return positive_int(value, name=name)
