"""The optimizer that steps model-parallel cores in backward, as TorchRec configures and sees it."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, TensorProperties
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.optim.fused import FusedOptimizer

from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.optim import CoreOptimizer, OptimizerName, TTOptimizerConfig

_OPTIMIZERS: dict[EmbOptimType, OptimizerName] = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
    EmbOptimType.ADAM: "adam",
}
_UNSUPPORTED = (
    "max_norm",
    "counter_based_regularization",
    "cowclip_regularization",
    "global_weight_decay",
    "ensemble_mode",
    "emainplace_mode",
    "extra_optimizer_config",
    "use_rowwise_bias_correction",
)
_WEIGHT_DECAY_MODES = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
_NUMBERS = ("learning_rate", "eps", "weight_decay", "beta1", "beta2", "max_gradient")


def core_optimizer_config(fused_params: Mapping[str, Any] | None) -> TTOptimizerConfig:
    """Returns the cores' optimizer that a sharder's `fused_params` ask for.

    `optimizer` (default EXACT_SGD), `learning_rate`, `eps`, `beta1`, `beta2`, `weight_decay`,
    `weight_decay_mode`, `gradient_clipping` with `max_gradient` (default 1) and
    `stochastic_rounding` are read; the defaults are those of TTOptimizerConfig and weight decay is
    coupled unless the mode is DECOUPLE. What only the kernels of regular tables know (cache and
    precision settings) is left to them.

    Raises:
        ValueError: if the optimizer is not supported for Tensor-Train tables, or a setting would
            change the update in a way that the cores' optimizer cannot follow.
    """
    fused_params = fused_params or {}
    check_optimizer_params(fused_params)
    _check_supported(fused_params)
    given = {name: float(fused_params[name]) for name in _NUMBERS if name in fused_params}
    max_gradient = given.pop("max_gradient", 1.0)
    betas = (given.pop("beta1", 0.9), given.pop("beta2", 0.999))
    return TTOptimizerConfig(
        optimizer=_OPTIMIZERS[fused_params.get("optimizer", EmbOptimType.EXACT_SGD)],
        betas=betas,
        decoupled_weight_decay=fused_params.get("weight_decay_mode") == WeightDecayMode.DECOUPLE,
        stochastic_rounding=bool(fused_params.get("stochastic_rounding", True)),
        max_gradient=max_gradient if fused_params.get("gradient_clipping") else None,
        **given,
    )


def check_optimizer_params(fused_params: Mapping[str, Any]) -> None:
    """Raises ValueError for an optimizer or a number that no kernel takes for one."""
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if not isinstance(optimizer, EmbOptimType):
        raise ValueError(f"fused_params['optimizer'] must be an EmbOptimType, got {optimizer!r}")
    for name in _NUMBERS:
        value = fused_params.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"fused_params[{name!r}] must be a number, got {value!r}")


def _check_supported(fused_params: Mapping[str, Any]) -> None:
    """Raises ValueError for what FBGEMM knows but the cores' optimizer does not."""
    optimizer = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
    if optimizer not in _OPTIMIZERS:
        raise ValueError(
            f"fused_params['optimizer'] must be one of {[o.name for o in _OPTIMIZERS]} for "
            f"Tensor-Train tables that are not data_parallel, got {optimizer!r}"
        )
    for name in _UNSUPPORTED:
        if fused_params.get(name):
            raise ValueError(
                f"fused_params[{name!r}] must be unset for Tensor-Train tables, "
                f"got {fused_params[name]!r}"
            )
    mode, weight_decay = fused_params.get("weight_decay_mode"), fused_params.get("weight_decay")
    if mode is not None and mode not in _WEIGHT_DECAY_MODES:
        raise ValueError(
            f"fused_params['weight_decay_mode'] must be one of "
            f"{[m.name for m in _WEIGHT_DECAY_MODES]} for Tensor-Train tables, got {mode!r}"
        )
    if mode == WeightDecayMode.NONE and weight_decay:
        raise ValueError(
            f"fused_params['weight_decay'] must be 0 with the weight_decay_mode NONE for "
            f"Tensor-Train tables, got {weight_decay}; L2 couples it, DECOUPLE does not"
        )


class TTFusedOptimizer(FusedOptimizer):
    """A CoreOptimizer as TorchRec wants to see it: keyed by name, stepping in backward.

    Learning rate schedules write to `param_groups`, which are the CoreOptimizer's own.

    Args:
        optimizer: the optimizer that the embedding kernel steps.
        params: cores by their name in the state dict.
        owned: the placement of cores with one owner; their state becomes a ShardedTensor or
            DTensor. State of replicated cores stays a plain tensor.
        pg: the process group of the ShardedTensors.
        mesh: where state dicts are to hold DTensors, their mesh; else None.
        row_caches: of the same tables; those without an optimizer of their own follow this one.
    """

    def __init__(
        self,
        optimizer: CoreOptimizer,
        *,
        params: dict[str, nn.Parameter],
        owned: Mapping[str, Any],
        pg: dist.ProcessGroup | None,
        mesh: DeviceMesh | None = None,
        row_caches: Sequence[RowCache] = (),
    ) -> None:
        state: dict[Tensor, dict[str, Any]] = {}
        for name, param in params.items():
            state[param] = {
                key: one_owner_tensor(
                    value,
                    size=value.shape,
                    dtype=value.dtype,
                    placement=owned[name],
                    pg=pg,
                    mesh=mesh,
                )
                if name in owned
                else value
                for key, value in optimizer.state.get(param, {}).items()
            }
            param._in_backward_optimizers = [self]  # keeps the core from the dense optimizer
        super().__init__(params, state, optimizer.param_groups)
        self._optimizer = optimizer
        self._row_caches = [cache for cache in row_caches if cache.config.optimizer is None]

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Does nothing: the state is whole from the start."""

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of steps taken, where the optimizer counts them."""
        for state in (
            *self._optimizer.state.values(),
            *(dict(cache.named_buffers()) for cache in self._row_caches),
        ):
            if "step" in state:
                state["step"].fill_(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Sets `lr`, `eps`, `beta1`, `beta2` or `weight_decay`, as FBGEMM's method does.

        Raises:
            ValueError: for another name, or a value out of range.
        """
        unknown = set(params_dict) - {"lr", "eps", "beta1", "beta2", "weight_decay"}
        if unknown:
            raise ValueError(
                f"params_dict must have the keys lr, eps, beta1, beta2, weight_decay, "
                f"got {sorted(unknown)}"
            )
        values: dict[str, Any] = dict(params_dict)
        config = self._optimizer.config
        lr = values.pop("lr", self._optimizer.learning_rate)
        betas = (values.pop("beta1", config.betas[0]), values.pop("beta2", config.betas[1]))
        self._optimizer.config = dataclasses.replace(
            config, learning_rate=lr, betas=betas, **values
        )
        for group in self.param_groups:
            group["lr"] = lr
        for cache in self._row_caches:
            cache.optimizer = self._optimizer.config

    def step(self, closure: Any = None) -> None:
        """Does nothing: the step was taken in backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: the cores have no gradients."""


def one_owner_tensor(
    tensor: Tensor | None,  # the whole tensor on its owner, None elsewhere
    *,
    size: torch.Size,
    dtype: torch.dtype,
    placement: Any,
    pg: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
) -> ShardedTensor | DTensor:
    """Returns what state dicts hold of a tensor with one owner; no communication.

    A ShardedTensor of one shard or, given a `mesh`, a DTensor in the form that TorchRec gives a
    table-wise table: Replicate on paper, with the shard on its owner and none elsewhere.
    """
    if mesh is not None:
        local = LocalShardsWrapper(
            [] if tensor is None else [tensor.detach()],
            [] if tensor is None else [(0,) * len(size)],
        )
        whole = DTensor.from_local(
            local,
            device_mesh=mesh,
            placements=[Replicate()] * mesh.ndim,
            run_check=False,
            shape=size,
            stride=torch.empty(size, device="meta").stride(),
        )
        if tensor is None:  # TorchRec's empty shard is 2-D, which dcp.load compares with 1-D ones
            whole._local_tensor._storage_meta.chunks.clear()
        return whole
    shard = ShardMetadata([0] * len(size), list(size), placement)
    properties = TensorProperties(dtype=dtype)
    metadata = EnumerableShardingSpec([shard]).build_metadata(size, properties)
    shards = [] if tensor is None else [Shard(tensor.detach(), shard)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=shards, sharded_tensor_metadata=metadata, process_group=pg
    )


def shards_on_this_rank(value: Any) -> list[Tensor] | None:
    """Returns this rank's shards of a ShardedTensor or of TorchRec's DTensor, None of others."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, DTensor) and isinstance(value.to_local(), LocalShardsWrapper):
        return value.to_local().local_shards()
    return None


def whole_size(value: Any) -> torch.Size:
    """Returns the size of all shards together."""
    return value.metadata().size if isinstance(value, ShardedTensor) else value.shape


def owned_part(value: Any, *, key: str, size: Sequence[int], is_owner: bool) -> Tensor | None:
    """Returns what this rank keeps of a tensor with one owner, None where that is another.

    Raises:
        ValueError: for another size, on every rank; on the owner, if it is whole elsewhere.
    """
    got = whole_size(value)
    if tuple(got) != tuple(size):
        raise ValueError(f"{key} must have the size {tuple(size)}, got {tuple(got)}")
    if not is_owner:
        return None
    shards = shards_on_this_rank(value)
    if shards is None:
        return value
    if len(shards) != 1 or tuple(shards[0].shape) != tuple(size):
        raise ValueError(
            f"{key} must be whole on this rank, got a {type(value).__name__} placed for another "
            "plan: load it through torch.distributed.checkpoint"
        )
    return shards[0]
