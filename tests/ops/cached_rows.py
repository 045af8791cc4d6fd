"""Row caches filled by hand."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_tt.ops.lookup import Lookup, TTTable

WAYS = 8
_MASK = 2**64 - 1


def sets_of(row: int, num_sets: int) -> tuple[int, int]:
    """csrc/row_tags.h once more, in Python's whole numbers."""
    h = row
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> 33) * factor & _MASK
    h ^= h >> 33
    return (h >> 32) * num_sets >> 32, (h & 0xFFFFFFFF) * num_sets >> 32


def fill(rows: list[int], *, num_sets: int) -> Tensor:
    """Tags with as many of the rows as find a slot, each in either of its sets."""
    ids = [-1] * (num_sets * WAYS)
    for row in rows:
        slots = [s * WAYS + way for s in sets_of(row, num_sets) for way in range(WAYS)]
        free = [slot for slot in slots if ids[slot] < 0]
        if free:
            ids[random.Random(row).choice(free)] = row
    return torch.tensor(ids, dtype=torch.int64)


@dataclass
class Caches:
    """Of every table in turn: tags [C] and rows [C, D]; C = 0 where it has none."""

    ids: list[Tensor]
    rows: list[Tensor]

    def held(self) -> list[Tensor]:
        """The slots in use of every table."""
        return [(ids >= 0).nonzero()[:, 0] for ids in self.ids]

    @staticmethod
    def draw(
        lookup: Lookup,
        rng: random.Random,
        *,
        ratios: tuple[float, ...] = (0.0, 0.3, 1.0),  # of a table's rows
        dtype: torch.dtype = torch.float32,
    ) -> "Caches":
        caches = Caches([], [])
        for table in lookup.tables:
            caches.add(table, rng, ratio=rng.choice(ratios), dtype=dtype)
        return caches

    def add(self, table: TTTable, rng: random.Random, *, ratio: float, dtype: torch.dtype) -> None:
        # Rows outside of the block too: a cache may know more of a table than a shard asks for.
        count = round(ratio * table.shape.num_embeddings)
        wanted = rng.sample(range(table.shape.num_embeddings), count)
        num_sets = -(-count // WAYS) + rng.randint(0, 2) if count else 0
        ids = fill(wanted, num_sets=num_sets)
        generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
        size = (num_sets * WAYS, table.shape.embedding_dim)
        self.ids.append(ids)
        self.rows.append(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
