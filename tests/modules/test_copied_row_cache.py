"""A table with a row cache in another dtype, pickled, copied, compiled and loaded."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

from torchrec_tt import RowCacheConfig, TTEmbeddingBag
from torchrec_tt.optim import TTOptimizerConfig

ADAGRAD = TTOptimizerConfig(optimizer="adagrad", learning_rate=0.05)


def make_bag(num_rows: int = 64, **cache) -> TTEmbeddingBag:
    config = RowCacheConfig(num_rows=num_rows, first_refresh=2, optimizer=ADAGRAD, **cache)
    bag = TTEmbeddingBag(
        8000, 8, tt_ranks=[4, 4], mode="sum", include_last_offset=True, cache=config
    )
    bag.reset_parameters(generator=torch.Generator().manual_seed(0))
    return bag


def train(bag: nn.Module, steps: range = range(6)) -> None:
    for step in steps:
        ids = torch.randint(0, 100, (200,), generator=torch.Generator().manual_seed(step))
        bag(ids, torch.arange(201)).square().sum().backward()


def trained(**kwargs) -> TTEmbeddingBag:
    bag = make_bag(**kwargs)
    train(bag)
    return bag


def look_up(bag: nn.Module) -> Tensor:
    return bag.eval()(torch.arange(200), torch.arange(201)).detach()


def assert_same_state(bag: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in bag.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of_rows", [None, torch.float32, torch.bfloat16])
def test_a_cache_stays_in_use_where_its_module_gets_another_dtype(dtype, of_rows):
    bag, other = trained(dtype=of_rows), trained(dtype=of_rows)
    before = look_up(bag)
    train(other, range(6, 12))
    heats = bag.row_cache.heats.clone()
    bag.to(dtype).train()
    cache = bag.row_cache
    assert torch.equal(cache.heats, heats)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.float64 if dtype == torch.float64 else of_rows or torch.float32
    assert (cache.rows.dtype, cache.sum.dtype, cache.fold_squares.dtype) == (
        *(rows, sums),
        torch.float64,
    )
    torch.testing.assert_close(look_up(bag).float(), before, rtol=0.02, atol=2e-3)
    train(bag.train(), range(6, 12))
    bag.float()
    assert cache.rows.dtype == (of_rows or torch.float32)
    counts = cache.statistics_dict()
    assert counts["hits"] == other.row_cache.statistics_dict()["hits"] > 0
    torch.testing.assert_close(look_up(bag), look_up(other), rtol=0.05, atol=5e-3)


def test_rows_of_a_float64_table_are_float64():
    with pytest.raises(ValueError, match=r"cache.dtype must be None for float64 cores, got .*16"):
        TTEmbeddingBag(
            *(8000, 8),
            tt_ranks=[4, 4],
            dtype=torch.float64,
            cache=RowCacheConfig(num_rows=8, dtype=torch.bfloat16),
        )


def through_pickle(bag: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(bag))


def through_torch_save(bag: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(bag, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copy_of", [through_pickle, through_torch_save, copy.deepcopy])
def test_a_copy_trains_on_bit_for_bit(copy_of):
    bag = trained()
    other = copy_of(bag)
    train(bag, range(6, 12))
    train(other, range(6, 12))
    assert_same_state(bag, other)
    assert bag.row_cache.statistics_dict()["refreshes"] == 2


@pytest.mark.parametrize("copy_of", [through_pickle, copy.deepcopy])
def test_a_copy_does_not_wait_for_the_originals_lookups(copy_of):
    bag = trained()
    waiting = bag(torch.arange(8), torch.arange(9))
    for module in (copy_of(bag), bag):
        train(module, range(6, 12))
        assert module.row_cache.statistics_dict()["refreshes"] == 1 + (module is not bag)
    waiting.sum().backward()


@pytest.mark.parametrize("num_rows", [32, 128])
def test_a_state_dict_of_another_capacity_is_refused_by_name(num_rows):
    with pytest.raises(RuntimeError, match=rf"row cache, {num_rows} slots, got 64: torchrec_tt"):
        make_bag(num_rows).load_state_dict(trained().state_dict())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_module_trains_its_cache_as_a_plain_one_does(fullgraph):
    plain, bag = make_bag(), make_bag()
    compiled = torch.compile(bag, fullgraph=fullgraph)
    train(plain)
    train(compiled)
    assert_same_state(bag, plain)
    assert plain.row_cache.statistics_dict()["hits"] > 0


def test_an_exported_table_has_its_cached_rows():
    bag = trained().eval()
    call = (torch.arange(100), torch.arange(101))
    exported = torch.export.export(bag, call).module()
    assert torch.equal(exported(*call), bag(*call))
    cached = bag.row_cache.ids
    cached = cached[(cached >= 0) & (cached < 100)]
    bag.row_cache.rows.zero_()
    assert not exported(*call)[cached].any()
    assert len(cached) > 0


def test_fx_takes_a_table_with_a_cache_as_a_leaf():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = trained()

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return 2 * self.bag(ids, offsets)

    model = Model()
    graph = fx.symbolic_trace(model)
    assert torch.equal(look_up(graph), look_up(model))
    assert graph.bag.row_cache is model.bag.row_cache


def test_a_table_is_not_the_root_of_a_trace():
    with pytest.raises(NotImplementedError, match=r"a module that holds the TTEmbeddingBag, such"):
        fx.symbolic_trace(trained())


def test_a_bag_made_in_inference_mode_is_looked_up_and_not_trained():
    source = trained().eval()
    with torch.inference_mode():
        bag = make_bag()
        bag.load_state_dict(source.state_dict())
    with torch.no_grad():
        assert torch.equal(look_up(bag), look_up(source))
    with torch.inference_mode():
        assert torch.equal(look_up(bag), look_up(source))
    with pytest.raises(RuntimeError, match=r"outside torch.inference_mode\(\) to be trained, got"):
        train(bag.train())
    with torch.inference_mode():
        assert_same_state(bag, source)


def test_a_lookup_in_inference_mode_leaves_a_bag_in_training():
    bag, other = trained(), trained()
    with torch.inference_mode():
        assert torch.equal(bag(torch.arange(200), torch.arange(201)), look_up(other))
    train(bag, range(6, 9))
    train(other.train(), range(6, 9))
    assert_same_state(bag, other)
