"""TorchRec's shardings with a lookup that serves Tensor-Train tables beside regular ones.

Input and output distributions are inherited: TT tables share the all-to-all of the regular tables.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import (
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import replace_placement_with_meta_device
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv, ShardingType

from torchrec_tt.distributed.bounds_check import RowWiseBoundsCheck
from torchrec_tt.distributed.embedding_kernel import ROW_CACHE, TT_SHAPE
from torchrec_tt.distributed.embedding_lookup import TTGroupedPooledEmbeddingsLookup
from torchrec_tt.distributed.fused_params import check_mode_of
from torchrec_tt.tt.shape import TTShape


class TTLookupMixin(EmbeddingSharding):
    """Gives a sharding the lookup that knows TT tables."""

    _grouped_embedding_configs: list[GroupedEmbeddingConfig]
    _env: ShardingEnv
    _device: torch.device | None
    _lookup_sharding_type: ShardingType | None = None  # as the stock sharding tells its lookup
    _scale_weight_gradients = True

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> TTGroupedPooledEmbeddingsLookup:
        return TTGroupedPooledEmbeddingsLookup(
            grouped_configs=self._local_configs(),
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            scale_weight_gradients=self._scale_weight_gradients,
            sharding_type=self._lookup_sharding_type,
            env=self._env,
            replica_pg=self._replica_pg(),
        )

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """Returns the tables in the order of the features that the input distribution gets."""
        return [t for config in self._input_configs() for t in config.embedding_tables]

    def _input_configs(self) -> list[GroupedEmbeddingConfig]:
        return self._grouped_embedding_configs

    def _local_configs(self) -> list[GroupedEmbeddingConfig]:
        return self._grouped_embedding_configs

    def _replica_pg(self) -> dist.ProcessGroup | None:
        """Returns the ranks that hold the same cores and sum gradients, None if one does."""
        return None


class TTTableWiseMixin(TTLookupMixin):
    """Whole tables, each on one rank."""

    _grouped_embedding_configs_per_rank: list[list[GroupedEmbeddingConfig]]

    def _input_configs(self) -> list[GroupedEmbeddingConfig]:
        return [config for rank in self._grouped_embedding_configs_per_rank for config in rank]


class TTRowWiseMixin(TTLookupMixin):
    """Blocks of rows over all ranks; the cores are replicated on all of them."""

    _lookup_sharding_type = ShardingType.ROW_WISE

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist:
        return _with_bounds_check(super().create_input_dist(device), self.embedding_tables())

    def _replica_pg(self) -> dist.ProcessGroup | None:
        return self._env.process_group


class TTTwPooledEmbeddingSharding(TTTableWiseMixin, TwPooledEmbeddingSharding):
    """Whole tables, each on one rank."""


class TTRwPooledEmbeddingSharding(TTRowWiseMixin, RwPooledEmbeddingSharding):
    """Blocks of rows over all ranks."""


class TTTwRwPooledEmbeddingSharding(TTLookupMixin, TwRwPooledEmbeddingSharding):
    """Whole tables, each on one node, in blocks of rows; the cores are replicated on its ranks."""

    _lookup_sharding_type = ShardingType.TABLE_ROW_WISE

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist:
        return _with_bounds_check(super().create_input_dist(device), self.embedding_tables())

    def _input_configs(self) -> list[GroupedEmbeddingConfig]:
        return [config for node in self._grouped_embedding_configs_per_node for config in node]

    def _local_configs(self) -> list[GroupedEmbeddingConfig]:
        return self._grouped_embedding_configs_per_rank[self._rank]

    def _replica_pg(self) -> dist.ProcessGroup | None:
        return self._intra_pg


class TTDpPooledEmbeddingSharding(TTLookupMixin, DpPooledEmbeddingSharding):
    """Whole tables on every rank."""

    _scale_weight_gradients = False


POOLED_SHARDINGS: dict[str, Any] = {
    ShardingType.DATA_PARALLEL.value: TTDpPooledEmbeddingSharding,
    ShardingType.TABLE_WISE.value: TTTwPooledEmbeddingSharding,
    ShardingType.ROW_WISE.value: TTRwPooledEmbeddingSharding,
    ShardingType.TABLE_ROW_WISE.value: TTTwRwPooledEmbeddingSharding,
}


def create_tt_sharding(
    sharding_infos: list[EmbeddingShardingInfo],
    *,
    shardings: Mapping[str, Any],  # by sharding type
    shapes: dict[str, TTShape],
    env: ShardingEnv,
    device: torch.device | None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
) -> Any:
    """Returns the sharding for tables of one sharding type of which `shapes` are TT tables."""
    sharding_type = sharding_infos[0].param_sharding.sharding_type
    if device is not None and device.type == "meta":
        replace_placement_with_meta_device(sharding_infos)
    is_data_parallel = sharding_type == ShardingType.DATA_PARALLEL.value
    codecs = {} if is_data_parallel else {"qcomm_codecs_registry": qcomm_codecs_registry}
    sharding = shardings[sharding_type](sharding_infos, env, device, **codecs)
    # After the grouping, which would put tables of different shapes into different kernels.
    caches = {
        info.embedding_config.name: getattr(info.param, "_row_cache", None)
        for info in sharding_infos
    }
    for table in sharding.embedding_tables():
        if table.name in shapes:
            table.fused_params[TT_SHAPE] = shapes[table.name]
            table.fused_params[ROW_CACHE] = caches[table.name]
    return sharding


def _with_bounds_check(
    input_dist: BaseSparseFeaturesDist, tables: list[ShardedEmbeddingTable]
) -> BaseSparseFeaturesDist:
    """Checks the ids of TT tables before `input_dist` cuts them into blocks of rows."""
    checked = [t for t in tables if TT_SHAPE in (t.fused_params or {})]
    input_dist.register_forward_pre_hook(
        RowWiseBoundsCheck(
            [
                (table.name, table.num_embeddings) if table in checked else None
                for table in tables
                for _ in table.feature_names
            ],
            check_mode=check_mode_of(checked[0].fused_params),
        )
    )
    return input_dist
