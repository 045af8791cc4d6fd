"""Pooled TT lookup over a batch of tables: operators, their fakes and autograd."""

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrec_tt.ops.library import load
from torchrec_tt.tt.shape import TTShape

Pooling = Literal["sum", "mean"]
CheckMode = Literal["fatal", "warning", "ignore"]


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
        pooling: how a bag's rows become one.
        check_mode: for ids outside `[0, block_size)`: "fatal" raises, "warning" and "ignore" read
            row 0 (FBGEMM's bounds-check modes).

    Raises:
        ValueError: if there is no table or a choice is unknown.
    """

    def __init__(
        self,
        tables: Sequence[TTTable],
        *,
        pooling: Pooling = "sum",
        check_mode: CheckMode = "fatal",
    ) -> None:
        if not tables:
            raise ValueError("tables must not be empty, got []")
        for name, value, choices in (
            ("pooling", pooling, get_args(Pooling)),
            ("check_mode", check_mode, get_args(CheckMode)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        self.tables = tuple(tables)
        self.pooling = pooling
        self.check_mode = check_mode
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
        """Warns, once for the lookup, if a table was asked for rows that it does not have."""
        if self._has_warned or not counts[3]:
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


def plan(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [F * B + 1] int32 or int64
    *,
    lookup: Lookup,
) -> list[Tensor]:
    """Returns the batch's plan: its ids sorted by (table, mid, head, last digit), once.

    Six tensors of upper-bound size: order [N], inverse [N], row_starts [N + 1] and prefix_starts
    [N + 1] (int32), row_keys [N] (int64), and counts [4] (int64: unique rows, those that go
    through the cores, unique prefixes, ids out of range); csrc/cpu/plan.cpp says what they hold.

    Raises:
        ValueError: if offsets do not start at 0, decrease or do not end at N, or, with check_mode
            "fatal", an id is outside its table.
    """
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    try:
        batch_plan = _ops().plan(
            indices.contiguous(),
            offsets.contiguous(),
            lookup.encoded_tables,
            lookup.feature_tables,
            lookup.check_mode,
        )
    except ValueError as error:
        raise ValueError(lookup.with_table_names(str(error))) from None
    if lookup.check_mode == "warning":
        lookup.warn_of_bad_ids(indices, offsets, counts=batch_plan[-1])
    return batch_plan


def embedding_bag_forward(
    plan: list[Tensor],
    cores: Sequence[Tensor],  # of every table in turn, core k [m_k, r_k * n_k * r_{k+1}]
    *,
    offsets: Tensor,  # [F * B + 1]
    lookup: Lookup,
    per_sample_weights: Tensor | None = None,  # [N]
) -> Tensor:  # [B, sum over features of D]
    """Returns the pooled rows, feature after feature: sum_i w_i row_i, for mean over the length."""
    return _ops().embedding_bag_forward(
        plan,
        cores,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
    )


def embedding_bag_backward_dense(
    grad_output: Tensor,  # [B, sum over features of D]
    plan: list[Tensor],
    cores: Sequence[Tensor],
    *,
    offsets: Tensor,
    lookup: Lookup,
    per_sample_weights: Tensor | None = None,
    weights_grad: bool = False,
) -> tuple[list[Tensor], Tensor]:  # like cores, and [N] (or [0] without weights_grad)
    """Returns the gradients of all cores, and of the per-sample weights if asked."""
    return _ops().embedding_bag_backward_dense(
        grad_output.contiguous(),
        plan,
        cores,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
        weights_grad,
    )


def embedding_bag_backward_update(
    grad_output: Tensor,  # [B, sum over features of D]
    plan: list[Tensor],
    cores: Sequence[Tensor],  # stepped in place
    states: Sequence[Tensor],  # like cores for adagrad (stepped in place), none for sgd
    *,
    offsets: Tensor,
    lookup: Lookup,
    optimizer: str,
    learning_rate: float,
    eps: float,
    per_sample_weights: Tensor | None = None,
    weights_grad: bool = False,
) -> Tensor:  # [N] (or [0] without weights_grad)
    """Steps the cores on their gradients in one pass, touching only slices that got one.

    sgd: `w -= lr * g`. adagrad: `s += g * g; w -= lr * g / (sqrt(s) + eps)`. Both leave a slice
    without a gradient as it was, so the step equals torch.optim's.
    """
    return _ops().embedding_bag_backward_update(
        grad_output.contiguous(),
        plan,
        cores,
        states,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
        weights_grad,
        optimizer,
        learning_rate,
        eps,
    )


def embedding_bag(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [F * B + 1] int32 or int64
    *,
    cores: Sequence[Tensor],  # of every table in turn, core k [m_k, r_k * n_k * r_{k+1}]
    lookup: Lookup,
    per_sample_weights: Tensor | None = None,  # [N], of the cores' dtype
) -> Tensor:  # [B, sum over features of D]
    """Returns pooled rows of TT tables, differentiable in the cores and the weights.

    `offsets` are feature-major, as in a KeyedJaggedTensor: the bag of feature f and sample b is
    `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`. An empty bag gives zeros.

    Raises:
        ValueError: for invalid ids or offsets, or weights of another size or dtype.
        RuntimeError: if the compiled operators are missing.

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021, section 4.
    """
    offsets = offsets.contiguous()
    batch_plan = plan(indices, offsets, lookup=lookup)
    weights = None if per_sample_weights is None else per_sample_weights.contiguous()
    return _EmbeddingBag.apply(lookup, batch_plan, offsets, weights, *cores)


class _EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lookup: Lookup,
        batch_plan: list[Tensor],
        offsets: Tensor,
        weights: Tensor | None,
        *cores: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.plan = lookup, batch_plan
        ctx.save_for_backward(offsets, weights, *cores)
        return embedding_bag_forward(
            batch_plan, cores, offsets=offsets, lookup=lookup, per_sample_weights=weights
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        offsets, weights, *cores = ctx.saved_tensors
        weights_grad = ctx.needs_input_grad[3]
        grad_cores, grad_weights = embedding_bag_backward_dense(
            grad_output,
            ctx.plan,
            cores,
            offsets=offsets,
            lookup=ctx.lookup,
            per_sample_weights=weights,
            weights_grad=weights_grad,
        )
        return None, None, None, grad_weights if weights_grad else None, *grad_cores


def cpu_isa() -> str:
    """Returns the instruction set that the CPU kernels use here: generic, avx2 or avx512."""
    return _ops().cpu_isa()


def _ops() -> Any:
    """Returns the operators' namespace, or raises one sentence that says why there is none."""
    if _problem is not None:
        raise RuntimeError(_problem)
    return torch.ops.torchrec_tt


def _fake_plan(
    indices: Tensor, offsets: Tensor, tables: list[int], feature_tables: list[int], check_mode: str
) -> list[Tensor]:
    n = indices.shape[0]
    sizes = (n, n, n, n + 1, n + 1, 4)
    dtypes = (torch.int32, torch.int32, torch.int64, torch.int32, torch.int32, torch.int64)
    return [indices.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


def _fake_forward(
    plan: list[Tensor],
    cores: list[Tensor],
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: list[int],
    feature_tables: list[int],
    pooling: str,
) -> Tensor:
    _check_one_device(cores)
    dims = _embedding_dims(tables)
    batch_size = (offsets.shape[0] - 1) // len(feature_tables)
    return cores[0].new_empty(batch_size, sum(dims[t] for t in feature_tables))


def _fake_backward_dense(
    grad_output: Tensor,
    plan: list[Tensor],
    cores: list[Tensor],
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: list[int],
    feature_tables: list[int],
    pooling: str,
    weights_grad: bool,
) -> tuple[list[Tensor], Tensor]:
    grad_weights = cores[0].new_empty(plan[0].shape[0] if weights_grad else 0)
    return [torch.empty_like(core) for core in cores], grad_weights


def _fake_backward_update(
    grad_output: Tensor,
    plan: list[Tensor],
    cores: list[Tensor],
    states: list[Tensor],
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: list[int],
    feature_tables: list[int],
    pooling: str,
    weights_grad: bool,
    optimizer: str,
    learning_rate: float,
    eps: float,
) -> Tensor:
    return cores[0].new_empty(plan[0].shape[0] if weights_grad else 0)


def _embedding_dims(encoded_tables: list[int]) -> list[int]:
    dims, at = [], 0
    while at < len(encoded_tables):
        d = encoded_tables[at]
        dims.append(math.prod(encoded_tables[at + 3 + d : at + 3 + 2 * d]))
        at += 2 + 3 * d
    return dims


def _check_one_device(cores: list[Tensor]) -> None:
    """The dispatcher takes a meta tensor among others for a wish for no values."""
    devices = {core.device for core in cores}
    if len(devices) > 1:
        raise ValueError(f"cores must be on one device, got {sorted(map(str, devices))}")


def _load() -> str | None:
    """Loads the library and registers the fakes; returns what is wrong, if anything is."""
    try:
        load()
    except RuntimeError as error:
        return str(error)
    for name, fake in (
        ("plan", _fake_plan),
        ("embedding_bag_forward", _fake_forward),
        ("embedding_bag_backward_dense", _fake_backward_dense),
        ("embedding_bag_backward_update", _fake_backward_update),
    ):
        torch.library.register_fake(f"torchrec_tt::{name}", fake)
    return None


_problem = _load()
