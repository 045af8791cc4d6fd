"""TTEmbeddingBagCollection sharded: the sharder and the module it makes."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_tt.distributed.bounds_check import without_weights
from torchrec_tt.distributed.even_output_dist import EvenOutputDist
from torchrec_tt.distributed.mean_pooling import RowWiseMean, divide, is_summed_mean
from torchrec_tt.distributed.sharded_collection import ShardedTTCollection, refuse_resharding
from torchrec_tt.distributed.sharding import POOLED_SHARDINGS, create_tt_sharding
from torchrec_tt.distributed.sharding_infos import LogicalWeights, shapes_of, tell_tables
from torchrec_tt.distributed.sharding_plan import ROW_SPLITTING_TYPES, shardable_parameters
from torchrec_tt.modules.embedding_modules import TTEmbeddingBagCollection
from torchrec_tt.modules.features import with_one_batch_size


class ShardedTTEmbeddingBagCollection(ShardedTTCollection, ShardedEmbeddingBagCollection):
    """ShardedEmbeddingBagCollection in which tables may be Tensor-Train tables.

    A TT table's cores are whole on every rank that holds a shard of it: on one rank for
    TABLE_WISE, on those of a node for TABLE_ROW_WISE, on all for ROW_WISE and DATA_PARALLEL. In
    the state dict, under `embedding_bags.<table>.tt_cores.<k>` as unsharded, cores that every rank
    has are plain tensors, others ShardedTensors, or DTensors where `ShardingEnv.output_dtensor`
    asks for them.

    Values: a module on `meta` is initialised as unsharded under rank 0's `torch.initial_seed()`.
    Of a module with values the cores keep those of rank 0; regular tables on the CPU are drawn
    anew, as TorchRec does.

    Raises:
        ValueError: if the plan or `fused_params` ask for what a TT table cannot have; the same
            on every rank, before any collective.
        NotImplementedError: for 2D parallelism.
    """

    tables_name = TTEmbeddingBagCollection.tables_name
    configs_name = "_embedding_bag_configs"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_mean_pooling_callback = False  # TorchRec's, which divides other tables too
        self._row_wise_mean = RowWiseMean(
            self._embedding_bag_configs,
            {name: p.sharding_type for name, p in self.module_sharding_plan.items()},
            embedding_names=self._embedding_names,
            embedding_dims=self._embedding_dims,
        )
        pg = self._env.process_group
        if pg is not None and dist.get_backend(pg) == "gloo":
            for k, sharding_type in enumerate(self._sharding_types):
                if sharding_type in ROW_SPLITTING_TYPES:
                    output_dist = self._output_dists[k]
                    self._output_dists[k] = EvenOutputDist(
                        output_dist, sharding_type, env=self._env
                    )

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: TTEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        infos_by_type = super().create_grouped_sharding_infos(
            LogicalWeights(module), table_name_to_parameter_sharding, prefix, fused_params, suffix
        )
        tell_tables(infos_by_type, module.table_configs())
        for sharding_type, infos in infos_by_type.items():
            for info in infos:
                if is_summed_mean(info.embedding_config, sharding_type):
                    info.embedding_config.pooling = PoolingType.SUM
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
        shapes = shapes_of(sharding_infos)
        if not shapes:  # regular tables only: stock from here on
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        return create_tt_sharding(
            sharding_infos,
            shardings=POOLED_SHARDINGS,
            shapes=shapes,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Distributes the features; those of variable batch size (VBE) as the batch has them.

        Raises:
            ValueError: if features of variable batch size do not say where their bags belong,
                lengths are not those of the ids, or keys, dtypes and whether there are weights
                differ between the ranks at the first batch, or keys and weights later from it.
        """
        features = self._checked(features)
        ctx.divisor = self._row_wise_mean.divisor(features)
        return super().input_dist(ctx, features)

    def _prepared(self, features: Any) -> KeyedJaggedTensor:
        features = with_one_batch_size(super()._prepared(features))
        return features if self._is_weighted else without_weights(features)

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        return _with_mean(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        return _with_mean(super().compute_and_output_dist(ctx, input), ctx)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        refuse_resharding(self)

    @property
    def unsharded_module_type(self) -> type[TTEmbeddingBagCollection]:
        return TTEmbeddingBagCollection


def _with_mean(
    pooled: LazyAwaitable[KeyedTensor], ctx: EmbeddingBagCollectionContext
) -> LazyAwaitable[KeyedTensor]:
    if ctx.divisor is not None:
        pooled.callbacks.append(functools.partial(divide, divisor=ctx.divisor))
    return pooled


class TTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards a TTEmbeddingBagCollection; pass it beside `get_default_sharders()`.

    `fused_params` go to regular tables as to TorchRec's own sharder. TT tables take their optimizer
    from them (`core_optimizer_config`), `bounds_check_mode` (default FATAL) and, where their
    configs have none, `precision` (of products on CUDA, see TTEmbeddingBagConfig); data-parallel TT
    tables take no optimizer: they are ordinary parameters. A table's `cache`, or `cache_params` of
    its plan, is a row cache on each of its ranks; the `cache_` keys are for regular tables. Where a
    collection has TT tables, `output_dtype` must be FP32 and a key that no kernel knows is refused.

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
        """Returns the stock types; the CPU too has those that split rows, unlike in TorchRec."""
        types = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*types, *ROW_SPLITTING_TYPES]))

    def reshard(
        self, sharded_module: ShardedTTEmbeddingBagCollection, *args: Any, **kwargs: Any
    ) -> ShardedTTEmbeddingBagCollection:
        refuse_resharding(sharded_module)

    @property
    def module_type(self) -> type[TTEmbeddingBagCollection]:
        return TTEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedTTEmbeddingBagCollection]:
        return ShardedTTEmbeddingBagCollection
