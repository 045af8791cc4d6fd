"""What a TT table costs, by arithmetic alone: bytes, flops and expected distinct values."""

import math
from dataclasses import dataclass

from torchrec_tt.tt.shape import TTShape

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
MAX_CHUNKS = 16  # of a table's prefixes in one call: kMaxChunks in csrc/cpu/call.cpp
CHUNK_FLOPS = 24e6  # of the forward, about those of a chunk: kFlopsPerChunk there
ROWS_AT_ONCE, HEAD_ROWS_AT_ONCE = 16, 32  # kRowsAtOnce, kHeadRowsAtOnce in csrc/cpu/kernels.h
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
    rank = _round_up(shape.tt_ranks[-1], vector_bytes // 4)
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


def step_cost(shape: TTShape, *, num_rows: float) -> float:
    """Returns what a training step on `num_rows` distinct, scattered rows costs, in flops.

    `flops + FLOPS_PER_BYTE * bytes` of the float32 CPU kernels, without what every choice of
    `row_factors` costs alike (sorting, pooling). The flops are those of `lookup_flops` with
    `num_prefixes = u(num_rows, prefixes of the table)`, `u` short for `expected_unique`. The bytes,
    `s_head`, `s_mid` and `s_last` being those of a slice and `c` the number of chunks:

    - every mid slice met is read in forward and in backward, its gradient is cleared and read, and
      it is stepped: `5 s_mid u(num_prefixes, m_mid)`;
    - a head or last slice has a gradient in every chunk that meets it, which is cleared, read and
      added up: `3 s_last c u(num_rows / c, m_last)`, `3 s_head c u(num_prefixes / c, m_head)`;
    - the last core is transposed in forward and in backward, `4 s_last m_last`, and the slices met
      are stepped, `3 s_last u(num_rows, m_last)`;
    - a row reads its last slice twice and adds to its gradient, and so does a prefix with its head;
      of `4 (s_last num_rows + s_head num_prefixes)` the share beyond the cache counts, which is
      `1 - CACHE_BYTES / (2 chunk_sum_bytes)`, slices and gradients having equal parts.
    """
    s, m_last = _slices(shape), shape.row_factors[-1]
    num_prefixes = expected_unique(num_rows, math.prod(shape.row_factors[:-1]))
    flops = lookup_flops(shape, num_rows=num_rows, num_prefixes=num_prefixes)
    chunks = num_chunks(shape, num_rows=num_rows, num_prefixes=num_prefixes)
    beyond_cache = max(0.0, 1 - CACHE_BYTES / (2 * chunk_sum_bytes(shape)))
    num_bytes = (
        5 * s.mid_bytes * expected_unique(num_prefixes, s.m_mid)
        + 3 * s.last_bytes * chunks * expected_unique(num_rows / chunks, m_last)
        + 3 * s.head_bytes * chunks * expected_unique(num_prefixes / chunks, s.m_head)
        + 4 * s.last_bytes * m_last
        + 3 * s.last_bytes * expected_unique(num_rows, m_last)
        + 4 * (s.last_bytes * num_rows + s.head_bytes * num_prefixes) * beyond_cache
    )
    return flops.forward + flops.backward + FLOPS_PER_BYTE * num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Bytes that the CPU operators allocate for one table beyond what they take and return.

    Attributes:
        kept: the plan's tensors, which live from the forward to the end of the backward.
        plan: peak while a batch is sorted.
        forward: peak while rows are looked up.
        backward: peak while gradients are made, with or without a step.
    """

    kept: int
    plan: int
    forward: int
    backward: int


def workspace_bytes(
    shape: TTShape,
    *,
    num_indices: int,
    num_rows: int,
    num_prefixes: int,
    num_bags: int,
    num_heads: int = 0,
    num_threads: int = 1,
    is_scaled: bool = False,
    has_weights_grad: bool = False,
    core_element_size: int = 4,
    vector_bytes: int = 32,
) -> Workspace:
    """Returns the workspace of a call on one table: nothing in it is of size indices x rank^2.

    With N indices, U distinct rows, Q distinct prefixes, H heads, W threads, c chunks (see
    `num_chunks`), r the last rank rounded up to the vector width, and a float of 4 bytes:

    - plan: keys twice, a position, digit counts: `N (2 key + 4)`, a key of 4 bytes or, from 2^32
      padded rows on, 8; and `8 * 2^11` for each of W threads;
    - both others: offsets `8 (B + 1)`; the last core transposed, `4 m_last n_last r`, where
      `2 U >= m_last`; for 4 cores the heads and where to find them;
    - forward: rows `4 U D`, beside scratch for W workers or scales `4 N`;
    - backward: an index's place `8 N`, scales `4 N`; `c` times the sums
      `4 (m_head s_head + m_last n_last r + 2 s_mid)` (slice sizes; for 2 cores the heads once)
      with a flag of a byte for each slice, and scratch for W workers.

    Args:
        shape: the table.
        num_indices: of the batch.
        num_rows: distinct rows of the batch.
        num_prefixes: distinct prefixes of the batch.
        num_bags: bags of the batch.
        num_heads: distinct heads of the batch, for 4 cores.
        num_threads: that may take part.
        is_scaled: whether there are per-sample weights, or pooling is "mean".
        has_weights_grad: whether the weights get a gradient, with pooling "mean".
        core_element_size: 4 for float32 cores, 2 for 16-bit ones, which scratch widens.
        vector_bytes: of the instruction set: 16 for generic, 32 for avx2, 64 for avx512.
    """
    sizes = _slice_sizes(shape, vector_bytes=vector_bytes)
    chunks = num_chunks(
        shape, num_rows=num_rows, num_prefixes=num_prefixes, vector_bytes=vector_bytes
    )
    workers = min(chunks, num_threads)
    widened = sizes.widened if core_element_size == 2 else 0
    key = 4 if shape.num_rows_padded < 2**32 else 8
    m_last, four = shape.row_factors[-1], shape.num_cores == 4
    call = 8 * (num_bags + 1)
    if 2 * num_rows >= m_last:
        call += 4 * m_last * sizes.last
    if four:
        places = 4 * 2 ** math.ceil(math.log2(num_prefixes)) if num_prefixes else 0
        call += 4 * num_heads * sizes.head + 8 * num_prefixes + places
    heads = num_heads if four else shape.row_factors[0]
    scales = 4 * num_indices if is_scaled else 0
    scratch = sizes.at_once * (sizes.head + sizes.product) + sizes.mid + sizes.last + widened
    forward_scratch = 4 * workers * scratch
    # With 2 cores a chunk has heads of its own; memory that is never touched is never there.
    head_sums = (1 if shape.num_cores == 2 else chunks) * heads * sizes.head
    sums = 4 * (head_sums + chunks * (m_last * sizes.last + 2 * sizes.mid))
    sums += chunks * (heads + m_last)
    backward_scratch = (
        4
        * workers
        * (
            scratch
            + sizes.at_once * (sizes.product + sizes.grad_head)
            + sizes.mid
            + sizes.mid_transposed
            + ROWS_AT_ONCE * (shape.embedding_dim + sizes.last)
            + shape.embedding_dim
        )
    )
    outer_grads = 4 * sum(math.prod(core) for core in shape.core_shapes[:2]) if four else 0
    return Workspace(
        kept=24 * num_indices + 40,
        plan=num_indices * (2 * key + 4) + 8 * 2**11 * num_threads,
        forward=call + 4 * num_rows * shape.embedding_dim + max(forward_scratch, scales),
        backward=call
        + 8 * num_indices
        + scales * (1 + has_weights_grad)
        + sums
        + max(backward_scratch, outer_grads),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SliceSizes:
    """Elements of slices and of a prefix's product, ranks padded as the kernels pad them."""

    head: int
    mid: int
    last: int
    product: int
    grad_head: int
    mid_transposed: int
    at_once: int  # prefixes that are taken together
    widened: int  # to float32, of cores of 16 bits


def _slice_sizes(shape: TTShape, *, vector_bytes: int) -> _SliceSizes:
    n, r, has_mid = shape.col_factors, shape.tt_ranks, shape.num_cores > 2
    r_head, n_mid = (r[-2], n[-2]) if has_mid else (r[-1], 1)
    rank, ld_head = (_round_up(width, vector_bytes // 4) for width in (r[-1], r_head))
    n_head = shape.embedding_dim // (n_mid * n[-1])
    return _SliceSizes(
        head=n_head * r_head,
        mid=r_head * n_mid * rank,
        last=n[-1] * rank,
        product=n_head * n_mid * rank,
        grad_head=n_head * ld_head,
        mid_transposed=n_mid * rank * ld_head,
        at_once=max(4, HEAD_ROWS_AT_ONCE // n_head),
        widened=r_head * n_mid * r[-1] + r[-1] * n[-1],
    )


def _round_up(value: int, multiple: int) -> int:
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
