"""What sharded collections with Tensor-Train tables have in common: the cores and their state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_tt.distributed.applied_optimizer import check_applied_optimizers
from torchrec_tt.distributed.bounds_check import check_keys, check_lengths
from torchrec_tt.distributed.embedding_kernel import TTBatchedDenseEmbeddingBag
from torchrec_tt.distributed.features_form import (
    FeaturesForm,
    check_form_again,
    check_same_form,
    form_of,
)
from torchrec_tt.distributed.fused_optimizer import (
    one_owner_tensor,
    owned_part,
)
from torchrec_tt.distributed.fused_params import (
    check_fused_params,
    check_regular_optimizers,
)
from torchrec_tt.distributed.lookups_ahead import check_input_dist, check_lookup
from torchrec_tt.distributed.row_cache_state import (
    cached_blocks,
    put_row_caches,
    take_row_caches,
)
from torchrec_tt.distributed.sharding_plan import (
    check_env,
    check_plan,
    with_tt_kernel,
)
from torchrec_tt.modules.embedding_configs import TTTableConfig
from torchrec_tt.modules.embedding_modules import TTCollection, reset_cores_, tt_configs
from torchrec_tt.modules.features import check_features
from torchrec_tt.modules.row_cache import RowCache


class ShardedTTCollection(nn.Module):
    """Goes before TorchRec's sharded collection of a kind, and adds the cores of TT tables to it.

    A TT table's cores are whole on every rank that holds a shard of it: on one rank for
    TABLE_WISE, on those of a node for TABLE_ROW_WISE, on all for ROW_WISE and DATA_PARALLEL. In
    the state dict, under `<tables_name>.<table>.tt_cores.<k>` as unsharded, cores that every rank
    has are plain tensors, others ShardedTensors of one shard, or DTensors of one where
    `ShardingEnv.output_dtensor` asks for them. Each rank of a node has its replica as that shard,
    so that `dcp.save` writes one of them and `dcp.load` fills all. What a row cache holds is there
    too, each tensor with one owner, under the block of rows that the cache is for.

    `tables_name` is that of the unsharded collection, `configs_name` the attribute in which
    TorchRec keeps the tables' configurations.

    Raises:
        ValueError: if the plan or `fused_params` ask for what a TT table cannot have; the same
            on every rank, before any collective.
        NotImplementedError: for 2D parallelism.
    """

    tables_name: ClassVar[str]
    configs_name: ClassVar[str]
    # None until the cores are registered
    _owned_cores: dict[str, ShardedTensor | DTensor] | None = None
    _first_form: FeaturesForm  # of the first batch

    def __init__(
        self,
        module: TTCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        check_env(env, tables=module.tt_shapes)
        check_plan(
            module,
            table_name_to_parameter_sharding,
            world_size=env.world_size,
            local_world_size=get_local_size(env.world_size),
            pg=env.process_group,
        )
        if module.tt_shapes:
            check_fused_params(fused_params)
            if device is None or device.type == "cpu":
                check_regular_optimizers(module, table_name_to_parameter_sharding, fused_params)
            check_applied_optimizers(module, table_name_to_parameter_sharding, fused_params)
        _check_no_cached_rows(module, pg=env.process_group)
        plan = with_tt_kernel(module, table_name_to_parameter_sharding)
        super().__init__(module, plan, env, fused_params, device, **kwargs)
        if self._owned_cores is not None and module.device.type != "meta":
            self._copy_cores_from_rank_0(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Looks up; in a compiled model eagerly, between the compiled parts."""
        if torch.compiler.is_compiling():
            return self._look_up_eagerly(*args, **kwargs)
        return super().forward(*args, **kwargs)

    @torch.compiler.disable
    def _look_up_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """Waits here: compiling what is awaited would hang ranks whose graphs break elsewhere."""
        return super().forward(*args, **kwargs).wait()

    def input_dist(self, *args: Any, **kwargs: Any) -> Any:
        check_input_dist(self, tables=self._tt_tables())
        return super().input_dist(*args, **kwargs)

    def compute_and_output_dist(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        check_lookup(self, ctx, tables=self._tt_tables())
        return super().compute_and_output_dist(ctx, *args, **kwargs)

    def _checked(self, features: Any) -> KeyedJaggedTensor:
        """Returns the features as TorchRec's distribution takes them.

        Raises:
            ValueError: if it would not cut them right: at the first batch the same on every rank,
                at a later one on the ranks whose own features are wrong.
        """
        if not self._has_uninitialized_input_dist:
            features = self._prepared(features)
            check_form_again(form_of(features), first=self._first_form)
            return features
        try:
            features = self._prepared(features)
            check_keys(features, needed=[n for c in self._configs() for n in c.feature_names])
            form = form_of(features)
        except ValueError as error:
            if self._waits_for_ranks():
                check_same_form(error, pg=self._env.process_group)
            raise
        if self._waits_for_ranks():
            check_same_form(form, pg=self._env.process_group)
        self._first_form = form
        return features

    def _prepared(self, features: Any) -> KeyedJaggedTensor:
        """Returns features of a form that can be cut; raises ValueError where they cannot be."""
        features = maybe_td_to_kjt(features, None)
        check_features(features)
        check_lengths(features)
        return features

    def _waits_for_ranks(self) -> bool:
        """Whether a lookup does; a rank may look data-parallel tables up alone."""
        types = {sharding.sharding_type for sharding in self.module_sharding_plan.values()}
        return self._env.world_size > 1 and types != {ShardingType.DATA_PARALLEL.value}

    def reset_parameters(self) -> None:
        """Draws every table anew, TT tables as the unsharded collection does."""
        configs = self._configs()
        try:  # the stock method wants a `weight` of every table
            setattr(self, self.configs_name, _regular_configs(configs))
            super().reset_parameters()
        finally:
            setattr(self, self.configs_name, configs)
        if self._owned_cores is not None:
            self._reset_cores()

    def _initialize_torch_state(self) -> None:
        super()._initialize_torch_state()
        owners = {t.name: k for k in self._tt_kernels() for t in k.config.embedding_tables}
        self._cached_blocks = cached_blocks(self._sharding_infos(), self._tt_kernels())
        owned: dict[str, ShardedTensor | DTensor] = {}
        for config in tt_configs(self._configs()):
            kernel = owners.get(config.name)
            cores = kernel.cores(config.name) if kernel else None
            owned.update(self._register_cores(config.name, cores))
        self._owned_cores = owned
        self._register_state_dict_hook(_put_owned_cores)
        self._register_load_state_dict_pre_hook(_take_local_cores, with_module=True)
        if self._cached_blocks:
            self._register_state_dict_hook(_put_row_caches)
            self._register_load_state_dict_pre_hook(_take_row_caches, with_module=True)
        self._reset_cores()

    def train(self, mode: bool = True) -> "ShardedTTCollection":
        """Sets the mode, of the kernels too, which TorchRec hides from it; see nn.Module.train."""
        super().train(mode)
        for kernel in self._tt_kernels():
            kernel.train(mode)
        return self

    def row_cache_statistics(self) -> dict[str, dict[str, int | float]]:
        """Returns by table what its row cache on this rank counted: `RowCache.statistics_dict`."""
        return {table: cache.statistics_dict() for table, cache in self._row_caches().items()}

    def reset_row_cache_statistics(self) -> None:
        """Sets what the row caches on this rank counted back to zero."""
        for cache in self._row_caches().values():
            cache.reset_statistics()

    def _sharding_infos(self) -> list[EmbeddingShardingInfo]:
        by_type = getattr(self, "sharding_type_to_sharding_infos", {})  # of pooled tables alone
        return [info for infos in by_type.values() for info in infos]

    def _row_caches(self) -> dict[str, RowCache]:
        """The caches on this rank by table."""
        return {
            table: block.cache
            for table, blocks in self._cached_blocks.items()
            for block in blocks
            if block.cache is not None
        }

    def _configs(self) -> Sequence[BaseEmbeddingConfig]:
        return getattr(self, self.configs_name)

    def _tt_tables(self) -> list[str]:
        return [config.name for config in tt_configs(self._configs())]

    def _tables(self) -> nn.ModuleDict:
        return getattr(self, self.tables_name)

    def _tt_kernels(self) -> Iterator[TTBatchedDenseEmbeddingBag]:
        for lookup in self._lookups:
            unwrapped = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for kernel in unwrapped._emb_modules:
                if isinstance(kernel, TTBatchedDenseEmbeddingBag):
                    yield kernel

    def _register_cores(
        self, table: str, cores: nn.ParameterList | None
    ) -> dict[str, ShardedTensor | DTensor]:
        """Puts `cores` (None on ranks without the table) where the unsharded module has them.

        Returns those that not every rank has, by state dict key.
        """
        config = self._table_name_to_config[table]
        shapes = config.tt_shape.core_shapes
        registered = nn.ParameterList(
            cores or [_placeholder(self._device, config.core_dtype) for _ in shapes]
        )
        self._tables()[table].tt_cores = registered
        sharding = self.module_sharding_plan[table]
        if sharding.sharding_type in (
            ShardingType.ROW_WISE.value,
            ShardingType.DATA_PARALLEL.value,
        ):
            return {}
        placements = [shard.placement for shard in sharding.sharding_spec.shards]
        own = [placement for placement in placements if placement.rank() == dist.get_rank()]
        return {
            f"{self.tables_name}.{table}.tt_cores.{k}": one_owner_tensor(
                cores[k] if cores else None,
                size=torch.Size(shape),
                dtype=config.core_dtype,
                placement=(own or placements)[0],
                pg=self._env.process_group,
                mesh=self._env.device_mesh if self._env.output_dtensor else None,
            )
            for k, shape in enumerate(shapes)
        }

    def _reset_cores(self) -> None:
        if self._device is not None and self._device.type == "meta":
            return
        seed = [torch.initial_seed()]
        _broadcast_from_rank_0(seed, pg=self._env.process_group)
        for config in tt_configs(self._configs()):
            cores = self._tables()[config.name].tt_cores
            if cores[0].numel():
                reset_cores_(cores, config=config, seed=seed[0])
        for cache in self._row_caches().values():
            cache.clear()

    @torch.no_grad()
    def _copy_cores_from_rank_0(self, module: TTCollection) -> None:
        pg = self._env.process_group
        for table in module.tt_shapes:
            own = self._tables()[table].tt_cores
            for core, source in zip(own, module.table_modules()[table].tt_cores, strict=True):
                values = source.detach().to(core.device, copy=True)
                dist.broadcast(values, src=dist.get_global_rank(pg, 0), group=pg)
                if core.numel():
                    core.copy_(values)


def _check_no_cached_rows(module: TTCollection, *, pg: dist.ProcessGroup) -> None:
    """Raises ValueError, on every rank, where rank 0's module has rows that would be lost."""
    caches = {
        table: cache
        for table, own in module.table_modules().items()
        if (cache := getattr(own, "row_cache", None)) is not None and not cache.ids.is_meta
    }
    if not caches:
        return
    tables = [[table for table, cache in caches.items() if bool((cache.ids >= 0).any())]]
    _broadcast_from_rank_0(tables, pg=pg)
    if tables[0]:
        raise ValueError(
            f"row caches must be empty in a module that is sharded, got rows in those of "
            f"{tables[0]}: save it with torch.distributed.checkpoint and load it sharded with "
            "torchrec_tt.checkpoint.load"
        )


def refuse_resharding(module: ShardedTTCollection) -> NoReturn:
    """Raises NotImplementedError, naming the TT tables, on whichever rank calls it."""
    configs = module._table_name_to_config.items()
    tables = [name for name, config in configs if isinstance(config, TTTableConfig)]
    raise NotImplementedError(
        f"resharding a collection with Tensor-Train tables in place is not supported, got {tables};"
        " save it with torch.distributed.checkpoint and load it under the new plan"
    )


def _regular_configs(configs: Sequence[BaseEmbeddingConfig]) -> list[BaseEmbeddingConfig]:
    tt = {config.name for config in tt_configs(configs)}
    return [config for config in configs if config.name not in tt]


def _placeholder(device: torch.device | None, dtype: torch.dtype) -> nn.Parameter:
    """A core on a rank without its table, hidden from dense optimizers as TorchRec's are."""
    parameter = nn.Parameter(torch.empty(0, device=device, dtype=dtype))
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]
    return parameter


def _broadcast_from_rank_0(objects: list[Any], *, pg: dist.ProcessGroup) -> None:
    if dist.get_world_size(pg) > 1:
        dist.broadcast_object_list(objects, src=dist.get_global_rank(pg, 0), group=pg)


def _put_owned_cores(
    module: ShardedTTCollection, destination: dict[str, Any], prefix: str, _: Any
) -> None:
    """State dict hook: cores that not every rank has leave as ShardedTensors or DTensors."""
    for key, sharded in (module._owned_cores or {}).items():
        destination[prefix + key] = sharded


def _take_local_cores(
    module: ShardedTTCollection, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Load hook: ShardedTensors, DTensors and whole cores become what this rank keeps of them.

    Sizes are checked here, as ranks without the core would load any.
    """
    for config in tt_configs(module._configs()):
        for k, core in enumerate(module._tables()[config.name].tt_cores):
            key = f"{prefix}{module.tables_name}.{config.name}.tt_cores.{k}"
            value = state_dict.get(key)
            if value is None:
                continue
            size, is_owner = config.tt_shape.core_shapes[k], core.numel() > 0
            part = owned_part(value, key=key, size=size, is_owner=is_owner)
            state_dict[key] = torch.empty(0) if part is None else part


def _put_row_caches(
    module: ShardedTTCollection, destination: dict[str, Any], prefix: str, _: Any
) -> None:
    """State dict hook."""
    env = module._env
    for table, blocks in module._cached_blocks.items():
        put_row_caches(
            blocks,
            destination,
            prefix=f"{prefix}{module.tables_name}.{table}.",
            pg=env.process_group,
            mesh=env.device_mesh if env.output_dtensor else None,
        )


def _take_row_caches(
    module: ShardedTTCollection,
    state_dict: dict[str, Any],
    prefix: str,
    _: Any,
    strict: bool,
    missing_keys: list[str],
    *__: Any,
) -> None:
    """Load hook."""
    missing: list[str] = []
    for table, blocks in module._cached_blocks.items():
        prefix_of_table = f"{prefix}{module.tables_name}.{table}."
        take_row_caches(blocks, state_dict, prefix=prefix_of_table, missing_keys=missing)
    if strict:
        missing_keys.extend(missing)
