"""SavedRows: what the row caches of a table knew, on its way into caches of other blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrec_tt.modules.row_cache import STATISTICS, RowCache
from torchrec_tt.modules.row_folding import RowFold
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.ops.row_counter import place_rows
from torchrec_tt.tt.row_cache import WAYS

_CELLS = 8  # of a bucket: kCells in csrc/row_counter.h
_KEPT_PER_FOLDED = 2  # rows that a fold holds where they are, for each one that it folds
_MOMENTS = ("sum", "exp_avg", "exp_avg_sq")
_SUMMED = ("statistics", "fold_squares")  # over the blocks of a table
_SHARED = ("schedule", "step")  # every block has the same


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRows:
    """Rows that were cached, and rows that were counted.

    Attributes:
        ids: [E] rows of the table.
        rows: [E, D].
        heats: [E].
        states: the optimizer's by name, [E] or [E, D].
        counted_ids: [K].
        counted_heats: [K].
        whole: what is of a table and not of its rows: `schedule`, `statistics`, `fold_squares`
            and perhaps `step`.
    """

    ids: Tensor
    rows: Tensor
    heats: Tensor
    states: Mapping[str, Tensor]
    counted_ids: Tensor
    counted_heats: Tensor
    whole: Mapping[str, Tensor]

    def within(self, table: TTTable) -> "SavedRows":
        """Returns those of a block of the table."""
        start, stop = table.row_offset, table.row_offset + table.block_size
        return self._where((self.ids >= start) & (self.ids < stop))._counted_where(
            (self.counted_ids >= start) & (self.counted_ids < stop)
        )

    def none(self) -> "SavedRows":
        """Returns no rows."""
        return self._where(self.ids < 0)._counted_where(self.counted_ids < 0)

    def _where(self, mask: Tensor) -> "SavedRows":
        return replace(
            self,
            ids=self.ids[mask],
            rows=self.rows[mask],
            heats=self.heats[mask],
            states={name: state[mask] for name, state in self.states.items()},
        )

    def _counted_where(self, mask: Tensor) -> "SavedRows":
        return replace(
            self, counted_ids=self.counted_ids[mask], counted_heats=self.counted_heats[mask]
        )


def saved_rows(state_dicts: Sequence[Mapping[str, Tensor]]) -> SavedRows:
    """Returns what the caches of a table's blocks had, from their state dicts, at least one."""

    def joined(name: str) -> Tensor:
        return torch.cat([state[name] for state in state_dicts])

    first = state_dicts[0]
    saved = SavedRows(
        ids=joined("ids"),
        rows=joined("rows"),
        heats=joined("heats"),
        states={name: joined(name) for name in _MOMENTS if name in first},
        counted_ids=joined("counter_ids"),
        counted_heats=joined("counter_heats"),
        whole={name: first[name] for name in _SHARED if name in first}
        | {name: torch.stack([state[name] for state in state_dicts]).sum(0) for name in _SUMMED},
    )
    return saved._where(saved.ids >= 0)._counted_where(saved.counted_ids >= 0)


@torch.no_grad()
def take_over(cache: RowCache, saved: SavedRows, *, is_first: bool) -> SavedRows:
    """Makes a cache that of its block's saved rows, the hottest first; returns what is left over.

    Rows keep value and optimizer state, slots are chosen anew. What is left over is counted as
    evicted, and in the counter, from where it may come back.

    Args:
        cache: what it had is forgotten.
        saved: of the whole table or of the block.
        is_first: whether this is the table's first block, which goes on with the statistics.
    """
    cache.clear()
    own = saved.within(cache.table)
    offered = [_padded(own.ids, -1), _padded(own.heats, 0)]
    host = [cache.ids.cpu(), cache.heats.cpu()]
    place_rows(*host, *offered, ratio=1.0, margin=0.0)
    cache.ids.copy_(host[0])
    cache.heats.copy_(host[1])
    slots = (host[0] >= 0).nonzero()[:, 0]
    by_id = own.ids.argsort()
    at = by_id[torch.searchsorted(own.ids[by_id], host[0][slots])]
    cache.rows[slots] = own.rows[at].to(cache.rows)
    for name, state in own.states.items():
        if name in cache._buffers and getattr(cache, name).shape[1:] == state.shape[1:]:
            getattr(cache, name)[slots] = state[at].to(getattr(cache, name))
    left = own._where(~torch.isin(own.ids, host[0][slots]))
    _count_again(
        cache,
        torch.cat([left.ids, own.counted_ids]),
        torch.cat([left.heats, own.counted_heats]),
    )
    _go_on(cache, own.whole, is_first=is_first)
    cache.statistics[STATISTICS.index("evictions")] += len(left.ids)
    return left


def fold_of(left: SavedRows, table: TTTable, cores: Sequence[Tensor], *, is_lfu: bool) -> RowFold:
    """Returns what moves the cores towards rows that found no slot, all of them."""
    kept = left.counted_heats.topk(min(_KEPT_PER_FOLDED * len(left.ids), len(left.counted_ids)))
    weights = [heats.clamp(min=1.0) for heats in (left.heats, kept.values)]  # folds the cold too
    if not is_lfu:
        weights = [torch.ones_like(heats) for heats in weights]
    device = cores[0].device
    return RowFold(
        table,
        cores,
        ids=left.ids.to(device),
        values=left.rows.to(device),
        weights=weights[0].to(device),
        kept_ids=left.counted_ids[kept.indices].to(device),
        kept_weights=weights[1].to(device),
    )


def _go_on(cache: RowCache, whole: Mapping[str, Tensor], *, is_first: bool) -> None:
    """Takes the place in the schedule, and what was counted since the start."""
    state = {
        name: value
        for name, value in whole.items()
        if name in cache._buffers and (is_first or name in _SHARED)
    }
    cache.load_state_dict(state, strict=False)


def _count_again(cache: RowCache, ids: Tensor, heats: Tensor) -> None:
    """Puts rows into the counter's buckets, the hottest of each."""
    if not cache.num_slots:
        return
    by_heat = heats.argsort(descending=True, stable=True)
    ids, heats = ids[by_heat], heats[by_heat]
    buckets = _bucket_of(ids, len(cache.counter_ids) // _CELLS)
    by_bucket = buckets.argsort(stable=True)
    buckets = buckets[by_bucket]
    place = torch.arange(len(ids)) - torch.searchsorted(buckets, buckets)
    is_kept = place < _CELLS
    cells = (buckets * _CELLS + place)[is_kept]
    cache.counter_ids[cells] = ids[by_bucket][is_kept].to(cache.counter_ids.device)
    cache.counter_heats[cells] = heats[by_bucket][is_kept].to(cache.counter_heats.device)


def _bucket_of(ids: Tensor, num_buckets: int) -> Tensor:
    """As `first_cell` in csrc/row_counter.h: MurmurHash3's finaliser, int64 for uint64."""
    hashed = -1 - ids
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashed = (hashed ^ _shifted(hashed, 33)) * (factor - (1 << 64))
    hashed ^= _shifted(hashed, 33)
    return _shifted(hashed, 32) * num_buckets >> 32


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _padded(values: Tensor, fill: int) -> Tensor:
    """A copy of a multiple of 8 elements, as the operators take them."""
    padding = -len(values) % WAYS
    return torch.cat([values, values.new_full((padding,), fill)])
