"""Lookup: which tables a call reads, and how; what stays the same from call to call."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrec_tt.ops.library import operators
from torchrec_tt.tt.shape import TTShape

Pooling = Literal["sum", "mean", "none"]
CheckMode = Literal["fatal", "warning", "ignore"]
Precision = Literal["highest", "high", "medium"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TTTable:
    """A table of a call, or the block of its rows that a row-wise shard holds.

    Args:
        name: of the table, for messages.
        shape: factors and ranks.
        num_features: consecutive features of the call that read this table.
        row_offset: the block's first row in the table.
        num_rows: rows of the block; ids are `[0, num_rows)` and id `i` reads row
            `row_offset + i`. None: the whole table.

    Raises:
        ValueError: if the block does not lie in the table.
    """

    name: str
    shape: TTShape
    num_features: int = 1
    row_offset: int = 0
    num_rows: int | None = None

    def __post_init__(self) -> None:
        if self.num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {self.num_features}")
        if self.row_offset < 0 or not (
            0 <= self.block_size <= self.shape.num_embeddings - self.row_offset
        ):
            raise ValueError(
                f"row_offset and num_rows must be a block of the {self.shape.num_embeddings} rows "
                f"of table {self.name!r}, got {self.row_offset} and {self.num_rows}"
            )

    @property
    def block_size(self) -> int:
        """Rows of the block: valid ids are `[0, block_size)`."""
        if self.num_rows is None:
            return self.shape.num_embeddings - self.row_offset
        return self.num_rows


class Lookup:
    """What stays the same from call to call: tables, pooling and what to do with invalid ids.

    Args:
        tables: in the order of the features that read them.
        pooling: how a bag's rows become one; "none" gives a row per index instead, of tables of
            one embedding_dim.
        check_mode: for ids outside `[0, block_size)`: "fatal" raises, "warning" and "ignore" read
            row 0 (FBGEMM's bounds-check modes).
        precision: of matrix products with float32 cores on CUDA: "highest" float32, "high" TF32,
            "medium" bfloat16 factors, summed in float32 always; None: that of
            `torch.get_float32_matmul_precision()` at the time of a call. A hint, as torch's is: the
            CPU computes in float32 whatever it says.

    Raises:
        ValueError: if there is no table, a choice is unknown, or tables without pooling differ in
            embedding_dim.
    """

    def __init__(
        self,
        tables: Sequence[TTTable],
        *,
        pooling: Pooling = "sum",
        check_mode: CheckMode = "fatal",
        precision: Precision | None = None,
    ) -> None:
        if not tables:
            raise ValueError("tables must not be empty, got []")
        for name, value, choices in (
            ("pooling", pooling, get_args(Pooling)),
            ("check_mode", check_mode, get_args(CheckMode)),
            ("precision", precision, (None, *get_args(Precision))),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        dims = sorted({table.shape.embedding_dim for table in tables})
        if pooling == "none" and len(dims) > 1:
            raise ValueError(f"tables must have one embedding_dim for pooling 'none', got {dims}")
        self.tables = tuple(tables)
        self.pooling = pooling
        self.check_mode = check_mode
        self.precision = precision
        self.feature_tables = [
            t for t, table in enumerate(tables) for _ in range(table.num_features)
        ]
        self.encoded_tables = [number for table in tables for number in _encode(table)]
        self.core_shapes = [shape for table in tables for shape in table.shape.core_shapes]
        self.num_columns = sum(t.num_features * t.shape.embedding_dim for t in tables)
        self._has_warned = False

    def with_table_names(self, message: str) -> str:
        """Returns an operator's message with tables by name, which it knows by number."""
        return re.sub(
            r"\btable (\d+)\b", lambda m: f"table {self.tables[int(m[1])].name!r}", message
        )

    @torch.compiler.disable
    def warn_of_bad_ids(
        self,
        indices: Tensor,  # [N]
        offsets: Tensor,  # [F * B + 1]
        *,
        counts: Tensor,  # [4] of the plan
    ) -> None:
        """Warns, once for the lookup, if a table was asked for rows that it does not have.

        On CUDA it waits for nothing and says what an earlier batch asked for.
        """
        if self._has_warned:
            return
        if counts.is_cuda:
            said = operators().take_warning(counts.device.index)
            if said:
                self._has_warned = True
                warnings.warn(f"{said}: such ids read row 0 (this is said once)", stacklevel=4)
            return
        if not counts[3]:
            return
        self._has_warned = True
        batch_size = (offsets.numel() - 1) // len(self.feature_tables)
        for feature, t in enumerate(self.feature_tables):
            table = self.tables[t]
            begin, end = offsets[feature * batch_size], offsets[(feature + 1) * batch_size]
            ids = indices[int(begin) : int(end)]
            bad = ids[(ids < 0) | (ids >= table.block_size)]
            if bad.numel():
                warnings.warn(
                    f"indices must be in [0, {table.block_size}) for table {table.name!r}, got "
                    f"{int(bad[0])}: such ids read row 0 (this is said once)",
                    stacklevel=4,
                )
                return


def _encode(table: TTTable) -> list[int]:
    """Returns the integers that csrc/tt_shape.h decodes."""
    shape = table.shape
    head = [shape.num_cores, table.block_size, table.row_offset]
    return [*head, *shape.row_factors, *shape.col_factors, *shape.tt_ranks]
