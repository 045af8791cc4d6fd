"""What a TT table costs, by arithmetic alone: bytes, flops and expected distinct values."""

import math
from dataclasses import dataclass

from torchrec_tt.tt.shape import TTShape

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupFlops:
    """Floating point operations of one batch: a multiply and an add are two."""

    forward: float
    backward: float


def core_bytes(shape: TTShape, *, element_size: int = 4) -> int:
    """Returns the bytes of the cores, `sum_k m_k r_k n_k r_{k+1}` elements."""
    return shape.num_parameters * element_size


def dense_bytes(shape: TTShape, *, element_size: int = 4) -> int:
    """Returns the bytes of the uncompressed table, `num_embeddings * embedding_dim` elements."""
    return shape.num_embeddings * shape.embedding_dim * element_size


def optimizer_state_bytes(shape: TTShape, *, optimizer: str, element_size: int = 4) -> int:
    """Returns the bytes of the optimizer's state for the cores, step counters left out.

    SGD keeps none, Adagrad one element per core element, row-wise Adagrad one per core row (a row
    of core k is the slice of one digit, so `sum_k m_k`), Adam two per core element.

    Raises:
        ValueError: if the optimizer is none of these.
    """
    num_elements = {
        "sgd": 0,
        "adagrad": shape.num_parameters,
        "rowwise_adagrad": sum(shape.row_factors),
        "adam": 2 * shape.num_parameters,
    }
    if optimizer not in num_elements:
        raise ValueError(f"optimizer must be one of {OPTIMIZERS}, got {optimizer!r}")
    return num_elements[optimizer] * element_size


def lookup_flops(
    shape: TTShape,
    *,
    num_rows: float,
    num_prefixes: float,
    num_heads: float | None = None,
) -> LookupFlops:
    """Returns the flops of a batch that is deduplicated by row and by prefix, pooling left out.

    A row is its prefix `P`, the product of all cores but the last, times a slice of the last:
    `[D / n_last, r_last] @ [r_last, n_last]`, so `2 D r_last` flops per distinct row. A prefix is

    - 2 cores: a slice of core 0; nothing to compute;
    - 3 cores: `[n_0, r_1] @ [r_1, n_1 r_2]`, `2 n_0 r_1 n_1 r_2` per distinct (i_0, i_1);
    - 4 cores: the same product, here called a head, per distinct (i_0, i_1), and
      `[n_0 n_1, r_2] @ [r_2, n_2 r_3]`, `2 n_0 n_1 r_2 n_2 r_3` per distinct (i_0, i_1, i_2).

    Backward makes two products of the same size for each one of forward (a gradient for either
    factor) and computes heads and prefixes again: `2 rows + 3 (prefixes + heads)`.

    Args:
        shape: the table.
        num_rows: distinct rows of the batch.
        num_prefixes: distinct prefixes of the batch.
        num_heads: distinct heads, read for 4 cores only; by default as many as there can be, the
            smaller of `num_prefixes` and `m_0 m_1`.
    """
    n, r, m = shape.col_factors, shape.tt_ranks, shape.row_factors
    row_flops = 2.0 * shape.embedding_dim * r[-1] * num_rows
    product_flops = 0.0
    if shape.num_cores == 3:
        product_flops = 2.0 * n[0] * r[0] * n[1] * r[1] * num_prefixes
    elif shape.num_cores == 4:
        if num_heads is None:
            num_heads = min(num_prefixes, m[0] * m[1])
        product_flops = 2.0 * n[0] * r[0] * n[1] * r[1] * num_heads
        product_flops += 2.0 * n[0] * n[1] * r[1] * n[2] * r[2] * num_prefixes
    return LookupFlops(
        forward=row_flops + product_flops, backward=2.0 * row_flops + 3.0 * product_flops
    )


def expected_unique(num_draws: float, num_values: int) -> float:
    """Returns the expected number of distinct values in uniform draws with replacement.

    A value is missed by all `k` draws with probability `(1 - 1/n)^k`, so `n (1 - (1 - 1/n)^k)` are
    seen. It is computed through `log1p` and `expm1`: for a large `n`, `1 - 1/n` would round to 1.
    A fraction of a draw sees at most that fraction of a value.

    Raises:
        ValueError: if `num_draws` is negative or `num_values` is not positive.
    """
    if num_draws < 0:
        raise ValueError(f"num_draws must not be negative, got {num_draws}")
    if num_values < 1:
        raise ValueError(f"num_values must be positive, got {num_values}")
    if num_values == 1:
        return min(num_draws, 1.0)
    seen = -num_values * math.expm1(num_draws * math.log1p(-1.0 / num_values))
    return min(seen, float(num_draws))
