"""TTEmbeddingCollection sharded: the sharder and the module it makes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
    get_ec_index_dedup,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt.distributed.sequence_sharding import SEQUENCE_SHARDINGS
from torchrec_tt.distributed.sharded_collection import ShardedTTCollection, refuse_resharding
from torchrec_tt.distributed.sharding import create_tt_sharding
from torchrec_tt.distributed.sharding_infos import LogicalWeights, shapes_of, tell_tables
from torchrec_tt.distributed.sharding_plan import shardable_parameters
from torchrec_tt.modules.embedding_configs import TTEmbeddingConfig
from torchrec_tt.modules.embedding_modules import TTEmbeddingCollection
from torchrec_tt.modules.features import check_inverse_indices


class ShardedTTEmbeddingCollection(ShardedTTCollection, ShardedEmbeddingCollection):
    """ShardedEmbeddingCollection in which tables may be Tensor-Train tables.

    A TT table's cores are whole on every rank that holds a shard of it: on one rank for
    TABLE_WISE, on all for ROW_WISE and DATA_PARALLEL. In the state dict, under
    `embeddings.<table>.tt_cores.<k>` as unsharded, cores that every rank has are plain tensors,
    others ShardedTensors, or DTensors where `ShardingEnv.output_dtensor` asks for them.

    Values: a module on `meta` is initialised as unsharded under rank 0's `torch.initial_seed()`.
    Of a module with values the cores keep those of rank 0; regular tables keep their own, as in
    TorchRec.

    Raises:
        ValueError: if the plan or `fused_params` ask for what a TT table cannot have, or for a
            data-parallel regular table on the CPU; the same on every rank, before any collective.
        NotImplementedError: for 2D parallelism and index dedup.
    """

    tables_name = TTEmbeddingCollection.tables_name
    configs_name = "_embedding_configs"

    def __init__(
        self,
        module: TTEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        use_index_dedup: bool = False,
        **kwargs: Any,
    ) -> None:
        if module.tt_shapes and (use_index_dedup or get_ec_index_dedup()):
            raise NotImplementedError(
                "use_index_dedup must be False for a collection with Tensor-Train tables, whose "
                "kernel computes each distinct row once anyway: TorchRec's deduplication takes an "
                "id out of range for a row of the next table before any check, and needs CUDA"
            )
        _check_regular_tables(module, table_name_to_parameter_sharding, device=device)
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            use_index_dedup=use_index_dedup,
            **kwargs,
        )

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: TTEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        fused_params: dict[str, Any] | None,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        infos_by_type = super().create_grouped_sharding_infos(
            LogicalWeights(module), table_name_to_parameter_sharding, fused_params
        )
        tell_tables(infos_by_type, module.table_configs())
        return infos_by_type

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        shapes = shapes_of(sharding_infos)
        if not shapes:  # regular tables only: stock from here on
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return create_tt_sharding(
            sharding_infos,
            shardings=SEQUENCE_SHARDINGS,
            shapes=shapes,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Distributes the features; TorchRec expands those of variable batch size (VBE).

        Raises:
            ValueError: if features of variable batch size do not say where their samples belong,
                lengths are not those of the ids, or keys, dtypes and whether there are weights
                differ between the ranks at the first batch, or keys and weights later from it.
        """
        return super().input_dist(ctx, self._checked(features))

    def _prepared(self, features: Any) -> KeyedJaggedTensor:
        features = super()._prepared(features)
        check_inverse_indices(features)
        return features

    @property
    def unsharded_module_type(self) -> type[TTEmbeddingCollection]:
        return TTEmbeddingCollection


class TTEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards a TTEmbeddingCollection; pass it beside `get_default_sharders()`.

    `fused_params` are read as by TTEmbeddingBagCollectionSharder: the optimizer of TT tables,
    `bounds_check_mode` and `precision` (of products on CUDA, for the tables whose configs have
    none). `use_index_dedup` is refused for a collection with TT tables.

    Example:
        >>> sharders = [TTEmbeddingCollectionSharder(
        ...     fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1})]
        >>> plan = tt_planner(topology, batch_size=64).collective_plan(model, sharders)
        >>> model = DistributedModelParallel(model, sharders=sharders, plan=plan)
    """

    def shard(
        self,
        module: TTEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTTEmbeddingCollection:
        return ShardedTTEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    def shardable_parameters(self, module: TTEmbeddingCollection) -> dict[str, nn.Parameter]:
        return shardable_parameters(module)

    def reshard(
        self, sharded_module: ShardedTTEmbeddingCollection, *args: Any, **kwargs: Any
    ) -> ShardedTTEmbeddingCollection:
        refuse_resharding(sharded_module)

    @property
    def module_type(self) -> type[TTEmbeddingCollection]:
        return TTEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedTTEmbeddingCollection]:
        return ShardedTTEmbeddingCollection


def _check_regular_tables(
    module: TTEmbeddingCollection,
    plan: Mapping[str, ParameterSharding],
    *,
    device: torch.device | None,
) -> None:
    """Raises ValueError where FBGEMM would answer wrongly.

    Its dense kernel on the CPU pools bags where it is asked for a row per id.
    """
    if device is not None and device.type != "cpu":
        return
    for config in module.embedding_configs():
        sharding = plan.get(config.name)
        if (
            sharding is not None
            and sharding.sharding_type == ShardingType.DATA_PARALLEL.value
            and not isinstance(config, TTEmbeddingConfig)
        ):
            raise ValueError(
                f"sharding_type must not be {sharding.sharding_type!r} for a regular table of a "
                f"sequence collection on the CPU, as FBGEMM's dense kernel knows only pooled "
                f"lookups there, got it for table {config.name!r}"
            )
