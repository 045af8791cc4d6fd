"""TTEmbeddingBagCollection sharded: the sharder and the module it makes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt.distributed.embedding_kernel import TTBatchedDenseEmbeddingBag
from torchrec_tt.distributed.fused_optimizer import core_optimizer_config, one_owner_tensor
from torchrec_tt.distributed.fused_params import check_fused_params, check_mode_of
from torchrec_tt.distributed.sharding import create_tt_sharding
from torchrec_tt.distributed.sharding_plan import (
    check_env,
    check_plan,
    shardable_parameters,
    with_tt_kernel,
)
from torchrec_tt.modules.embedding_modules import (
    TTEmbeddingBagCollection,
    check_one_batch_size,
    reset_cores_,
    tt_configs,
)


class ShardedTTEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """ShardedEmbeddingBagCollection in which tables may be Tensor-Train tables.

    A TT table's cores are whole on every rank that holds a shard of it: on one rank for
    TABLE_WISE, on all for ROW_WISE and DATA_PARALLEL. In the state dict, under
    `embedding_bags.<table>.tt_cores.<k>` as unsharded, cores with one owner are ShardedTensors
    and replicated cores plain tensors.

    Values: a module on `meta` is initialised as unsharded under rank 0's `torch.initial_seed()`.
    Of a module with values the cores keep those of rank 0; regular tables on the CPU are drawn
    anew, as TorchRec does.

    Raises:
        ValueError: if the plan or `fused_params` ask for what a TT table cannot have; the same
            on every rank, before any collective.
        NotImplementedError: for 2D parallelism and DTensor state dicts.
    """

    _embedding_bag_configs: list[EmbeddingBagConfig]
    _owned_cores: dict[str, ShardedTensor] | None = None  # None until the cores are registered

    def __init__(
        self,
        module: TTEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        check_env(env)
        check_plan(
            module,
            table_name_to_parameter_sharding,
            world_size=env.world_size,
            pg=env.process_group,
        )
        if module.tt_shapes:
            check_fused_params(fused_params)
        plan = with_tt_kernel(module, table_name_to_parameter_sharding)
        super().__init__(module, plan, env, fused_params, device, **kwargs)
        if self._owned_cores is not None and module.device.type != "meta":
            self._copy_cores_from_rank_0(module)

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: TTEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        shapes = module.tt_shapes
        infos_by_type = super().create_grouped_sharding_infos(
            _LogicalWeights(module, prefix=prefix, suffix=suffix),
            table_name_to_parameter_sharding,
            prefix,
            fused_params,
            suffix,
        )
        for sharding_type, infos in infos_by_type.items():
            for info in infos:
                if info.embedding_config.name not in shapes:
                    continue
                info.param._tt_shape = shapes[info.embedding_config.name]
                info.fused_params = {  # TorchRec groups tables by them, so they must hash
                    k: tuple(v) if isinstance(v, list) else v for k, v in info.fused_params.items()
                }
                check_mode_of(info.fused_params)
                if sharding_type != ShardingType.DATA_PARALLEL.value:
                    core_optimizer_config(info.fused_params)
        return infos_by_type

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        shapes = {
            info.embedding_config.name: info.param._tt_shape
            for info in sharding_infos
            if hasattr(info.param, "_tt_shape")
        }
        if not shapes:  # regular tables only: stock from here on
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        return create_tt_sharding(
            sharding_infos,
            shapes=shapes,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Distributes the features.

        Raises:
            NotImplementedError: if the features have different batch sizes (VBE).
        """
        check_one_batch_size(features)
        return super().input_dist(ctx, features)

    def reset_parameters(self) -> None:
        """Draws every table anew, TT tables as the unsharded collection does."""
        configs = self._embedding_bag_configs
        try:  # the stock method wants a `weight` of every table
            self._embedding_bag_configs = _regular_configs(configs)
            super().reset_parameters()
        finally:
            self._embedding_bag_configs = configs
        if self._owned_cores is not None:
            self._reset_cores()

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "resharding a TTEmbeddingBagCollection in place is not supported; save it with "
            "torch.distributed.checkpoint and load it under the new plan"
        )

    @property
    def unsharded_module_type(self) -> type[TTEmbeddingBagCollection]:
        return TTEmbeddingBagCollection

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        owners = {t.name: k for k in self._tt_kernels() for t in k.config.embedding_tables}
        owned: dict[str, ShardedTensor] = {}
        for config in tt_configs(self._embedding_bag_configs):
            kernel = owners.get(config.name)
            cores = kernel.cores(config.name) if kernel else None
            owned.update(self._register_cores(config.name, cores))
        self._owned_cores = owned
        if not skip_registering:
            self._register_state_dict_hook(_put_owned_cores)
            self._register_load_state_dict_pre_hook(_take_local_cores, with_module=True)
        self._reset_cores()

    def _tt_kernels(self) -> Iterator[TTBatchedDenseEmbeddingBag]:
        for lookup in self._lookups:
            unwrapped = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for kernel in unwrapped._emb_modules:
                if isinstance(kernel, TTBatchedDenseEmbeddingBag):
                    yield kernel

    def _register_cores(
        self, table: str, cores: nn.ParameterList | None
    ) -> dict[str, ShardedTensor]:
        """Puts `cores` (None on ranks without the table) where the unsharded module has them.

        Returns those that have one owner, by state dict key.
        """
        shapes = self._table_name_to_config[table].tt_shape.core_shapes
        registered = nn.ParameterList(cores or [_placeholder(self._device) for _ in shapes])
        self.embedding_bags[table].tt_cores = registered
        sharding = self.module_sharding_plan[table]
        if sharding.sharding_type != ShardingType.TABLE_WISE.value:
            return {}
        return {
            f"embedding_bags.{table}.tt_cores.{k}": one_owner_tensor(
                cores[k] if cores else None,
                size=torch.Size(shape),
                placement=sharding.sharding_spec.shards[0].placement,
                pg=self._env.process_group,
            )
            for k, shape in enumerate(shapes)
        }

    def _reset_cores(self) -> None:
        if self._device is not None and self._device.type == "meta":
            return
        seed = [torch.initial_seed()]
        _broadcast_from_rank_0(seed, pg=self._env.process_group)
        for config in tt_configs(self._embedding_bag_configs):
            cores = self.embedding_bags[config.name].tt_cores
            if cores[0].numel():
                reset_cores_(cores, config=config, seed=seed[0])

    @torch.no_grad()
    def _copy_cores_from_rank_0(self, module: TTEmbeddingBagCollection) -> None:
        pg = self._env.process_group
        for table in module.tt_shapes:
            own = self.embedding_bags[table].tt_cores
            for core, source in zip(own, module.embedding_bags[table].tt_cores, strict=True):
                values = source.detach().to(core.device, copy=True)
                dist.broadcast(values, src=dist.get_global_rank(pg, 0), group=pg)
                if core.numel():
                    core.copy_(values)


class TTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards a TTEmbeddingBagCollection; pass it beside `get_default_sharders()`.

    `fused_params` go to regular tables as to TorchRec's own sharder. TT tables take `optimizer`
    (SGD, EXACT_SGD or EXACT_ADAGRAD), `learning_rate`, `eps`, `weight_decay` and
    `bounds_check_mode` (default FATAL) from them; data-parallel TT tables take no optimizer: they
    are ordinary parameters. Where a collection has TT tables, `output_dtype` must be FP32 and a key
    that no kernel knows is refused.

    Example:
        >>> sharders = [TTEmbeddingBagCollectionSharder(
        ...     fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1})]
        >>> plan = tt_planner(topology, batch_size=64).collective_plan(model, sharders)
        >>> model = DistributedModelParallel(model, sharders=sharders, plan=plan)
    """

    def shard(
        self,
        module: TTEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTTEmbeddingBagCollection:
        order = getattr(self, "_sharded_module_order_overwrite", None)  # since torchrec 1.8
        return ShardedTTEmbeddingBagCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **({"sharded_module_order_overwrite": order} if order else {}),
        )

    def shardable_parameters(self, module: TTEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        return shardable_parameters(module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the stock types, and ROW_WISE on the CPU too, where TorchRec leaves it out."""
        types = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*types, ShardingType.ROW_WISE.value]))

    def reshard(self, *args: Any, **kwargs: Any) -> ShardedTTEmbeddingBagCollection:
        raise NotImplementedError(
            "resharding a TTEmbeddingBagCollection in place is not supported; save it with "
            "torch.distributed.checkpoint and load it under the new plan"
        )

    @property
    def module_type(self) -> type[TTEmbeddingBagCollection]:
        return TTEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedTTEmbeddingBagCollection]:
        return ShardedTTEmbeddingBagCollection


class _LogicalWeights:
    """A collection as `create_grouped_sharding_infos` reads it: every table with a weight."""

    def __init__(
        self, module: TTEmbeddingBagCollection, *, prefix: str, suffix: str | None
    ) -> None:
        self._module = module
        ending = "" if suffix is None else f".{suffix}"
        self._weights = {
            f"{prefix}{table}{ending}": weight
            for table, weight in shardable_parameters(module).items()
        }

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._module.embedding_bag_configs()

    def is_weighted(self) -> bool:
        return self._module.is_weighted()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._weights.items()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)


def _regular_configs(configs: list[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    tt = {config.name for config in tt_configs(configs)}
    return [config for config in configs if config.name not in tt]


def _placeholder(device: torch.device | None) -> nn.Parameter:
    """A core on a rank without its table, hidden from dense optimizers as TorchRec's are."""
    parameter = nn.Parameter(torch.empty(0, device=device))
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
    return parameter


def _broadcast_from_rank_0(objects: list[Any], *, pg: dist.ProcessGroup) -> None:
    if dist.get_world_size(pg) > 1:
        dist.broadcast_object_list(objects, src=dist.get_global_rank(pg, 0), group=pg)


def _put_owned_cores(
    module: ShardedTTEmbeddingBagCollection, destination: dict[str, Any], prefix: str, _: Any
) -> None:
    """State dict hook: cores with one owner leave as ShardedTensors."""
    for key, sharded in (module._owned_cores or {}).items():
        destination[prefix + key] = sharded


def _take_local_cores(
    module: ShardedTTEmbeddingBagCollection, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Load hook: ShardedTensors and whole cores become what this rank keeps of them.

    Sizes are checked here, as ranks without the core would load any.
    """
    for config in tt_configs(module._embedding_bag_configs):
        for k, core in enumerate(module.embedding_bags[config.name].tt_cores):
            key = f"{prefix}embedding_bags.{config.name}.tt_cores.{k}"
            value = state_dict.get(key)
            if value is None:
                continue
            shape = config.tt_shape.core_shapes[k]
            size = value.metadata().size if isinstance(value, ShardedTensor) else value.shape
            if tuple(size) != shape:
                raise ValueError(f"{key} must have the size {shape}, got {tuple(size)}")
            if not core.numel():
                state_dict[key] = torch.empty(0)
            elif isinstance(value, ShardedTensor):
                shards = value.local_shards()
                if len(shards) != 1 or shards[0].tensor.shape != core.shape:
                    raise ValueError(
                        f"{key} must be a whole core on this rank, got a ShardedTensor placed for "
                        "another plan: load it through torch.distributed.checkpoint"
                    )
                state_dict[key] = shards[0].tensor
