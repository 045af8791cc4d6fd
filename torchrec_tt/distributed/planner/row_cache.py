"""What the row cache of a shard takes, in bytes and in time."""

from torchrec.distributed.planner.types import ShardingOption

from torchrec_tt.distributed.planner.hardware import Hardware
from torchrec_tt.distributed.planner.lookups import Lookups, tt_config_of
from torchrec_tt.distributed.row_cache import row_cache_config
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cost import step_work
from torchrec_tt.tt.row_cache import row_cache_bytes
from torchrec_tt.tt.shape import TTShape


def row_cache_of(option: ShardingOption) -> RowCacheConfig | None:
    """Returns the cache of a TT option's table, if it has one."""
    config = tt_config_of(option)
    return None if config is None else row_cache_config(config, option.cache_params)


def _row_optimizer(option: ShardingOption, config: TTOptimizerConfig) -> str:
    cache = row_cache_of(option)
    return (cache.optimizer or config if cache is not None else config).optimizer


def row_cache_storage(option: ShardingOption, counts: Lookups, config: TTOptimizerConfig) -> int:
    """What the row cache of a shard keeps, exactly."""
    cache = row_cache_of(option)
    if cache is None:
        return 0
    rows = cache.optimizer or config
    element_size = 4 if cache.dtype is None else cache.dtype.itemsize
    return row_cache_bytes(
        counts.num_slots,
        option.tensor.shape[1],
        optimizer=rows.optimizer,
        element_size=element_size,
        has_step=rows.optimizer == "adam" or (element_size == 2 and rows.stochastic_rounding),
    ).total


def row_cache_ms(
    option: ShardingOption,
    counts: Lookups,
    config: TTOptimizerConfig,
    *,
    shape: TTShape,
    speed: Hardware,
) -> tuple[float, float]:
    """What a row cache adds to forward and backward.

    Forward reads two sets of tags, 128 bytes, for each distinct row. Backward counts each (24
    bytes), and steps the cached ones: their gradient is summed and read, the row and its state are
    read and written. Once in `greatest_interval` steps a refresh looks every slot's row up and
    passes over the whole cache twice; its share is backward's too.
    """
    cache = row_cache_of(option)
    if cache is None:
        return 0.0, 0.0
    distinct, row = counts.num_rows + counts.num_cached_rows, 4 * shape.embedding_dim
    state = {"sgd": 0.0, "rowwise_adagrad": 0.0, "adagrad": 1.0, "adam": 2.0}
    per_row = row * (4 + 2 * state[_row_optimizer(option, config)])
    stepped = 24 * distinct + per_row * counts.num_cached_rows
    refreshed = step_work(shape, num_rows=counts.num_slots)
    refresh_ms = (
        refreshed.forward_flops / speed.flops_per_ms
        + refreshed.forward_bytes / speed.core_bytes_per_ms
        + 2 * row_cache_storage(option, counts, config) / speed.row_bytes_per_ms
    )
    greatest = cache.greatest_interval(shape.num_embeddings)
    return (
        128 * distinct / speed.row_bytes_per_ms,
        stepped / speed.row_bytes_per_ms + refresh_ms / greatest,
    )
