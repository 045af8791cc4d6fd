"""Small batches of tables, and what a lookup in them must give."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.shape import TTShape

# (row_factors, col_factors, tt_ranks) for 2, 3 and 4 cores; ranks and columns on and off the
# vector width, a column factor of 1, a rank of 1, more than 16 rows to a prefix
SHAPES = {
    "2 cores": ((3, 5), (2, 3), (4,)),
    "2 cores, wide": ((7, 40), (4, 4), (33,)),
    "3 cores": ((3, 4, 5), (2, 2, 4), (3, 7)),
    "3 cores, aligned": ((6, 7, 8), (4, 4, 4), (32, 32)),
    "3 cores, long last": ((2, 3, 60), (3, 5, 1), (8, 16)),
    "3 cores, rank 1": ((5, 1, 3), (1, 7, 2), (1, 1)),
    "4 cores": ((3, 2, 4, 5), (2, 1, 3, 2), (3, 2, 5)),
    "4 cores, 16 columns": ((3, 2, 4, 3), (2, 2, 2, 2), (3, 4, 5)),
    "4 cores, aligned": ((3, 4, 3, 4), (2, 2, 2, 2), (8, 16, 8)),
}


def make_shape(name: str) -> TTShape:
    """Two rows short of what the cores can express, where there are two to spare."""
    row_factors, col_factors, tt_ranks = SHAPES[name]
    return TTShape(
        num_embeddings=max(1, math.prod(row_factors) - 2),
        embedding_dim=math.prod(col_factors),
        row_factors=row_factors,
        col_factors=col_factors,
        tt_ranks=tt_ranks,
    )


def make_lookup(*names: str, num_features: int = 1, **kwargs) -> Lookup:
    tables = [
        TTTable(name=f"t{i}", shape=make_shape(name), num_features=num_features)
        for i, name in enumerate(names)
    ]
    return Lookup(tables, **kwargs)


def make_cores(lookup: Lookup, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random cores; those of 16 bits hold what float32 ones of the same call hold, rounded."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in lookup.core_shapes
    ]


@dataclass
class Batch:
    """Feature-major bags of 0 to 5 ids, many of them repeated."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor

    @staticmethod
    def draw(lookup: Lookup, *, batch_size: int = 23, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(11)
        lengths = torch.randint(
            0, 6, (len(lookup.feature_tables) * batch_size,), generator=generator
        )
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        indices = []
        for feature, table in enumerate(lookup.feature_tables):
            count = int(lengths[feature * batch_size : (feature + 1) * batch_size].sum())
            rows = lookup.tables[table].block_size
            indices.append(torch.randint(0, rows, (count,), generator=generator))
        weights = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64).to(dtype)
        return Batch(torch.cat(indices), offsets, weights.requires_grad_())


def big_batch() -> tuple[Lookup, list[Tensor], Tensor, Tensor]:
    """Enough work for every table to be cut into several chunks, some within one mid slice."""
    shapes = [
        TTShape(
            num_embeddings=m[0] * m[1] * m[2],
            embedding_dim=64,
            row_factors=m,
            col_factors=(4, 4, 4),
            tt_ranks=(32, 32),
        )
        for m in ((40, 44, 50), (60, 3, 70))
    ]
    four = TTShape(
        num_embeddings=12**4,
        embedding_dim=16,
        row_factors=(12,) * 4,
        col_factors=(2,) * 4,
        tt_ranks=(16, 16, 16),
    )
    tables = [TTTable(name=f"t{i}", shape=s) for i, s in enumerate([*shapes, four])]
    lookup = Lookup(tables)
    generator = torch.Generator().manual_seed(3)
    batch_size = 8000
    indices = torch.cat(
        [torch.randint(0, t.block_size, (batch_size,), generator=generator) for t in tables]
    )
    return lookup, make_cores(lookup), indices, torch.arange(3 * batch_size + 1)


def dense_lookup(
    cores: list[Tensor],
    batch: Batch,
    *,
    lookup: Lookup,
    weights: Tensor | None = None,
    cached: Sequence[tuple[Tensor, Tensor]] | None = None,  # of each table: row ids, their rows
) -> Tensor:
    """The whole tables, cached rows in place of the cores', then torch's own embedding_bag."""
    batch_size = (len(batch.offsets) - 1) // len(lookup.feature_tables)
    outputs, tables, first = [], [], 0
    for t, table in enumerate(lookup.tables):
        own = cores[first : first + table.shape.num_cores]
        first += table.shape.num_cores
        whole = dense(own, shape=table.shape)
        if cached is not None:
            ids, rows = cached[t]
            whole = whole.index_put((ids,), rows)
        tables.append(whole[table.row_offset :][: table.block_size])
    for feature, t in enumerate(lookup.feature_tables):
        offsets = batch.offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        output = F.embedding_bag(
            batch.indices[begin:end].long(),
            tables[t],
            (offsets - begin).long(),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=None if weights is None else weights[begin:end],
        )
        if lookup.pooling == "mean":
            output = output / offsets.diff().clamp(min=1)[:, None]
        if lookup.pooling == "none":
            output = tables[t][batch.indices[begin:end].long()]
            output = output if weights is None else output * weights[begin:end, None]
        outputs.append(output)
    return torch.cat(outputs, dim=0 if lookup.pooling == "none" else 1)
