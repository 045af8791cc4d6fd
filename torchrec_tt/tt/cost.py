"""What a TT table costs, by arithmetic alone: bytes, flops and expected distinct values."""

import math
from dataclasses import dataclass

from torchrec_tt.tt.shape import TTShape

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
MAX_CHUNKS = 16  # of a table's prefixes in one call: kMaxChunks in csrc/cpu/call.cpp
CHUNK_FLOPS = 24e6  # of the forward, about those of a chunk: kFlopsPerChunk there
FLOPS_PER_BYTE = 8  # what the time to move a byte would compute: 60 GFLOP/s beside 8 GB/s
CACHE_BYTES = 2**19  # of one processor core, faster than that


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


def num_chunks(
    shape: TTShape, *, num_rows: float, num_prefixes: float, vector_bytes: int = 32
) -> int:
    """Returns into how many chunks of prefixes a call of the CPU kernels cuts a table.

    They are of about `CHUNK_FLOPS` each in the forward, and `MAX_CHUNKS` at most; heads and the
    ranks' padding to the vector width are counted as the kernels count them.
    """
    rank = round_up(shape.tt_ranks[-1], vector_bytes // 4)
    flops = 2.0 * shape.embedding_dim * rank * num_rows
    if shape.num_cores > 2:
        rows_of_prefix = shape.embedding_dim // shape.col_factors[-1]
        flops += 2.0 * rows_of_prefix * shape.tt_ranks[-2] * rank * num_prefixes
    return max(1, min(int(flops / CHUNK_FLOPS), MAX_CHUNKS, int(num_prefixes)))


def chunk_sum_bytes(shape: TTShape) -> int:
    """Returns the float32 bytes of all head and last slices, whose gradients each chunk sums.

    A head is what comes before the last but one core: core 0, or with 4 cores the products of
    cores 0 and 1; with 2 cores it is core 0.
    """
    slices = _slices(shape)
    return slices.m_head * slices.head_bytes + shape.row_factors[-1] * slices.last_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Flops of a training step's products, and bytes of cores and of their gradients it moves."""

    forward_flops: float
    forward_bytes: float
    backward_flops: float
    backward_bytes: float
    update_bytes: float


def step_work(
    shape: TTShape, *, num_rows: float, num_prefixes: float | None = None, is_dense: bool = False
) -> StepWork:
    """Returns the work of a training step on `num_rows` distinct, scattered rows.

    What every choice of `row_factors` costs alike (sorting, pooling) is left out. The flops are
    those of `lookup_flops`. The bytes are those of the float32 CPU kernels, `u` being short for
    `expected_unique`, `s_head`, `s_mid` and `s_last` the bytes of a slice and `c` the number of
    chunks:

    - forward reads every mid slice met, `s_mid u(num_prefixes, m_mid)`, and transposes the last
      core, `2 s_last m_last`;
    - backward does so again, and clears and reads the mid gradients: `3 s_mid u(..)` in all;
    - a head or last slice has a gradient in every chunk that meets it, which backward clears, reads
      and adds up: `3 s_last c u(num_rows / c, m_last)`, `3 s_head c u(num_prefixes / c, m_head)`;
    - a row reads its last slice twice and adds to its gradient, and so does a prefix with its head;
      of `4 (s_last num_rows + s_head num_prefixes)`, a quarter in forward, the share beyond the
      cache counts: `1 - CACHE_BYTES / (2 chunk_sum_bytes)`, slices and gradients having equal
      parts;
    - the update steps the slices met: `s_mid u(num_prefixes, m_mid) + 3 s_last u(num_rows, m_last)`
      or, with dense gradients, clears these, reads them and steps everything: 4 times the cores.

    Args:
        shape: the table.
        num_rows: distinct rows of the batch that the cores make.
        num_prefixes: distinct prefixes; by default `u(num_rows, prefixes of the table)`.
        is_dense: whether the update has dense gradients, as replicated cores do.
    """
    s, m_last = _slices(shape), shape.row_factors[-1]
    if num_prefixes is None:
        num_prefixes = expected_unique(num_rows, math.prod(shape.row_factors[:-1]))
    flops = lookup_flops(shape, num_rows=num_rows, num_prefixes=num_prefixes)
    chunks = num_chunks(shape, num_rows=num_rows, num_prefixes=num_prefixes)
    beyond_cache = max(0.0, 1 - CACHE_BYTES / (2 * chunk_sum_bytes(shape)))
    mid_bytes = s.mid_bytes * expected_unique(num_prefixes, s.m_mid)
    slices_bytes = (s.last_bytes * num_rows + s.head_bytes * num_prefixes) * beyond_cache
    sums_bytes = s.last_bytes * chunks * expected_unique(num_rows / chunks, m_last)
    sums_bytes += s.head_bytes * chunks * expected_unique(num_prefixes / chunks, s.m_head)
    update_bytes = mid_bytes + 3 * s.last_bytes * expected_unique(num_rows, m_last)
    return StepWork(
        forward_flops=flops.forward,
        forward_bytes=mid_bytes + 2 * s.last_bytes * m_last + slices_bytes,
        backward_flops=flops.backward,
        backward_bytes=3 * mid_bytes
        + 2 * s.last_bytes * m_last
        + 3 * sums_bytes
        + 3 * slices_bytes,
        update_bytes=4 * core_bytes(shape) if is_dense else update_bytes,
    )


def step_cost(shape: TTShape, *, num_rows: float) -> float:
    """Returns the work of a training step as one number, `flops + FLOPS_PER_BYTE * bytes`."""
    work = step_work(shape, num_rows=num_rows)
    num_bytes = work.forward_bytes + work.backward_bytes + work.update_bytes
    return work.forward_flops + work.backward_flops + FLOPS_PER_BYTE * num_bytes


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slices:
    """Numbers of head and mid slices of a table; float32 bytes of head, mid and last ones."""

    m_head: int
    m_mid: int
    head_bytes: int
    mid_bytes: int
    last_bytes: int


def _slices(shape: TTShape) -> _Slices:
    n, r, m = shape.col_factors, shape.tt_ranks, shape.row_factors
    first_mid = max(1, shape.num_cores - 2)  # with 2 cores there is none, and core 0 is the head
    return _Slices(
        m_head=math.prod(m[:first_mid]),
        m_mid=math.prod(m[first_mid:-1]),
        head_bytes=4 * math.prod(n[:first_mid]) * r[first_mid - 1],
        mid_bytes=4 * r[-2] * n[-2] * r[-1] if shape.num_cores > 2 else 0,
        last_bytes=4 * r[-1] * n[-1],
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
