"""What a cache of rows takes, by arithmetic alone: slots and bytes."""

import math
from dataclasses import dataclass

from torchrec_tt.tt.cost import OPTIMIZERS

WAYS = 8  # slots of a set: kWays in csrc/row_tags.h
CELLS_PER_SLOT = 2  # of the counter
BOOKKEEPING_BYTES = 11 * 8  # statistics and schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCacheBytes:
    """Bytes of the cache of one table on one rank; nothing is of the size of the table.

    Attributes:
        rows: C slots of `embedding_dim` elements.
        optimizer_state: of the rows.
        tags: which row a slot holds, 8 bytes a slot.
        heats: how often it was looked up, 4 bytes a slot.
        counter: of the rows that are not cached: 2 cells a slot, of 8 bytes for the id and 4 for
            how often it was looked up.
        bookkeeping: statistics, schedule and the optimizer's step, whatever the capacity.
    """

    rows: int
    optimizer_state: int
    tags: int
    heats: int
    counter: int
    bookkeeping: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__slots__)


def num_slots(num_rows: int) -> int:
    """Returns the slots of a cache for `num_rows` rows: whole sets of 8."""
    return -(-num_rows // WAYS) * WAYS


def num_slots_of_ratio(load_factor: float, *, block_size: int) -> int:
    """Returns the slots of a cache for this part of a shard's rows, rounded up."""
    return num_slots(math.ceil(load_factor * block_size))


def row_cache_bytes(
    slots: int,
    embedding_dim: int,
    *,
    optimizer: str,
    element_size: int = 4,
    has_step: bool = False,
) -> RowCacheBytes:
    """Returns the bytes of a cache of `slots` slots.

    The optimizer's state is float32, as FBGEMM's of rows: per slot nothing for sgd, one number for
    rowwise_adagrad, `embedding_dim` of them for adagrad and twice as many for adam.

    Args:
        slots: a multiple of 8.
        embedding_dim: of the rows.
        optimizer: of the rows.
        element_size: 4 for float32 rows, 2 for 16-bit ones.
        has_step: whether steps are counted: for adam, and where 16-bit rows are rounded
            stochastically.

    Raises:
        ValueError: for an unknown optimizer.
    """
    per_slot = {
        "sgd": 0,
        "adagrad": embedding_dim,
        "rowwise_adagrad": 1,
        "adam": 2 * embedding_dim,
    }
    if optimizer not in per_slot:
        raise ValueError(f"optimizer must be one of {OPTIMIZERS}, got {optimizer!r}")
    return RowCacheBytes(
        rows=slots * embedding_dim * element_size,
        optimizer_state=slots * per_slot[optimizer] * 4,
        tags=slots * 8,
        heats=slots * 4,
        counter=slots * CELLS_PER_SLOT * (8 + 4),
        bookkeeping=BOOKKEEPING_BYTES + 8 * has_step,
    )
