"""Counts how hot rows are, and chooses those that a cache keeps: operators, wrappers and fakes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_tt.ops.library import operators, register_fake
from torchrec_tt.ops.lookup import Lookup


def count_rows(
    plan: list[Tensor],
    heats: Sequence[Tensor],  # per table [C] float32; numel 0: it has no cache
    counter_ids: Sequence[Tensor],  # per table [K] int64, -1 where empty
    counter_heats: Sequence[Tensor],  # per table [K] float32
    statistics: Sequence[Tensor],  # per table int64: hits, misses, unique misses, ...
    *,
    lookup: Lookup,
    clocks: Sequence[int],  # per table: 0 counts lookups (lfu), others note the time (lru)
) -> None:
    """Counts a batch's hits in their slots and its misses in the counters, all in place.

    A counter is a sketch of buckets of 8 cells, of which an id chooses one. There a row that is in
    no cell takes its lookups off the coldest cell, and the cell itself when nothing is left of it.
    With clocks the cell of the longest time makes way instead. The result depends on the plan
    alone, not on threads or the instruction set.

    Reference:
        Misra, Gries, "Finding repeated elements", 1982; Zhang et al., "CAFE: Towards Compact,
        Adaptive, and Fast Embedding for Large-scale Recommendation Models", SIGMOD 2024,
        section 3.2, for the buckets.
    """
    operators().count_rows(
        plan, lookup.encoded_tables, heats, counter_ids, counter_heats, statistics, clocks
    )


def place_rows(
    ids: Tensor,  # [C] int64, -1 where empty; written
    heats: Tensor,  # [C] float32; written
    counter_ids: Tensor,  # [K] int64; placed rows leave
    counter_heats: Tensor,  # [K] float32
    *,
    ratio: float,
    margin: float,
) -> tuple[Tensor, Tensor, Tensor]:  # each [M]: int64, int64, float32
    """Moves the counter's hottest rows into free slots or those of colder rows.

    A row takes a free slot of its two sets, or that of their coldest row where its heat is more
    than `ratio` times that row's and `margin`. No other row moves.

    Returns:
        The slots taken, each once; the ids that they held, -1 where free; and these ids' heats.
    """
    return operators().place_rows(ids, heats, counter_ids, counter_heats, ratio, margin)


@register_fake("count_rows")
def _fake_count_rows(*arguments: object) -> None:
    """Returns nothing: the operator only writes."""


@register_fake("place_rows")
def _fake_place_rows(
    ids: Tensor,
    heats: Tensor,
    counter_ids: Tensor,
    counter_heats: Tensor,
    ratio: float,
    margin: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_placed = torch.library.get_ctx().new_dynamic_size()
    return (
        ids.new_empty(num_placed),
        ids.new_empty(num_placed),
        heats.new_empty(num_placed),
    )
