"""What a sharder's `fused_params` may say for a collection with Tensor-Train tables.

TorchRec hands them to the kernels, and these exist on some ranks only: what one of them would not
take is refused here, on every rank.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, get_args

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed import fused_params as torchrec_fused_params
from torchrec.distributed.types import KeyValueParams, ParameterSharding, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import DataType

from torchrec_tt.distributed.fused_optimizer import check_optimizer_params
from torchrec_tt.modules.embedding_modules import TTCollection
from torchrec_tt.ops.lookup import CheckMode, Precision

_CHECK_MODES: dict[str, CheckMode] = {"FATAL": "fatal", "WARNING": "warning", "IGNORE": "ignore"}
PRECISION = "precision"  # of TT tables' products on CUDA; no kernel of regular tables reads it
_TORCHREC_NAMES = (  # read by TorchRec under no constant of its own; the last three since 1.9
    "_batch_key",
    "embedding_cache_mode",
    "use_one_tbe_per_table",
    "bag_size_hints",
    "fused_bounds_check",
    "pooled_lookup_kernel",
)


def check_fused_params(fused_params: Mapping[str, Any] | None) -> None:
    """Raises ValueError, naming the key, where `fused_params` do not suit Tensor-Train tables."""
    fused_params = fused_params or {}
    known = _known_names()
    for name in fused_params:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(
                f"fused_params must have keys that TorchRec or FBGEMM read, got {name!r}"
                + (f"; the nearest is {near[0]!r}" if near else "")
            )
    check_optimizer_params(fused_params)
    check_mode_of(fused_params)
    _check_precision(fused_params.get(PRECISION))
    check_output_dtype(fused_params.get("output_dtype", DataType.FP32))


def check_regular_optimizers(
    module: TTCollection,
    plan: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
) -> None:
    """Raises ValueError, naming the table, where FBGEMM has no such optimizer on the CPU.

    It would say so on the ranks of the table alone.
    """
    for config in module.table_configs():
        sharding_type = plan[config.name].sharding_type
        if config.name in module.tt_shapes or sharding_type == ShardingType.DATA_PARALLEL.value:
            continue
        weight = module.table_modules()[config.name].weight
        optimizer = (fused_params or {}).get("optimizer", EmbOptimType.EXACT_SGD)
        if hasattr(weight, "_optimizer_classes"):
            optimizer = optimizer_type_to_emb_opt_type(weight._optimizer_classes[0])
        refusal = _refusal_on_the_cpu(optimizer)
        if refusal:
            raise ValueError(
                f"fused_params['optimizer'] must be one that FBGEMM has on the CPU for regular "
                f"tables, got {optimizer!r} for table {config.name!r} ({refusal}); "
                "apply_optimizer_in_backward can give Tensor-Train tables another"
            )


def check_mode_of(fused_params: Mapping[str, Any]) -> CheckMode:
    """Returns what to do with bad ids as `bounds_check_mode` says; FATAL where it says nothing.

    Raises:
        ValueError: for a mode without a check.
    """
    mode = fused_params.get("bounds_check_mode", BoundsCheckMode.FATAL)
    name = mode.name.removeprefix("V2_") if isinstance(mode, BoundsCheckMode) else None
    if name not in _CHECK_MODES:
        raise ValueError(
            f"bounds_check_mode must be one of {list(_CHECK_MODES)} for Tensor-Train tables, "
            f"got {mode!r}"
        )
    return _CHECK_MODES[name]


def precision_of(
    own: Precision | None, fused_params: Mapping[str, Any], *, table: str
) -> Precision | None:
    """Returns a table's precision: its `own`, from its config, or that of `fused_params`.

    Raises:
        ValueError: for an unknown one, or two that differ.
    """
    given = fused_params.get(PRECISION)
    _check_precision(given)
    if None not in (own, given) and own != given:
        raise ValueError(
            f"precision must be the same in fused_params and in the table's config, got {given!r} "
            f"and {own!r} for table {table!r}"
        )
    return own or given


def _check_precision(precision: object) -> None:
    if precision not in (None, *get_args(Precision)):
        raise ValueError(
            f"fused_params['precision'] must be None or one of {get_args(Precision)}, "
            f"got {precision!r}"
        )


def check_output_dtype(output_dtype: object, *, table: str | None = None) -> None:
    """Raises ValueError unless `output_dtype` is FP32.

    TorchRec sends FP32 from ranks without tables, whatever the others send: gloo aborts then.
    """
    if output_dtype not in (DataType.FP32, SparseType.FP32):
        raise ValueError(
            f"output_dtype must be FP32 in a collection with Tensor-Train tables, "
            f"got {output_dtype!r}" + (f" for table {table!r}" if table else "")
        )


@functools.cache
def _refusal_on_the_cpu(optimizer: EmbOptimType) -> str | None:
    """What FBGEMM says of the optimizer, asked with a table of one row; None: nothing."""
    row = (1, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    try:
        SplitTableBatchedEmbeddingBagsCodegen([row], optimizer=optimizer)
    except AssertionError as error:
        return str(error)
    return None


@functools.cache
def _known_names() -> tuple[str, ...]:
    kernels = (SplitTableBatchedEmbeddingBagsCodegen, SSDTableBatchedEmbeddingBags)
    names = {name for kernel in kernels for name in inspect.signature(kernel.__init__).parameters}
    names |= {field.name for field in dataclasses.fields(KeyValueParams)}
    names |= {v for k, v in vars(torchrec_fused_params).items() if k.startswith("FUSED_PARAM_")}
    names |= {v for k, v in vars(batched_embedding_kernel).items() if k.endswith("_STR")}
    return tuple(sorted({*names, *_TORCHREC_NAMES, PRECISION} - {"self"}))
