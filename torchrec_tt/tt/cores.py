"""What a TT table is, in plain PyTorch: the oracle every kernel is tested against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_tt.tt.shape import TTShape


def rows(
    cores: Sequence[Tensor],  # d of [m_k, r_k * n_k * r_{k+1}]
    indices: Tensor,  # [N] integer
    *,
    shape: TTShape,
) -> Tensor:  # [N, D]
    """Returns rows `indices` of the table, computed one by one and differentiable in the cores.

    Example:
        >>> shape = TTShape(num_embeddings=6, embedding_dim=4, row_factors=(2, 3),
        ...                 col_factors=(2, 2), tt_ranks=(3,))
        >>> cores = [torch.ones(s) for s in shape.core_shapes]
        >>> rows(cores, torch.tensor([5]), shape=shape)
        tensor([[3., 3., 3., 3.]])
    """
    num_indices = indices.numel()
    indices = indices.reshape(-1).long()  # the product of the row factors may not fit into int32
    result = cores[0].new_ones(num_indices, 1, 1)  # [N, columns so far, r_k]
    place = shape.num_rows_padded
    for core, m, (r_in, n, r_out) in zip(cores, shape.row_factors, shape.slice_shapes, strict=True):
        place //= m
        digit = indices // place % m
        piece = core[digit].view(num_indices, r_in, n * r_out)
        result = torch.bmm(result, piece).view(num_indices, result.shape[1] * n, r_out)
    return result.view(num_indices, shape.embedding_dim)


def dense(cores: Sequence[Tensor], *, shape: TTShape) -> Tensor:  # [num_embeddings, D]
    """Returns the whole table, differentiable in the cores."""
    result = cores[0].new_ones(1, 1, 1)  # [rows so far, columns so far, r_k]
    for core, m, (r_in, n, r_out) in zip(cores, shape.row_factors, shape.slice_shapes, strict=True):
        i, j = result.shape[:2]
        piece = core.view(m, r_in, n, r_out)
        result = torch.einsum("ijr,mrns->imjns", result, piece).reshape(i * m, j * n, r_out)
    return result.view(-1, shape.embedding_dim)[: shape.num_embeddings]


def moments(cores: Sequence[Tensor], *, shape: TTShape) -> tuple[float, float]:
    """Returns the float64 sums of the entries and of their squares over the valid rows.

    The table is never made. From the last core to the first, with S and M the sums of `x` and of
    `x x^T` over all rows and columns `x` of the product of the cores to the right,

        S <- sum_{i,j} G[i, j] S,    M <- sum_{i,j} G[i, j] M G[i, j]^T

    costs `m n r^3`. The rows up to the last valid one, whose digits are `t_k`, are those with
    digit k below `t_k` and anything to the right, and those with digit k equal to `t_k` and up to
    the last valid one to the right: a second pair of sums, carried along.
    """
    first = cores[0].new_ones(1, dtype=torch.float64)
    every = upto = (first, first.view(1, 1))
    last_row = shape.num_embeddings - 1
    for core, m, (r_in, n, r_out) in reversed(
        list(zip(cores, shape.row_factors, shape.slice_shapes, strict=True))
    ):
        last_row, digit = divmod(last_row, m)
        slices = core.double().view(m, r_in, n, r_out)
        below = _absorb(slices[:digit], every)
        at = _absorb(slices[digit : digit + 1], upto)
        beyond = _absorb(slices[digit:], every)
        every = (below[0] + beyond[0], below[1] + beyond[1])
        upto = (below[0] + at[0], below[1] + at[1])
    return upto[0].item(), upto[1].item()


def _absorb(
    slices: Tensor,  # [m, r_k, n, r_{k+1}]
    sums: tuple[Tensor, Tensor],  # [r_{k+1}], [r_{k+1}, r_{k+1}]
) -> tuple[Tensor, Tensor]:  # [r_k], [r_k, r_k]
    """The sums with one more core on the left."""
    total, squares = sums
    by_digit = torch.bmm((slices @ squares).flatten(2), slices.flatten(2).mT)  # [m, r_k, r_k]
    return slices.sum((0, 2)) @ total, by_digit.sum(0)


def check_cores(cores: Sequence[Tensor], *, shape: TTShape) -> None:
    """Raises ValueError if the cores have other shapes."""
    found = tuple(tuple(core.shape) for core in cores)
    if found != shape.core_shapes:
        raise ValueError(f"cores must have the shapes {shape.core_shapes}, got {found}")
