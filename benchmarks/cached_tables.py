"""Tables with a row cache and their training steps, for the benchmarks of row caches."""

import time
from collections.abc import Callable

import embedding_bag as bench
import torch
from torch import Tensor

from torchrec_tt import RowCacheConfig, make_shape
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.init import init_cores_
from torchrec_tt.tt.shape import TTShape

ROWS = bench.NUM_EMBEDDINGS
BATCH = 16384
RATIOS = (0.0001, 0.001, 0.01)  # capacities, of the rows
WIDE = make_shape(ROWS, 64, tt_ranks=[32, 32], row_factors=[200, 220, 250])
FAST = make_shape(ROWS, 64, tt_ranks=[32, 32], row_strategy="fast")
NARROW = make_shape(ROWS, 4, tt_ranks=[2, 2], row_factors=[200, 220, 250])  # to count lookups only
Line = tuple[
    str, float, float | None
]  # title, figure, what it must be at most (at least: negative)


def make_module(
    shape: TTShape, cache: RowCacheConfig | None, *, learning_rate: float = bench.LEARNING_RATE
) -> TTTableBatchedEmbeddingBags:
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=shape)],
        optimizer=TTOptimizerConfig(learning_rate=learning_rate),
        caches=None if cache is None else {"t": cache},
    )
    generator = torch.Generator().manual_seed(0)
    init_cores_(module.all_cores(), shape=shape, generator=generator)
    return module


def cache_of(module: TTTableBatchedEmbeddingBags) -> RowCache:
    return module.row_caches["t"]


def fill(module: TTTableBatchedEmbeddingBags, ids: Tensor) -> None:
    """Fills the cache with these rows, the first ones surest."""
    cache = cache_of(module)
    cache.counter_ids[: len(ids)] = ids
    cache.counter_heats[: len(ids)] = torch.arange(len(ids), 0, -1)
    cores = module.all_cores()
    cache.fill(cache.place(), cores, squares=torch.zeros(2, dtype=torch.float64))


def hit_rate(module: TTTableBatchedEmbeddingBags) -> float:
    """Since the statistics were reset."""
    counts = cache_of(module).statistics_dict()
    return counts["hits"] / (counts["hits"] + counts["misses"])


def training_step(module: TTTableBatchedEmbeddingBags) -> bench.Step:
    def step(indices: Tensor, offsets: Tensor, grad_output: Tensor, *, train: bool) -> None:
        module(indices, offsets).backward(grad_output)

    return step


def timed(function: Callable, seconds: list[float]) -> Callable:
    def run(*args: object, **kwargs: object) -> None:
        begin = time.process_time()
        function(*args, **kwargs)
        seconds.append(time.process_time() - begin)

    return run
