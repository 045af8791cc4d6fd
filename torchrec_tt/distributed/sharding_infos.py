"""Tensor-Train tables as TorchRec's grouping of tables by sharding type reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_tt.distributed.fused_optimizer import core_optimizer_config
from torchrec_tt.distributed.fused_params import PRECISION, check_mode_of, precision_of
from torchrec_tt.distributed.row_cache import row_cache_config
from torchrec_tt.distributed.sharding_plan import shardable_parameters
from torchrec_tt.modules.embedding_modules import TTCollection, tt_configs
from torchrec_tt.tt.shape import TTShape


def tell_tables(
    infos_by_type: Mapping[str, Sequence[EmbeddingShardingInfo]],
    configs: Sequence[BaseEmbeddingConfig],
) -> None:
    """Notes what each TT table's kernel needs in its sharding info, and checks it."""
    tables = {config.name: config for config in tt_configs(configs)}
    for sharding_type, infos in infos_by_type.items():
        for info in infos:
            config = tables.get(info.embedding_config.name)
            if config is None:
                info.fused_params = {
                    k: v for k, v in (info.fused_params or {}).items() if k != PRECISION
                }
                continue
            precision = precision_of(config.precision, info.fused_params, table=config.name)
            info.param._tt_shape = config.tt_shape
            info.param._row_cache = row_cache_config(config, info.param_sharding.cache_params)
            # TorchRec groups tables by them, so they must hash; caches make no other group.
            info.fused_params = {
                k: tuple(v) if isinstance(v, list) else v
                for k, v in info.fused_params.items()
                if not k.startswith("cache_")
            } | {PRECISION: precision}
            check_mode_of(info.fused_params)
            if sharding_type != ShardingType.DATA_PARALLEL.value:
                core_optimizer_config(info.fused_params)


def shapes_of(sharding_infos: Sequence[EmbeddingShardingInfo]) -> dict[str, TTShape]:
    """Returns the shapes that `tell_tables` noted, by table name."""
    return {
        info.embedding_config.name: info.param._tt_shape
        for info in sharding_infos
        if hasattr(info.param, "_tt_shape")
    }


class LogicalWeights:
    """A collection as `create_grouped_sharding_infos` reads it: every table with a weight."""

    def __init__(self, module: TTCollection) -> None:
        self._module = module
        self._weights = {
            f"{module.tables_name}.{table}.weight": weight
            for table, weight in shardable_parameters(module).items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)  # configurations, names and settings

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._weights.items()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)
