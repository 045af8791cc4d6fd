"""What `apply_optimizer_in_backward` chose for the cores of Tensor-Train tables."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchrec_tt.distributed.fused_params import check_fused_params
from torchrec_tt.modules.embedding_modules import TTCollection

_SPEED_ONLY = ("foreach", "fused", "capturable", "differentiable")  # of torch.optim's arguments


def applied_optimizer(
    cores: Sequence[nn.Parameter], *, table: str
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Returns the class and the arguments, as FBGEMM names them, None where nothing was applied.

    Raises:
        ValueError: if the cores of the table have different ones, or an argument would change the
            update in a way that no fused optimizer can follow.
    """
    applied = [
        list(
            zip(
                getattr(core, "_optimizer_classes", []),
                getattr(core, "_optimizer_kwargs", []),
                strict=True,
            )
        )
        for core in cores
    ]
    if any(other != applied[0] for other in applied) or len(applied[0]) > 1:
        raise ValueError(
            f"apply_optimizer_in_backward must be called once with all cores of a Tensor-Train "
            f"table, got {applied} for table {table!r}"
        )
    if not applied[0]:
        return None
    ((optimizer, kwargs),) = applied[0]
    return optimizer, _as_fbgemm_names(optimizer, kwargs, table=table)


def check_applied_optimizers(
    module: TTCollection,
    plan: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
) -> None:
    """Checks what is applied, and warns where `fused_params` say something else.

    `apply_optimizer_in_backward` precedes them, setting by setting, as in TorchRec.

    Raises:
        ValueError: for a setting that no kernel reads.
    """
    conflicts = []
    for table in module.tt_shapes:
        applied = applied_optimizer(list(module.table_modules()[table].tt_cores), table=table)
        if applied is None or plan[table].sharding_type == ShardingType.DATA_PARALLEL.value:
            continue
        settings = {"optimizer": optimizer_type_to_emb_opt_type(applied[0]), **applied[1]}
        if "lr" in settings:
            settings["learning_rate"] = settings.pop("lr")
        check_fused_params(settings)
        conflicts += [
            f"{name} of {table!r} is {value}, not {fused_params[name]}"
            for name, value in settings.items()
            if fused_params and name in fused_params and fused_params[name] != value
        ]
    if conflicts:
        warnings.warn(
            "apply_optimizer_in_backward precedes the sharder's fused_params: "
            + "; ".join(conflicts),
            stacklevel=2,
        )


def _as_fbgemm_names(
    optimizer: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], *, table: str
) -> dict[str, Any]:
    """The arguments without those that say what is the default anyway."""
    parameters = inspect.signature(optimizer.__init__).parameters
    result = {}
    for name, value in kwargs.items():
        if name in ("lr", "eps", "weight_decay") or name not in parameters:
            result[name] = value  # others are FBGEMM's own, for torchrec.optim's placeholders
        elif name == "betas":
            result["beta1"], result["beta2"] = value
        elif name == "decoupled_weight_decay":
            result["weight_decay_mode"] = WeightDecayMode.DECOUPLE if value else WeightDecayMode.L2
        elif name not in _SPEED_ONLY and value != parameters[name].default:
            raise ValueError(
                f"{name} must be left at {parameters[name].default!r} in "
                f"apply_optimizer_in_backward with a Tensor-Train table, got {value!r} for "
                f"table {table!r}"
            )
    return result
