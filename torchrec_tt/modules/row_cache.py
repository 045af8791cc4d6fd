"""RowCache: a table's hottest rows, uncompressed, with what trains, counts and renews them."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.modules.row_folding import CoreRows, RowFold
from torchrec_tt.ops.embedding_bag import sum_dtype
from torchrec_tt.ops.library import find_problem
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.ops.row_cache import advise_huge_pages
from torchrec_tt.ops.row_counter import place_rows
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.row_cache import CELLS_PER_SLOT

STATISTICS = ("hits", "misses", "unique_misses", "fills", "evictions", "refreshes")
_STATES: dict[
    str, dict[str, bool]
] = {  # what the optimizer keeps of a row: whether it is as long as the row
    "sgd": {},
    "adagrad": {"sum": True},
    "rowwise_adagrad": {"sum": False},
    "adam": {"exp_avg": True, "exp_avg_sq": True},
}
_RATIO, _MARGIN = 1.25, 1.0  # a row must be looked up so much oftener to take another's slot (lfu)
_MOST_FOLDED = _MOST_KEPT = 1024  # rows: a refresh takes at most so long
FOLDED_WEIGHT = 0.25  # of a row that leaves: it is looked up less than its heat says
_ROWS_AT_ONCE = 4096  # whose memory is soon used again: new pages cost more than the arithmetic
_KEPT_PER_FOLDED = 8  # rows that a fold holds where they are, for each one that it folds


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What a refresh changes: M slots with new rows, E of which held others.

    Attributes:
        slots: [M].
        evicted_ids: [E] rows of the table.
        evicted_slots: [E] that hold their values until they are filled anew.
        evicted_heats: [E].
    """

    slots: Tensor
    evicted_ids: Tensor
    evicted_slots: Tensor
    evicted_heats: Tensor


class RowCache(nn.Module):
    """The cached rows of one table on one rank.

    A row that is in `ids` is looked up in `rows` and stepped there; the cores get no gradient for
    it, and what they hold for it is not read. Slots are in sets of 8, of which a row has two to
    choose from (csrc/row_tags.h); a row that stays cached keeps its slot.

    Args:
        table: the block of rows that the rank answers for.
        config: capacity, policy and schedule.
        optimizer: of the cores, which the rows follow where the config has none. With neither, the
            cache can be looked up but not trained.
        core_dtype: of the cores.
        device: of the buffers; "meta" is allowed.

    Attributes:
        ids: [C] int64, rows of the table (`row_offset` included), -1 where a slot is empty.
        rows: [C, D], float32, bfloat16 or float16; float64 for float64 cores.
        heats: [C] float32, how hot the row of each slot is.
        counter_ids: [2 C] int64, rows that are not cached, -1 where a cell is empty.
        counter_heats: [2 C] float32.
        sum, exp_avg, exp_avg_sq: the optimizer's, [C] or [C, D]; `step`, int64 [1].
        statistics: [6] int64, see `STATISTICS`.
        fold_squares: [2] float64: heat times squared distance of all evicted rows from what the
            cores gave for them, before and after they were folded.
        schedule: [3] int64: training steps, those at the last refresh, and the interval to the
            next. It is brought up to date where a state dict is made.
    """

    def __init__(
        self,
        table: TTTable,
        config: RowCacheConfig,
        *,
        optimizer: TTOptimizerConfig | None,
        core_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.table, self.config = table, config
        self.optimizer = own = config.optimizer or optimizer
        self.learning_rate = None if config.optimizer is None else config.optimizer.learning_rate
        if core_dtype == torch.float64 and config.dtype is not None:
            raise ValueError(
                f"cache.dtype must be None for float64 cores, got {config.dtype} for table "
                f"{table.name!r}"
            )
        sums = torch.float64 if core_dtype == torch.float64 else torch.float32
        dtype = config.dtype or sums
        slots, dim = config.num_slots(table.block_size), table.shape.embedding_dim
        is_rounded = own is not None and own.stochastic_rounding and dtype.itemsize == 2
        self.rounding_seed = _rounding_seed(table) if is_rounded else None
        self._has_step = is_rounded or (own is not None and own.optimizer == "adam")
        self._state_sizes = {} if own is None else _STATES[own.optimizer]

        def add(name: str, *size: int, dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))

        add("ids", slots, dtype=torch.int64)
        add("rows", slots, dim, dtype=dtype)
        add("heats", slots, dtype=torch.float32)
        add("counter_ids", CELLS_PER_SLOT * slots, dtype=torch.int64)
        add("counter_heats", CELLS_PER_SLOT * slots, dtype=torch.float32)
        for name, is_row in self._state_sizes.items():
            add(name, slots, *[dim] * is_row, dtype=sums)
        if self._has_step:
            add("step", 1, dtype=torch.int64)
        add("statistics", len(STATISTICS), dtype=torch.int64)
        add("fold_squares", 2, dtype=torch.float64)
        add("schedule", 3, dtype=torch.int64)
        if find_problem() is None:  # best before the first write: pages in use must be moved
            advise_huge_pages(list(self.buffers()))
        self.clear()

    def clear(self) -> None:
        """Empties the cache and forgets what was counted and learned."""
        for name, buffer in self.named_buffers():
            buffer.fill_(-1) if name.endswith("ids") else buffer.zero_()
        self.num_steps, self.last_refresh = 0, 0
        self.interval = self.config.first_refresh

    @property
    def num_slots(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, as `torchrec_tt.tt.row_cache.row_cache_bytes` says."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def is_due(self) -> bool:
        """Whether it is time for a refresh."""
        return self.num_steps - self.last_refresh >= self.interval

    @property
    def clock(self) -> int:
        """The time of "lru", in steps since the last refresh; 0 where lookups are counted."""
        return self.num_steps - self.last_refresh if self.config.policy == "lru" else 0

    def optimizer_states(self) -> list[Tensor]:
        """Returns the tensors that are stepped along with the rows, in the operators' order."""
        return [*self._moments(), *([self.step] if self._has_step else [])]

    def _moments(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._state_sizes]

    @torch.no_grad()
    def place(self) -> Placement:
        """Chooses the rows to keep from now on; `fill` must follow.

        Rows that stay keep their slots. New ones are tagged, but have no value yet.
        """
        is_lfu = self.config.policy == "lfu"
        placed = [self.ids, self.heats, self.counter_ids, self.counter_heats]
        host = [tensor.cpu() for tensor in placed]
        slots, old_ids, old_heats = place_rows(
            *host, ratio=_RATIO if is_lfu else 1.0, margin=_MARGIN if is_lfu else 0.0
        )
        for tensor, changed in zip(placed, host, strict=True):
            if tensor is not changed:
                tensor.copy_(changed)
        torch.autograd.graph.increment_version(placed)
        slots, old_ids, old_heats = (x.to(self.ids.device) for x in (slots, old_ids, old_heats))
        is_evicted = old_ids >= 0
        return Placement(
            slots=slots,
            evicted_ids=old_ids[is_evicted],
            evicted_slots=slots[is_evicted],
            evicted_heats=old_heats[is_evicted],
        )

    @torch.no_grad()
    def missed(self, placement: Placement, cores: Sequence[Tensor]) -> Tensor:  # [E] float64
        """Returns each evicted row's squared distance from what the cores give, times its heat."""
        squares = torch.zeros(
            len(placement.evicted_ids), dtype=torch.float64, device=self.ids.device
        )
        for at, values in self._values(placement.evicted_ids, cores):
            missing = values.sub_(self.rows.index_select(0, placement.evicted_slots[at]))
            squares[at] = torch.linalg.vector_norm(missing, dim=1).double().square_()
        return squares * self._weights(placement.evicted_heats)

    def _values(
        self, ids: Tensor, cores: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:  # [n], [n, D]
        """Some places of `ids` at a time, all in the end, and what the cores give for these."""
        wide = [core.detach().to(sum_dtype(core)) for core in cores]
        for at in CoreRows(self.table, ids).order.split(_ROWS_AT_ONCE):
            yield at, CoreRows(self.table, ids[at]).values(wide)

    def fold(self, placement: Placement, missed: Tensor, cores: Sequence[Tensor]) -> RowFold:
        """Returns what moves the cores towards evicted rows and holds the hottest others.

        Of many evicted rows those that are missed most are folded.
        """
        folded = missed.topk(min(len(missed), _MOST_FOLDED)).indices
        most = min(_KEPT_PER_FOLDED * len(folded), _MOST_KEPT, len(self.counter_ids))
        heats = self.counter_heats.masked_fill(self.counter_ids < 0, -torch.inf)
        hottest = heats.topk(most).indices
        hottest = hottest[self.counter_ids[hottest] >= 0]
        return RowFold(
            self.table,
            cores,
            ids=placement.evicted_ids[folded],
            values=self.rows[placement.evicted_slots[folded]],
            weights=FOLDED_WEIGHT * self._weights(placement.evicted_heats[folded]),
            kept_ids=self.counter_ids[hottest],
            kept_weights=self._weights(self.counter_heats[hottest]),
        )

    def _weights(self, heats: Tensor) -> Tensor:
        """What rows of such heat count for: lookups, and with "lru" all the same."""
        return heats if self.config.policy == "lfu" else torch.ones_like(heats)

    @torch.no_grad()
    def fill(self, placement: Placement, cores: Sequence[Tensor], *, squares: Tensor) -> None:
        """Gives new rows the cores' values and no past, and ends the refresh."""
        advise_huge_pages(list(self.buffers()))
        slots = placement.slots
        for at, values in self._values(self.ids[slots], cores):
            self.rows.index_copy_(
                0, slots[at], values.to(self.rows.dtype)
            )  # faster than rows[..] =
        for moment in self._moments():
            moment[slots] = 0
        since = self.num_steps - self.last_refresh
        for heats in (self.heats, self.counter_heats):
            heats.mul_(self.config.decay) if self.config.policy == "lfu" else heats.sub_(since)
        counted = (len(slots), len(placement.evicted_ids), 1)
        self.statistics[3:] += torch.tensor(counted, device=self.statistics.device)
        self.fold_squares += squares
        self.interval = self.config.next_interval(
            self.interval, num_embeddings=self.table.shape.num_embeddings
        )
        self.last_refresh = self.num_steps

    def statistics_dict(self) -> dict[str, int | float]:
        """Returns what was counted since `reset_statistics`, and the bytes of the cache.

        `hits` and `misses` are lookups, `unique_misses` distinct rows of a batch, `fills` and
        `evictions` rows. `fold_residual` is the part of the evicted rows' squared distance from the
        cores, weighted by heat, that folding left over: 0 nothing was lost, 1 all of it.
        """
        before, after = self.fold_squares.tolist()
        counts = dict(zip(STATISTICS, self.statistics.tolist(), strict=True))
        residual = after / before if before > 0 else 0.0
        return {**counts, "fold_residual": residual, "bytes": self.num_bytes}

    def reset_statistics(self) -> None:
        self.statistics.zero_()
        self.fold_squares.zero_()

    def begin_step(self) -> None:
        """Counts a training step; raises where the rows cannot be stepped."""
        if self.optimizer is None:
            raise ValueError(
                "cache.optimizer must be given to train a table whose cores are not stepped in "
                f"backward, got None for table {self.table.name!r}"
            )
        if self.ids.is_inference():
            raise RuntimeError(
                "a row cache must be made outside torch.inference_mode() to be trained, got one "
                f"made inside for table {self.table.name!r}"
            )
        self.__dict__["num_steps"] += 1  # not through Module.__setattr__: 5 us a table and step

    def write_into(self, dense: Tensor) -> Tensor:  # [num_embeddings, D], and returned
        """Returns a dense table with the cached rows in their places."""
        slots = (self.ids >= 0).nonzero()[:, 0]
        return dense.index_copy(0, self.ids[slots], self.rows[slots].to(dense.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RowCache":
        """Follows its module to other devices, and to float64 and back; counts are not rounded."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            applied = fn(buffer)
            dtype = buffer.dtype
            if name in ("rows", *self._state_sizes):
                narrow = self.config.dtype if name == "rows" else None
                is_wide = applied.dtype == torch.float64
                dtype = torch.float64 if is_wide else narrow or torch.float32
            if applied.dtype != dtype:
                applied = buffer.to(applied.device, dtype)
            self._buffers[name] = applied
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._write_schedule()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if f"{prefix}schedule" not in state_dict:  # what is loaded may be the buffer itself
            self._write_schedule()
        saved = state_dict.get(f"{prefix}ids")
        if saved is not None and len(saved) != self.num_slots:
            args[-1].append(
                f"{prefix}ids must have the capacity of the row cache, {self.num_slots} slots, got "
                f"{len(saved)}: torchrec_tt.checkpoint.load moves rows to another capacity"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.schedule.is_meta:
            self.num_steps, self.last_refresh, interval = self.schedule.tolist()
            greatest = self.config.greatest_interval(self.table.shape.num_embeddings)
            self.interval = min(interval, max(self.config.first_refresh, greatest))

    def _write_schedule(self) -> None:
        now = (self.num_steps, self.last_refresh, self.interval)
        self.schedule.copy_(torch.tensor(now))

    def extra_repr(self) -> str:
        return f"{self.num_slots} slots, {self.config}"


def _rounding_seed(table: TTTable) -> int:
    """From the table's name, the same in every process."""
    digest = hashlib.sha256(f"{table.name}:row cache".encode()).digest()
    return int.from_bytes(digest[:7], "little")
