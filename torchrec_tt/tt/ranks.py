"""Which ranks a table of given factors has a use for."""

import dataclasses
import math
import warnings

from torchrec_tt.tt.shape import TTShape


def useful_ranks(shape: TTShape) -> tuple[int, ...]:
    """Returns the shape's ranks, clipped to those above which no table has a better fit.

    The k-th unfolding has as many rows and columns as digits make up on its two sides; and a core's
    slices, put below each other, need no more columns than rows.
    """
    ranks = [1, *shape.tt_ranks, 1]
    sizes = [m * n for m, n in zip(shape.row_factors, shape.col_factors, strict=True)]
    prefixes = [
        -(-shape.num_embeddings // math.prod(shape.row_factors[k:]))
        for k in range(1, shape.num_cores)
    ]
    for k, count in enumerate(prefixes, start=1):
        ranks[k] = min(
            ranks[k], ranks[k - 1] * sizes[k - 1], count * math.prod(shape.col_factors[:k])
        )
    for k in range(shape.num_cores - 1, 0, -1):
        ranks[k] = min(ranks[k], ranks[k + 1] * sizes[k])
    for k in range(1, shape.num_cores):
        ranks[k] = min(ranks[k], ranks[k - 1] * sizes[k - 1])
    return tuple(ranks[1:-1])


def clipped(shape: TTShape) -> TTShape:
    """Returns the shape with useful ranks; warns if they are others than the given ones."""
    useful = useful_ranks(shape)
    if useful != shape.tt_ranks:
        warnings.warn(
            f"tt_ranks={shape.tt_ranks} are more than a table of {shape.num_embeddings} x "
            f"{shape.embedding_dim} in row_factors={shape.row_factors} can use; "
            f"{useful} are taken",
            stacklevel=3,
        )
    return dataclasses.replace(shape, tt_ranks=useful)
