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
