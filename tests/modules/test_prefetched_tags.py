"""Tags that are looked up ahead of a step, and rows that stay while a batch is in flight."""

import copy

import pytest
import torch
from torch import Tensor

from tests.modules.test_row_cache import cache_of, hot_batches, make_module, train
from torchrec_tt.modules import row_caches
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags


@pytest.fixture
def plans(monkeypatch) -> list[Tensor]:
    """The indices of every plan that is made."""
    made: list[Tensor] = []
    plan = row_caches.plan

    def counted(indices: Tensor, *args, **kwargs):
        made.append(indices)
        return plan(indices, *args, **kwargs)

    monkeypatch.setattr(row_caches, "plan", counted)
    return made


def offsets_of(ids: Tensor) -> Tensor:
    return torch.arange(len(ids) + 1)


# U52
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_batches_prefetched_ahead_train_as_without_bit_for_bit(depth, plans):
    plain, piped = (make_module(first_refresh=3, refresh_growth=1) for _ in range(2))
    batches = hot_batches(20, drift=20)
    for ids in batches:
        train(plain, ids)
    plans.clear()
    for ids in batches[:depth]:
        piped.prefetch(ids, offsets_of(ids))
    for step, ids in enumerate(batches):
        train(piped, ids)
        if step + depth < len(batches):
            ahead = batches[step + depth]
            piped.prefetch(ahead, offsets_of(ahead))
    assert cache_of(plain).statistics_dict()["evictions"] > 100
    for name, value in piped.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    refreshes = cache_of(plain).statistics_dict()["refreshes"]
    if depth == 1:  # of the batches ahead only those before a refresh are planned again
        assert len(plans) == len(batches) + refreshes


def test_tags_found_ahead_are_not_looked_up_again(plans):
    module = make_module(first_refresh=1, refresh_growth=1, max_refresh_interval=1)
    for ids in hot_batches(3):
        train(module, ids)
    ids = hot_batches(1)[0]
    module.eval()
    plans.clear()
    module.prefetch(ids, offsets_of(ids))
    expected = copy.deepcopy(module)(ids, offsets_of(ids))  # a copy has its own
    assert len(plans) == 2
    assert torch.equal(module(ids, offsets_of(ids)), expected)
    assert len(plans) == 2
    module(ids, offsets_of(ids))
    assert len(plans) == 3


@pytest.mark.parametrize("change", ["ids", "offsets"])
def test_another_batch_in_the_same_memory_is_planned_anew(change):
    module = make_module()
    ids, offsets = torch.arange(8), torch.arange(9)
    module.prefetch(ids, offsets)
    if change == "ids":
        ids.add_(100)
    else:
        offsets = torch.tensor([0, 8, *[8] * 7])
    expected = make_module()(ids.clone(), offsets)
    assert torch.equal(module(ids, offsets), expected)


def test_rows_of_a_batch_in_flight_stay_whatever_is_prefetched():
    module = make_module(first_refresh=1, refresh_growth=1)
    cache = cache_of(module)
    batches = hot_batches(12, drift=35)
    for ids in batches[:4]:
        train(module, ids)
    ids = batches[4]
    module.prefetch(ids, offsets_of(ids))
    in_flight = module(ids, offsets_of(ids))
    held = cache.ids.clone()
    for other in batches[5:8]:  # a refresh is due at each of them
        module.prefetch(other, offsets_of(other))
        module(other, offsets_of(other))
        assert torch.equal(cache.ids, held)
    is_used = torch.isin(held, ids)
    before = cache.rows.clone()
    in_flight.sum().backward()
    changed = (cache.rows != before).any(1)
    assert torch.equal(changed, is_used & (held >= 0))
    assert changed.any()
    train(module, batches[8])
    assert not torch.equal(cache.ids, held)


def test_what_is_prefetched_must_be_in_range():
    module = make_module()
    with pytest.raises(ValueError, match=r"indices must be in \[0, 8000\) for table 't', got 8000"):
        module.prefetch(torch.tensor([8000]), torch.tensor([0, 1]))
    bare = TTTableBatchedEmbeddingBags(module.tables)
    bare.prefetch(torch.tensor([8000]), torch.tensor([0, 1]))  # nothing to look up
