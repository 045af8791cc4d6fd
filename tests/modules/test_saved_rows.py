"""Rows that go from the caches of some blocks into those of others."""

import dataclasses

import pytest
import torch
from torch import Tensor

from torchrec_tt import RowCacheConfig, make_shape
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.saved_rows import saved_rows, take_over
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.init import init_cores_

SHAPE = make_shape(600, 8, tt_ranks=[3, 3])
ADAM = TTOptimizerConfig(optimizer="adam", learning_rate=0.05)


def module_of(offset: int, num_rows: int, slots: int) -> TTTableBatchedEmbeddingBags:
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=SHAPE, row_offset=offset, num_rows=num_rows)],
        optimizer=ADAM,
        caches={"t": RowCacheConfig(num_rows=slots, first_refresh=3)},
    )
    init_cores_(module.all_cores(), shape=SHAPE, generator=torch.Generator().manual_seed(0))
    return module


def cache_of(module: TTTableBatchedEmbeddingBags) -> RowCache:
    return module.row_caches["t"]


def trained(offset: int, num_rows: int, slots: int = 24) -> RowCache:
    module = module_of(offset, num_rows, slots)
    generator = torch.Generator().manual_seed(offset)
    for _ in range(6):
        ids = (torch.rand(120, generator=generator).pow(3) * num_rows).long()
        module(ids, torch.arange(len(ids) + 1)).square().sum().backward()
    return cache_of(module)


def rows_in(*caches: RowCache) -> dict[int, tuple[Tensor, ...]]:
    """Value, state and heat of every cached row."""
    names = ("rows", "exp_avg", "exp_avg_sq", "heats")
    return {
        row: tuple(getattr(cache, name)[slot] for name in names)
        for cache in caches
        for slot, row in enumerate(cache.ids.tolist())
        if row >= 0
    }


def test_rows_of_two_blocks_find_their_place_in_three() -> None:
    old = [trained(0, 300), trained(300, 300)]
    saved = saved_rows([cache.state_dict() for cache in old])
    new = [cache_of(module_of(offset, 200, 64)) for offset in (0, 200, 400)]
    for k, cache in enumerate(new):
        left = take_over(cache, saved, is_first=k == 0)
        assert len(left.ids) == 0
        assert (cache.num_steps, cache.last_refresh) == (old[0].num_steps, old[0].last_refresh)
        assert cache.interval == old[0].interval
        assert cache.step.equal(old[0].step)
    before, after = rows_in(*old), rows_in(*new)
    assert before.keys() == after.keys()
    assert len(before) == 48
    for row, tensors in before.items():
        for tensor, same in zip(tensors, after[row], strict=True):
            assert torch.equal(tensor, same)
    assert sum(c.statistics for c in new).equal(sum(c.statistics for c in old))


def test_counted_rows_are_where_the_counter_looks_for_them() -> None:
    old = trained(0, 600)
    module = module_of(0, 600, 64)
    cache = cache_of(module)
    take_over(cache, saved_rows([old.state_dict()]), is_first=True)
    ids = cache.counter_ids[cache.counter_ids >= 0]
    assert len(ids) > 20
    heats = dict(zip(cache.counter_ids.tolist(), cache.counter_heats.tolist(), strict=True))
    module(ids, torch.arange(len(ids) + 1)).sum().backward()
    now = dict(zip(cache.counter_ids.tolist(), cache.counter_heats.tolist(), strict=True))
    assert all(now[row] == heats[row] + 1 for row in ids.tolist())


def test_the_hottest_rows_are_kept_and_the_others_counted() -> None:
    old = trained(0, 600, 64)
    cache = cache_of(module_of(0, 600, 8))
    left = take_over(cache, saved_rows([old.state_dict()]), is_first=True)
    assert (cache.ids >= 0).all()
    assert cache.heats.min() >= left.heats.max()
    evicted = cache.statistics_dict()["evictions"] - old.statistics_dict()["evictions"]
    assert evicted == len(left.ids) == len(rows_in(old)) - 8
    hottest = left.ids[left.heats.argmax()]
    assert (cache.counter_ids == hottest).any()


@pytest.mark.parametrize("num_rows", [0, 600])
def test_a_block_without_saved_rows_is_empty(num_rows: int) -> None:
    saved = saved_rows([trained(0, 300).state_dict()])
    table = TTTable(name="t", shape=SHAPE, row_offset=0, num_rows=num_rows)
    if num_rows:
        saved = dataclasses.replace(saved.none(), whole=saved.whole)
    cache = RowCache(table, RowCacheConfig(num_rows=16), optimizer=ADAM)
    assert len(take_over(cache, saved, is_first=True).ids) == 0
    assert (cache.ids == -1).all()
