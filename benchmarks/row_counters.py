"""Counters of hot rows beside each other: how many of the true top rows they find, by their bytes.

`row_cache.py counters` runs it. Ours is the operator; the others are references in NumPy and plain
Python of what their papers say, told of a batch's distinct rows and how often each was looked up.
"""

import heapq
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from torchrec_tt import make_shape
from torchrec_tt.ops.embedding_bag import plan
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.ops.row_counter import count_rows

CELL = 8 + 4  # bytes of an id and a heat


class Exact:
    """A number for every row: what the best counter could know, at any size."""

    def __init__(self) -> None:
        self.heats: Counter[int] = Counter()

    def count(self, ids: Tensor) -> None:
        self.heats.update(ids.tolist())

    def hottest(self, num_rows: int) -> list[int]:
        return [row for row, _ in self.heats.most_common(num_rows)]


class MisraGries:
    """Ours: Misra and Gries in buckets of 8 cells, as csrc/row_counter.h."""

    def __init__(self, num_bytes: int, *, num_embeddings: int) -> None:
        shape = make_shape(num_embeddings, 4, tt_ranks=[2, 2])
        self.lookup = Lookup([TTTable(name="t", shape=shape)])
        self.tags, self.heats = torch.full((8,), -1), torch.zeros(8)  # nothing is cached
        cells = num_bytes // CELL // 8 * 8
        self.ids, self.counts = torch.full((cells,), -1), torch.zeros(cells)
        self.statistics = torch.zeros(3, dtype=torch.int64)

    def count(self, ids: Tensor) -> None:
        batch = plan(ids, torch.arange(len(ids) + 1), lookup=self.lookup, cache_ids=[self.tags])
        state = [self.heats], [self.ids], [self.counts], [self.statistics]
        count_rows(batch, *state, lookup=self.lookup, clocks=[0])

    def hottest(self, num_rows: int) -> list[int]:
        return _hottest(self.ids.numpy(), self.counts.numpy(), num_rows)


class SpaceSaving:
    """Metwally et al., "Efficient computation of frequent and top-k elements", ICDT 2005.

    A cell has the links of a Stream-Summary and of its index too: 16 bytes more.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_cells = num_bytes // (CELL + 16)
        self.heats: dict[int, int] = {}
        self.coldest: list[tuple[int, int]] = []  # heats as they were when they were put in

    def count(self, ids: Tensor) -> None:
        for row, lookups in _distinct(ids):
            heat = self.heats.get(row)
            if heat is None:
                heat = self._make_room() if len(self.heats) == self.num_cells else 0
                heapq.heappush(self.coldest, (heat + lookups, row))
            self.heats[row] = heat + lookups

    def _make_room(self) -> int:
        """Takes the coldest row out; returns its heat."""
        while True:
            heat, row = self.coldest[0]
            if self.heats[row] == heat:
                heapq.heappop(self.coldest)
                return self.heats.pop(row)
            heapq.heapreplace(self.coldest, (self.heats[row], row))

    def hottest(self, num_rows: int) -> list[int]:
        return heapq.nlargest(num_rows, self.heats, key=self.heats.__getitem__)


class HotSketch:
    """Space-Saving in buckets of 4 cells (CAFE, SIGMOD 2024, section 3.2)."""

    def __init__(self, num_bytes: int) -> None:
        self.buckets: list[dict[int, int]] = [{} for _ in range(num_bytes // CELL // 4)]

    def count(self, ids: Tensor) -> None:
        for row, lookups in _distinct(ids):
            bucket = self.buckets[_hash(row, 0) % len(self.buckets)]
            heat = bucket.get(row, 0)
            if row not in bucket and len(bucket) == 4:
                heat = bucket.pop(min(bucket, key=bucket.__getitem__))
            bucket[row] = heat + lookups

    def hottest(self, num_rows: int) -> list[int]:
        heats = {row: heat for bucket in self.buckets for row, heat in bucket.items()}
        return heapq.nlargest(num_rows, heats, key=heats.__getitem__)


class CountMin:
    """Cormode, Muthukrishnan, 2005, 4 rows of conservative updates, and candidates by estimate."""

    def __init__(self, num_bytes: int, *, num_candidates: int) -> None:
        width = (num_bytes - CELL * num_candidates) // 16
        self.cells, self.num_candidates = np.zeros((4, width)), num_candidates
        self.candidates = np.empty(0, dtype=np.int64)

    def count(self, ids: Tensor) -> None:
        rows, lookups = np.unique(ids.numpy(), return_counts=True)
        heats = self._estimate(rows) + lookups
        for k, cells in enumerate(self.cells):
            np.maximum.at(cells, self._places(rows, k), heats)
        known = np.union1d(self.candidates, rows)
        self.candidates = np.array(_hottest(known, self._estimate(known), self.num_candidates))

    def _places(self, rows: np.ndarray, k: int) -> np.ndarray:
        return (_hash(rows, k + 1) % self.cells.shape[1]).astype(np.int64)

    def _estimate(self, rows: np.ndarray) -> np.ndarray:
        return np.min([cells[self._places(rows, k)] for k, cells in enumerate(self.cells)], axis=0)

    def hottest(self, num_rows: int) -> list[int]:
        return _hottest(self.candidates, self._estimate(self.candidates), num_rows)


def _distinct(ids: Tensor) -> Iterable[tuple[int, int]]:
    rows, lookups = ids.unique(return_counts=True)
    return zip(rows.tolist(), lookups.tolist(), strict=True)


def _hottest(ids: np.ndarray, heats: np.ndarray, num_rows: int) -> list[int]:
    by_heat = np.argsort(-heats, kind="stable")
    return [row for row in ids[by_heat].tolist() if row >= 0][:num_rows]


def _hash(row, seed: int):  # int or int64 array below 2^23, and returned
    """Multiply-shift by an odd number of the seed's: 31 bits."""
    factor = (0x9E3779B97F4A7C15 + 2 * seed * 0xBF58476D1CE4E5B9) % 2**40
    return (row + 1) * factor >> 9 & 0x7FFFFFFF


def recall(
    *, exponent: float, bytes_per_slot: int, num_rows: int, num_slots: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Share of the true top rows that each counter finds, and of their lookups."""
    law = torch.arange(1, num_rows + 1, dtype=torch.float64).pow_(-exponent)
    law /= law.sum()
    ends = law.cumsum(0)
    generator = torch.Generator().manual_seed(0)
    scatter = torch.randperm(num_rows, generator=generator)
    size = bytes_per_slot * num_slots
    counters = {
        "exact counts": Exact(),
        "Misra-Gries in buckets (ours)": MisraGries(size, num_embeddings=num_rows),
        "Space-Saving": SpaceSaving(size),
        "HotSketch": HotSketch(size),
        "Count-Min with candidates": CountMin(size, num_candidates=num_slots),
    }
    for _ in range(steps):
        uniform = torch.rand(2048, dtype=torch.float64, generator=generator)
        ids = scatter[torch.searchsorted(ends, uniform).clamp_(max=num_rows - 1)]
        for counter in counters.values():
            counter.count(ids)
    rank_of = torch.empty_like(scatter)
    rank_of[scatter] = torch.arange(num_rows)
    found = {}
    for name, counter in counters.items():
        ranks = rank_of[torch.tensor(counter.hottest(num_slots))]
        is_top = float((ranks < num_slots).sum()) / num_slots
        found[name] = is_top, float(law[ranks].sum() / ends[num_slots - 1])
    return found
