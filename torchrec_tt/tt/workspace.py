"""What a call of the CPU operators allocates beyond what it takes and returns, by arithmetic."""

import math
from dataclasses import dataclass

from torchrec_tt.tt.cost import num_chunks, round_up
from torchrec_tt.tt.shape import TTShape

ROWS_AT_ONCE, HEAD_ROWS_AT_ONCE = 16, 64  # kRowsAtOnce, kHeadRowsAtOnce in csrc/cpu/kernels.h


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
    """Returns the workspace of a CPU call on one table: nothing in it is of size indices x rank^2.

    CUDA keeps more: a forward `4 N D` of the widest D of the call, as the host does not know U.

    With N indices, U distinct rows, Q distinct prefixes, H heads, W threads, c chunks (see
    `num_chunks`), r the last rank rounded up to the vector width, and a float of 4 bytes:

    - plan: keys twice, a position, digit counts: `N (2 key + 4)`, a key of 4 bytes or, from 2^32
      padded rows on, 8; and `8 * 2^11` for each of W threads;
    - both others: offsets `8 (B + 1)`; the last core transposed, `4 m_last n_last r`, where
      `2 U >= m_last`; for 4 cores the heads and where to find them;
    - forward: rows `4 U D`, beside scratch for W workers or scales `4 N`;
    - backward: where gradients lie, `16 N` at first and then `8 N`, scales `4 N`; `c` times the
      sums `4 (m_head s_head + m_last n_last r + 2 s_mid)` (slice sizes; for 2 cores the heads
      once) with a flag of a byte for each slice, and scratch for W workers.

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
        + max(
            8 * num_indices,
            scales * (1 + has_weights_grad) + sums + max(backward_scratch, outer_grads),
        ),
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
    rank, ld_head = (round_up(width, vector_bytes // 4) for width in (r[-1], r_head))
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
