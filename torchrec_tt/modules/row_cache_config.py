"""RowCacheConfig: how many rows a table keeps uncompressed, and which, when and how."""

import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.row_cache import num_slots, num_slots_of_ratio

Policy = Literal["lfu", "lru"]
OnEvict = Literal["fold", "drop"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCacheConfig:
    """A cache of a table's hottest rows, kept uncompressed and trained as rows, on every rank.

    Cached rows are looked up and stepped in place of the cores, which get no gradient for them.
    The cache counts lookups in training and fills itself: first after `first_refresh` steps, then
    at intervals that grow by `refresh_growth` up to `max_refresh_interval`.

    Args:
        num_rows: rows to keep on each rank, rounded up to whole sets of 8; at most those of the
            rank's shard are kept. Either this or `load_factor`.
        load_factor: the part of the rows of a rank's shard to keep (TorchRec's meaning), in (0, 1).
        policy: "lfu" keeps the rows looked up most often, "lru" those looked up last.
        decay: what a refresh multiplies the counts of "lfu" with, so that old traffic is forgotten.
        first_refresh: training steps before the first fill.
        refresh_growth: each interval over the one before, the first being `first_refresh`; 1 keeps
            it fixed.
        max_refresh_interval: in training steps; None: a tenth of the slots that the whole table
            would have, but 100 to 1000, and not below `first_refresh`.
        on_evict: what happens to the value of a row that leaves: "fold" moves the cores towards
            it, by least squares; "drop" forgets it.
        dtype: of the rows: float32, bfloat16 or float16; None: float32, float64 beside float64
            cores.
        optimizer: of the rows, which FBGEMM's rules step (adam lazily, its steps counted by the
            table); None: that of the cores, whose learning rate they then follow.

    Raises:
        ValueError: for both or none of `num_rows` and `load_factor`, an unknown choice, or a number
            out of range.

    Example:
        >>> RowCacheConfig(load_factor=0.001).num_slots(10_131_227)
        10136
    """

    num_rows: int | None = None
    load_factor: float | None = None
    policy: Policy = "lfu"
    decay: float = 0.5
    first_refresh: int = 50
    refresh_growth: float = 3.0
    max_refresh_interval: int | None = None
    on_evict: OnEvict = "fold"
    dtype: torch.dtype | None = None
    optimizer: TTOptimizerConfig | None = None

    def __post_init__(self) -> None:
        if (self.num_rows is None) == (self.load_factor is None):
            raise ValueError(
                "exactly one of num_rows and load_factor must be given, got "
                f"num_rows={self.num_rows} and load_factor={self.load_factor}"
            )
        if self.num_rows is not None:
            _check_count("num_rows", self.num_rows)
        elif not _is_number(self.load_factor) or not 0 < float(self.load_factor or 0) < 1:
            raise ValueError(f"load_factor must be in (0, 1), got {self.load_factor!r}")
        for name, choices in (("policy", get_args(Policy)), ("on_evict", get_args(OnEvict))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if not _is_number(self.decay) or not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay!r}")
        _check_count("first_refresh", self.first_refresh)
        if self.max_refresh_interval is not None:
            _check_count("max_refresh_interval", self.max_refresh_interval)
        if not _is_number(self.refresh_growth) or not 1 <= self.refresh_growth < float("inf"):
            raise ValueError(
                f"refresh_growth must be at least 1 and finite, got {self.refresh_growth!r}"
            )
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(f"dtype must be None or one of {_DTYPES}, got {self.dtype!r}")
        if not isinstance(self.optimizer, TTOptimizerConfig | None):
            raise ValueError(
                f"optimizer must be a TTOptimizerConfig or None, got {self.optimizer!r}"
            )

    def num_slots(self, block_size: int) -> int:
        """Returns the slots of the cache of a shard of `block_size` rows: a multiple of 8."""
        if self.load_factor is not None:
            return num_slots_of_ratio(self.load_factor, block_size=block_size)
        assert self.num_rows is not None
        return num_slots(min(self.num_rows, block_size))

    def greatest_interval(self, num_embeddings: int) -> int:
        """Returns the most steps between refreshes, where it is not given by the slots.

        A refresh takes as long as it has slots, and a small cache is the sooner full of rows that
        are no longer hot. The rows are those of the whole table, which all ranks know: theirs
        refresh at one step.
        """
        if self.max_refresh_interval is not None:
            return self.max_refresh_interval
        by_slots = max(100, self.num_slots(num_embeddings) // 10)
        return max(self.first_refresh, min(1000, by_slots))

    def next_interval(self, interval: int, *, num_embeddings: int) -> int:
        """Returns the steps from a refresh to the next, `interval` being those before it."""
        greatest = self.greatest_interval(num_embeddings)
        return max(1, min(int(interval * self.refresh_growth), greatest))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
