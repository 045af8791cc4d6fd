"""Pooled TT lookup over a batch of tables: operators, their fakes and autograd."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrec_tt.ops.library import operators, register_fake
from torchrec_tt.ops.lookup import Lookup


def plan(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [F * B + 1] int32 or int64
    *,
    lookup: Lookup,
    cache_ids: Sequence[Tensor] = (),  # of every table in turn, [C]; C = 0: no cache
) -> list[Tensor]:
    """Returns the batch's plan: its ids sorted by (table, mid, head, last digit), once.

    Six tensors of upper-bound size: order [N], inverse [N], row_starts [N + 1] and prefix_starts
    [N + 1] (int32), row_keys [N] (int64), and counts [4] (int64: unique rows, those that go
    through the cores, unique prefixes, ids out of range); csrc/cpu/plan.cpp says what they hold.

    `cache_ids` are the rows in each slot of a table's cache, `row_offset + id`, and -1 where it is
    empty; C is a multiple of 8, and csrc/row_tags.h says in which slots a row may lie. Cached rows
    come last in the plan and do not go through the cores.

    Raises:
        ValueError: if offsets do not start at 0, decrease or do not end at N, an id is outside its
            table with check_mode "fatal", or cache_ids have another dtype or shape. On CUDA the
            first three are raised by the next operator on the device, see `check_errors`.
    """
    check_tensors(indices=indices, offsets=offsets)
    try:
        batch_plan = operators().plan(
            indices.contiguous(),
            offsets.contiguous(),
            lookup.encoded_tables,
            lookup.feature_tables,
            lookup.check_mode,
            cache_ids,
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
    cached_rows: Sequence[Tensor] = (),  # of every table in turn, [C, D]; those of the plan
) -> Tensor:  # [B, sum over features of D]
    """Returns the pooled rows, feature after feature: sum_i w_i row_i, for mean over the length.

    Without pooling, the rows themselves, [N, D]. Float64 for float64 cores, else float32.
    Cached rows are float32, bfloat16 or float16, and float64 for float64 cores.
    """
    if per_sample_weights is not None and per_sample_weights.dim() != 1:
        raise ValueError(
            f"per_sample_weights must have 1 dimension, got {tuple(per_sample_weights.shape)}"
        )
    return operators().embedding_bag_forward(
        plan,
        cores,
        cached_rows,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
        *_cuda_settings(cores[0], lookup)[:1],
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
    cached_rows: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tensor]:  # like cores, and [N] (or [0] without weights_grad)
    """Returns the gradients of all cores, and of the per-sample weights if asked.

    Cached rows give the cores no gradient: `step_cached_rows` trains them.
    """
    return operators().embedding_bag_backward_dense(
        grad_output.contiguous(),
        plan,
        cores,
        cached_rows,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
        weights_grad,
        *_cuda_settings(cores[0], lookup),
    )


def embedding_bag_backward_update(
    grad_output: Tensor,  # [B, sum over features of D]
    plan: list[Tensor],
    cores: Sequence[Tensor],  # stepped in place
    states: Sequence[Tensor],  # of every core in turn, stepped in place
    *,
    offsets: Tensor,
    lookup: Lookup,
    optimizer: str,
    learning_rate: float,
    eps: float,
    rounding_seeds: Sequence[int] = (),
    per_sample_weights: Tensor | None = None,
    weights_grad: bool = False,
    cached_rows: Sequence[Tensor] = (),
) -> Tensor:  # [N] (or [0] without weights_grad)
    """Steps the cores on their gradients in one pass, touching only slices that got one.

    sgd, adagrad and rowwise_adagrad leave a slice without a gradient as it was, so the step equals
    that of `step_cores`, whose states and seeds these are. adam does not and is refused.
    """
    return operators().embedding_bag_backward_update(
        grad_output.contiguous(),
        plan,
        cores,
        states,
        cached_rows,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
        weights_grad,
        optimizer,
        learning_rate,
        eps,
        rounding_seeds,
        *_cuda_settings(cores[0], lookup),
    )


def embedding_bag(
    indices: Tensor,  # [N] int32 or int64
    offsets: Tensor,  # [F * B + 1] int32 or int64
    *,
    cores: Sequence[Tensor],  # of every table in turn, core k [m_k, r_k * n_k * r_{k+1}]
    lookup: Lookup,
    per_sample_weights: Tensor | None = None,  # [N], of the output's dtype
) -> Tensor:  # [B, sum over features of D]; without pooling [N, D]
    """Returns pooled rows of TT tables, differentiable in the cores and the weights.

    Sums, and so output and gradients, are float32 for float32, bfloat16 and float16 cores.

    `offsets` are feature-major, as in a KeyedJaggedTensor: the bag of feature f and sample b is
    `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`. An empty bag gives zeros.
    Without pooling, they only say which indices are of which feature.

    Raises:
        ValueError: for invalid ids or offsets, or weights of another size or dtype.
        RuntimeError: if the compiled operators are missing.

    Reference:
        Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
        Models", MLSys 2021, section 4.
    """
    check_tensors(per_sample_weights=per_sample_weights)
    batch_plan = plan(indices, offsets, lookup=lookup)
    weights = None if per_sample_weights is None else per_sample_weights.contiguous()
    return _EmbeddingBag.apply(lookup, batch_plan, offsets.contiguous(), weights, *cores)


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


def check_tensors(**arguments: object) -> None:
    """Raises ValueError for what is neither a tensor nor None, which was left out."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def sum_dtype(core: Tensor) -> torch.dtype:
    """Returns the dtype of sums, outputs, gradients and weights: float32 but for float64 cores."""
    return torch.float64 if core.dtype == torch.float64 else torch.float32


def check_errors(device: torch.device | int | None = None) -> None:
    """Waits for a CUDA device and raises what a batch on it did wrong, if nothing raised it yet.

    On CUDA an id out of range with check_mode "fatal", and wrong offsets, are noted on the device
    and raised by the next operator there, so that no operator waits. This raises them at once,
    after the last step of a loop, say. Without CUDA it does nothing.

    Args:
        device: None: the current one.

    Raises:
        ValueError: for the first such fault; the lookup's table is named by its number.
    """
    if not torch.cuda.is_available():
        return
    index = torch.cuda.current_device() if device is None else torch.device(device).index
    operators().check_errors(torch.cuda.current_device() if index is None else index)


def cuda_architectures() -> str:
    """Returns the compute capabilities that the operators were built for, "" without CUDA."""
    return operators().cuda_architectures()


def _cuda_settings(core: Tensor, lookup: Lookup) -> tuple[str, bool] | tuple[()]:
    """Precision and determinism, where the kernels have a choice."""
    if not core.is_cuda:
        return ()
    precision = lookup.precision or torch.get_float32_matmul_precision()
    return precision, torch.are_deterministic_algorithms_enabled()


def cpu_isa() -> str:
    """Returns the instruction set that the CPU kernels use here: generic, avx2 or avx512."""
    return operators().cpu_isa()


def cpu_peak_gflops() -> float:
    """Returns what one core can compute here, in GFLOP/s: multiply-adds of registers alone."""
    return operators().cpu_peak_gflops()


@register_fake("plan")
def _fake_plan(
    indices: Tensor,
    offsets: Tensor,
    tables: list[int],
    feature_tables: list[int],
    check_mode: str,
    cache_ids: list[Tensor],
) -> list[Tensor]:
    _check_one_device(indices.device, offsets=[offsets], cache_ids=cache_ids)
    n = indices.shape[0]
    sizes = (n, n, n, n + 1, n + 1, 4)
    dtypes = (torch.int32, torch.int32, torch.int64, torch.int32, torch.int32, torch.int64)
    return [indices.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


@register_fake("embedding_bag_forward")
def _fake_forward(
    plan: list[Tensor],
    cores: list[Tensor],
    cached_rows: list[Tensor],
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: list[int],
    feature_tables: list[int],
    pooling: str,
    precision: str = "highest",
) -> Tensor:
    device = cores[0].device
    _check_one_device(device, cores=cores)
    if device.type != "meta":  # cores without values give an output without any
        weights = [] if per_sample_weights is None else [per_sample_weights]
        _check_one_device(device, indices=plan, offsets=[offsets], per_sample_weights=weights)
        _check_one_device(device, cached_rows=cached_rows)
    dims = _embedding_dims(tables)
    if pooling == "none":
        return cores[0].new_empty(plan[0].shape[0], dims[0], dtype=sum_dtype(cores[0]))
    batch_size = (offsets.shape[0] - 1) // len(feature_tables)
    columns = sum(dims[t] for t in feature_tables)
    return cores[0].new_empty(batch_size, columns, dtype=sum_dtype(cores[0]))


@register_fake("embedding_bag_backward_dense")
def _fake_backward_dense(
    grad_output: Tensor,
    plan: list[Tensor],
    cores: list[Tensor],
    cached_rows: list[Tensor],
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: list[int],
    feature_tables: list[int],
    pooling: str,
    weights_grad: bool,
    precision: str = "highest",
    deterministic: bool = False,
) -> tuple[list[Tensor], Tensor]:
    dtype = sum_dtype(cores[0])
    grad_weights = cores[0].new_empty(plan[0].shape[0] if weights_grad else 0, dtype=dtype)
    return [torch.empty_like(core, dtype=dtype) for core in cores], grad_weights


@register_fake("embedding_bag_backward_update")
def _fake_backward_update(
    grad_output: Tensor,
    plan: list[Tensor],
    cores: list[Tensor],
    states: list[Tensor],
    cached_rows: list[Tensor],
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    tables: list[int],
    feature_tables: list[int],
    pooling: str,
    weights_grad: bool,
    optimizer: str,
    learning_rate: float,
    eps: float,
    rounding_seeds: list[int],
    precision: str = "highest",
    deterministic: bool = False,
) -> Tensor:
    return cores[0].new_empty(plan[0].shape[0] if weights_grad else 0, dtype=sum_dtype(cores[0]))


def _embedding_dims(encoded_tables: list[int]) -> list[int]:
    dims, at = [], 0
    while at < len(encoded_tables):
        d = encoded_tables[at]
        dims.append(math.prod(encoded_tables[at + 3 + d : at + 3 + 2 * d]))
        at += 2 + 3 * d
    return dims


def _check_one_device(expected: torch.device, **tensors: Sequence[Tensor]) -> None:
    """The dispatcher takes a meta tensor among others for a wish for no values."""
    for name, group in tensors.items():
        for tensor in group:
            if tensor.device != expected:
                raise ValueError(
                    f"{name} must be on the device of the other tensors, {expected}, "
                    f"got {tensor.device}"
                )
