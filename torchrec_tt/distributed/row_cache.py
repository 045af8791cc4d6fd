"""Which row cache a sharded table has: what its configuration and its plan say together."""

import dataclasses
import numbers
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from torchrec_tt.modules.embedding_configs import TTEmbeddingBagConfig, TTTableConfig
from torchrec_tt.modules.row_cache_config import Policy, RowCacheConfig

_POLICIES: dict[CacheAlgorithm, Policy] = {CacheAlgorithm.LRU: "lru", CacheAlgorithm.LFU: "lfu"}
_PRECISIONS = (DataType.FP32, DataType.BF16, DataType.FP16)
_UNSUPPORTED = ("reserved_memory", "stats", "multipass_prefetch_config")


def row_cache_config(
    config: TTTableConfig, cache_params: CacheParams | None
) -> RowCacheConfig | None:
    """Returns the cache of a Tensor-Train table on each of its ranks, None where it has none.

    What `cache_params` of the plan (or of a planner's constraint) give precedes the
    configuration's `cache`, setting by setting: `load_factor` its capacity, `algorithm` its policy,
    `precision` its dtype. `prefetch_pipeline` may be either: rows in use are never evicted.

    Raises:
        ValueError: for `cache_params` that a row cache cannot follow.
    """
    cache = config.cache if isinstance(config, TTEmbeddingBagConfig) else None
    if cache_params is None:
        return cache
    if not isinstance(config, TTEmbeddingBagConfig):
        raise ValueError(
            f"cache_params must be None for a Tensor-Train table of sequences, got {cache_params} "
            f"for table {config.name!r}: only pooled tables have row caches"
        )
    for name in _UNSUPPORTED:
        value = getattr(cache_params, name, None)  # not every TorchRec has all of them
        if value:
            raise ValueError(
                f"cache_params.{name} must be unset for a Tensor-Train table, got {value} for "
                f"table {config.name!r}"
            )
    given = _given(cache_params, table=config.name)
    if cache is None and "load_factor" not in given:
        raise ValueError(
            "cache_params.load_factor must be given for a Tensor-Train table whose configuration "
            f"has no cache, got {cache_params} for table {config.name!r}"
        )
    return RowCacheConfig(**given) if cache is None else dataclasses.replace(cache, **given)


def _given(cache_params: CacheParams, *, table: str) -> dict[str, Any]:
    """The settings of RowCacheConfig that `cache_params` give."""
    given: dict[str, Any] = {}
    load_factor = cache_params.load_factor
    if load_factor is not None:
        if not isinstance(load_factor, numbers.Real) or not 0 < float(load_factor) < 1:
            raise ValueError(
                f"cache_params.load_factor must be in (0, 1), got {load_factor!r} for table "
                f"{table!r}"
            )
        given |= {"load_factor": load_factor, "num_rows": None}
    if cache_params.algorithm is not None:
        if cache_params.algorithm not in _POLICIES:
            raise ValueError(
                f"cache_params.algorithm must be one of {[str(a) for a in _POLICIES]}, "
                f"got {cache_params.algorithm!r} for table {table!r}"
            )
        given["policy"] = _POLICIES[cache_params.algorithm]
    if cache_params.precision is not None:
        if cache_params.precision not in _PRECISIONS:
            raise ValueError(
                f"cache_params.precision must be one of {[str(t) for t in _PRECISIONS]} for a "
                f"Tensor-Train table, got {cache_params.precision!r} for table {table!r}"
            )
        given["dtype"] = data_type_to_dtype(cache_params.precision)
    return given
