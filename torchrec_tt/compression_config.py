"""TTConfig: how a table is compressed; CompressedTable: what became of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.modules.row_ordered import order_bytes
from torchrec_tt.ops.lookup import Precision
from torchrec_tt.tt.factorize import RowStrategy, make_shape
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.svd import tt_svd


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTable:
    """What became of a table.

    Attributes:
        name: of the table.
        shape: with the ranks that were taken.
        dense_bytes: of its rows.
        num_bytes: of its cores.
        order_bytes: of the row order that is kept with it.
        relative_error: `||rows - TT|| / ||rows||` (Frobenius); None: there were no values.
    """

    name: str
    shape: TTShape
    dense_bytes: int
    num_bytes: int
    relative_error: float | None
    order_bytes: int = 0


OnTable = Callable[[CompressedTable], None]


@contextmanager
def naming(table: str) -> Iterator[None]:
    """Puts the table's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"table {table!r}: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class TTConfig:
    """How a table is compressed.

    Attributes:
        tt_ranks: the inner ranks, one fewer than there are cores.
        max_error: of a table with values, in place of `tt_ranks`: the least ranks are taken that
            keep the relative error (Frobenius) below it.
        row_factors: see TTEmbeddingBagConfig.
        col_factors: see there.
        row_strategy: see there.
        data_type: of the cores: "fp32", "bf16" or "fp16".
        cache: which rows are kept uncompressed, of a pooled table.
        precision: of products on CUDA, see TTEmbeddingBagConfig.

    Raises:
        ValueError: for an unknown precision.
    """

    tt_ranks: list[int] | None = None
    max_error: float | None = None
    row_factors: list[int] | None = None
    col_factors: list[int] | None = None
    row_strategy: RowStrategy = "balanced"
    data_type: Literal["fp32", "bf16", "fp16"] = "fp32"
    cache: RowCacheConfig | None = None
    precision: Precision | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, *get_args(Precision)):
            raise ValueError(
                f"precision must be None or one of {get_args(Precision)}, got {self.precision!r}"
            )

    def shape(self, num_embeddings: int, embedding_dim: int) -> TTShape:
        """Returns the shape for a table of this size; of rank 1 where `max_error` is to choose.

        Raises:
            ValueError: if factors or ranks do not fit it, or not one of `tt_ranks` and `max_error`
                is given.
        """
        if (self.tt_ranks is None) == (self.max_error is None):
            raise ValueError(
                f"exactly one of tt_ranks and max_error must be given, got {self.tt_ranks} and "
                f"{self.max_error}"
            )
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise ValueError(f"max_error must be in (0, 1), got {self.max_error}")
        num_cores = len(self.row_factors or self.col_factors or (1, 1, 1))
        return make_shape(
            num_embeddings,
            embedding_dim,
            tt_ranks=self.tt_ranks or [1] * (num_cores - 1),
            row_factors=self.row_factors,
            col_factors=self.col_factors,
            row_strategy=self.row_strategy,
        )

    @property
    def core_dtype(self) -> torch.dtype:
        return data_type_to_dtype(DataType[self.data_type.upper()])

    def compress(
        self, name: str, rows: Tensor, *, row_order: Tensor | None = None
    ) -> tuple[CompressedTable, list[Tensor]]:
        """Returns what TT-SVD makes of rows, `[num_embeddings, D]`, and its cores.

        Args:
            name: of the table.
            rows: with all their values.
            row_order: int `[num_embeddings]`, as of `torchrec_tt.tt.row_order`: the cores are those
                of `rows[row_order]`.

        Raises:
            ValueError: as `shape`, and for values that are not finite; the message names the table.
        """
        with naming(name):
            shape = self.shape(*rows.shape)
            found = tt_svd(
                rows if row_order is None else rows[row_order.to(rows.device)],
                tt_ranks=self.tt_ranks and shape.tt_ranks,
                max_error=self.max_error,
                row_factors=shape.row_factors,
                col_factors=shape.col_factors,
            )
        cores = [core.to(self.core_dtype) for core in found.cores]
        table = CompressedTable(
            name=name,
            shape=found.shape,
            dense_bytes=rows.nbytes,
            num_bytes=sum(core.nbytes for core in cores),
            relative_error=found.relative_error,
            order_bytes=order_bytes(row_order),
        )
        return table, cores
