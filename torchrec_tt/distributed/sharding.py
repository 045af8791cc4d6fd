"""TorchRec's shardings with a lookup that serves Tensor-Train tables beside regular ones.

Input and output distributions are inherited: TT tables share the all-to-all of the regular tables.
"""

from typing import Any

import torch
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import replace_placement_with_meta_device
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv, ShardingType

from torchrec_tt.distributed.bounds_check import RowWiseBoundsCheck
from torchrec_tt.distributed.embedding_kernel import TT_SHAPE
from torchrec_tt.distributed.embedding_lookup import TTGroupedPooledEmbeddingsLookup
from torchrec_tt.distributed.fused_params import check_mode_of
from torchrec_tt.tt.shape import TTShape


class _TTLookupMixin:
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
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            scale_weight_gradients=self._scale_weight_gradients,
            sharding_type=self._lookup_sharding_type,
            env=self._env,
        )


class TTTwPooledEmbeddingSharding(_TTLookupMixin, TwPooledEmbeddingSharding):
    """Whole tables, each on one rank."""


class TTRwPooledEmbeddingSharding(_TTLookupMixin, RwPooledEmbeddingSharding):
    """Blocks of rows over all ranks; the cores are replicated on all of them."""

    _lookup_sharding_type = ShardingType.ROW_WISE

    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist:
        input_dist = super().create_input_dist(device)
        tables = [t for c in self._grouped_embedding_configs for t in c.embedding_tables]
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


class TTDpPooledEmbeddingSharding(_TTLookupMixin, DpPooledEmbeddingSharding):
    """Whole tables on every rank."""

    _scale_weight_gradients = False


def create_tt_sharding(
    sharding_infos: list[EmbeddingShardingInfo],
    *,
    shapes: dict[str, TTShape],
    env: ShardingEnv,
    device: torch.device | None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
) -> Any:
    """Returns the sharding for tables of one sharding type of which `shapes` are TT tables."""
    sharding_type = sharding_infos[0].param_sharding.sharding_type
    if device is not None and device.type == "meta":
        replace_placement_with_meta_device(sharding_infos)
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        sharding: Any = TTDpPooledEmbeddingSharding(sharding_infos, env, device)
    else:
        is_row_wise = sharding_type == ShardingType.ROW_WISE.value
        cls = TTRwPooledEmbeddingSharding if is_row_wise else TTTwPooledEmbeddingSharding
        sharding = cls(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
    # After the grouping, which would put tables of different shapes into different kernels.
    for table in sharding.embedding_tables():
        if table.name in shapes:
            table.fused_params[TT_SHAPE] = shapes[table.name]
    return sharding
