"""Orders of a table's rows in which its Tensor-Train cores lose less."""

import torch
from torch import Tensor
from torch.nn import functional

from torchrec_tt.tt.shape import positive_int

_CHUNK_IDS = 1 << 20  # described at once


def frequency_order(counts: Tensor) -> Tensor:  # [num_embeddings] -> int64 [num_embeddings]
    """Returns the ids from the most to the least frequent; equals keep their order.

    The table to compress is `table[order]`; see `new_ids` for the ids to look up in it.

    Args:
        counts: how often each id was seen.

    Raises:
        ValueError: if the counts are no vector, or not finite.

    Example:
        >>> frequency_order(torch.tensor([1, 5, 1, 9]))
        tensor([3, 1, 0, 2])
    """
    if counts.dim() != 1:
        raise ValueError(f"counts must have 1 dimension, got {list(counts.shape)}")
    _check_finite(counts, name="counts")
    return counts.argsort(descending=True, stable=True)


def similarity_order(table: Tensor, *, group_size: int) -> Tensor:  # int64 [num_embeddings]
    """Returns the ids with similar rows next to each other.

    The rows are halved at the median of their first principal component, and the halves likewise,
    until a part has at most `group_size` rows. The rows of one last digit, `row_factors[-1]` of
    them, then are much alike, and the last core needs few ranks for what they have in common.
    Takes a copy of one part's rows in float64, at first of the whole table.

    Args:
        table: the rows, [num_embeddings, D].
        group_size: rows of a part that is not halved; `row_factors[-1]` is a good choice.

    Raises:
        ValueError: if the table is no matrix of finite numbers, or `group_size` not positive.

    Example:
        >>> similarity_order(torch.tensor([[0.0], [9.0], [1.0], [8.0]]), group_size=2).shape
        torch.Size([4])
    """
    if table.dim() != 2:
        raise ValueError(f"table must have 2 dimensions, got {list(table.shape)}")
    group_size = positive_int(group_size, name="group_size")
    _check_finite(table, name="table")
    parts = [torch.arange(len(table), device=table.device)]
    done = []
    while parts:
        part = parts.pop()
        if len(part) <= group_size:
            done.append(part)
            continue
        part = part[_first_component(table[part].double()).argsort(stable=True)]
        half = len(part) // 2
        parts += [part[half:], part[:half]]  # the lower half is taken first
    return torch.cat(done)


def co_access_order(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [B + 1]
    *,
    num_embeddings: int,
    group_size: int,
    num_directions: int = 32,
    seed: int = 0,
) -> Tensor:  # int64 [num_embeddings]
    """Returns the ids with those next to each other that come in the same bags.

    An id is described by the ids it came with: the sum of their random directions, to length 1.
    Inner products of such sums estimate how many companions two ids share (random projection,
    Johnson and Lindenstrauss, 1984). Ids so described are put in their `similarity_order`. Takes
    two [num_embeddings, num_directions] in float32 and the copy of `similarity_order`.

    Args:
        indices: ids of past bags; bags of one id say nothing.
        offsets: where bags begin in `indices`, and where the last ends.
        num_embeddings: rows of the table.
        group_size: as of `similarity_order`.
        num_directions: of the projection.
        seed: of the random directions.

    Raises:
        ValueError: for ids outside the table or offsets that do not split the ids into bags.

    Example:
        >>> ids, offsets = torch.tensor([0, 2, 1, 3, 0, 2]), torch.tensor([0, 2, 4, 6])
        >>> co_access_order(ids, offsets, num_embeddings=4, group_size=2).sort().values
        tensor([0, 1, 2, 3])
    """
    num_embeddings = positive_int(num_embeddings, name="num_embeddings")
    num_directions = positive_int(num_directions, name="num_directions")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < num_embeddings:
        raise ValueError(
            f"indices must be in [0, {num_embeddings}), got {int(indices.min())} to "
            f"{int(indices.max())}"
        )
    lengths = offsets.diff()
    ends = offsets[[0, -1]].tolist() if offsets.numel() else []
    if ends != [0, indices.numel()] or bool((lengths < 0).any()):
        raise ValueError(
            f"offsets must rise from 0 to the {indices.numel()} indices, got {offsets}"
        )
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(num_embeddings, num_directions, generator=generator)
    directions = directions.to(indices.device)
    indices, offsets = indices.long(), offsets.long()
    bags = functional.embedding_bag(
        indices, directions, offsets, mode="sum", include_last_offset=True
    )
    companions = torch.zeros_like(directions)
    for begin in range(0, len(indices), _CHUNK_IDS):
        ids = indices[begin : begin + _CHUNK_IDS]
        place = torch.arange(begin, begin + len(ids), device=offsets.device)
        bag = torch.searchsorted(offsets, place, right=True) - 1
        companions.index_add_(0, ids, bags[bag] - directions[ids])
    return similarity_order(functional.normalize(companions), group_size=group_size)


def new_ids(order: Tensor) -> Tensor:  # int64 [num_embeddings] each
    """Returns where each id went: `table[order][new_ids(order)[i]]` is `table[i]`.

    Raises:
        ValueError: if `order` is no permutation.

    Example:
        >>> new_ids(torch.tensor([3, 1, 0, 2]))
        tensor([2, 1, 3, 0])
    """
    identity = torch.arange(order.numel(), device=order.device)
    if order.dim() != 1 or not torch.equal(order.sort().values.long(), identity):
        raise ValueError(f"order must be a permutation of its {order.numel()} ids, got {order}")
    places = torch.empty_like(identity)
    places[order.long()] = identity
    return places


def _first_component(rows: Tensor) -> Tensor:  # float64 [N, D] -> [N]
    centred = rows - rows.mean(0)
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    # An eigenvector's sign is arbitrary: fixed, so that the order is the same everywhere.
    return centred @ (direction * direction[direction.abs().argmax()].sign())


def _check_finite(values: Tensor, *, name: str) -> None:
    bad = values.numel() - int(values.isfinite().sum())
    if bad:
        raise ValueError(f"{name} must be finite, got {bad} NaN or infinite values")
