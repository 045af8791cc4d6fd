import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.ranks import Ranks
from torchrec_tt import RowCacheConfig, TTEmbeddingBag, make_shape
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.row_folding import RowFold, fold_rows
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.cores import rows as rows_of_cores
from torchrec_tt.tt.init import init_cores_
from torchrec_tt.tt.row_cache import row_cache_bytes

SHAPE = make_shape(8000, 8, tt_ranks=[4, 4])


def make_module(num_rows: int = 64, *, reduce=None, num_features: int = 1, **kwargs):
    config = RowCacheConfig(num_rows=num_rows, **({"first_refresh": 2} | kwargs))
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=SHAPE, num_features=num_features)],
        optimizer=TTOptimizerConfig(optimizer="adagrad", learning_rate=0.05),
        reduce_gradients=reduce,
        caches={"t": config},
    )
    init_cores_(module.all_cores(), shape=SHAPE, generator=torch.Generator().manual_seed(0))
    return module


def train(module: nn.Module, ids: Tensor, *, target: float = 0.1) -> None:
    (module(ids, torch.arange(len(ids) + 1)) - target).square().sum().backward()


def cache_of(module: TTTableBatchedEmbeddingBags) -> RowCache:
    return module.row_caches["t"]


def hot_batches(count: int, *, drift: int = 0, seed: int = 0) -> list[Tensor]:
    """200 lookups of 60 rows and 40 of others; the 60 move by `drift` rows a batch."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.cat(
            [
                (torch.randint(0, 60, (200,), generator=generator) * 7 + drift * step) % 8000,
                torch.randint(0, 8000, (40,), generator=generator),
            ]
        )
        for step in range(count)
    ]


# U55
def test_u55_8_rows_looked_up_10_times_hit_72_times_of_80():
    module = make_module(8, first_refresh=1)
    for _ in range(10):
        train(module, torch.arange(8))
    counts = cache_of(module).statistics_dict()
    assert (counts["hits"], counts["misses"], counts["unique_misses"]) == (72, 8, 8)
    assert (counts["fills"], counts["evictions"]) == (8, 0)
    assert counts["bytes"] == sum(buffer.nbytes for buffer in module.buffers())
    assert cache_of(module).statistics.dtype == torch.int64
    cache_of(module).reset_statistics()
    train(module, torch.arange(8))
    assert cache_of(module).statistics_dict()["hits"] == 8


# U53
def test_u53_the_default_cache_works_within_100_steps_without_a_call():
    config = RowCacheConfig(num_rows=64, optimizer=TTOptimizerConfig(learning_rate=0.05))
    bag = TTEmbeddingBag(
        8000, 8, tt_ranks=[4, 4], mode="sum", include_last_offset=True, cache=config
    )
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.05)
    for ids in hot_batches(100):
        train(bag, ids)
        optimizer.step()
        optimizer.zero_grad()
    assert bag.row_cache.statistics_dict()["hits"] > 5000  # of the 10,000 after step 50


# U52, as far as one device goes
def test_u52_200_steps_with_a_cache_look_up_what_those_without_do_bit_for_bit():
    cached = make_module(first_refresh=1, refresh_growth=1, on_evict="drop")
    plain = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=SHAPE)], optimizer=TTOptimizerConfig(learning_rate=0.0)
    )
    plain.load_state_dict(cached.state_dict(), strict=False)
    cached.optimizer.param_groups[0]["lr"] = 0.0
    for ids in hot_batches(200, drift=20):
        output = cached(ids, torch.arange(len(ids) + 1))
        assert torch.equal(output, plain(ids, torch.arange(len(ids) + 1)))
        output.sum().backward()
    assert cache_of(cached).statistics_dict()["evictions"] > 1000


# U54
def test_u54_a_cache_fills_beside_a_dense_table_in_one_model():
    dense = nn.EmbeddingBag(100, 8, mode="sum")
    module = make_module(first_refresh=1, refresh_growth=1)
    for ids in hot_batches(10):
        bags = torch.arange(len(ids))
        output = module(ids, torch.arange(len(ids) + 1)) + dense(ids % 100, bags)
        output.square().sum().backward()
        assert dense.weight.grad.isfinite().all()
    cached = cache_of(module).ids
    assert ((cached >= 0) & (cached < 8000)).float().mean() > 0.9


def test_u30_rows_beyond_int32_are_cached_as_themselves():
    shape = make_shape(2**31 + 10, 8, tt_ranks=[2, 2])
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=shape)],
        optimizer=TTOptimizerConfig(learning_rate=0.1),
        caches={"t": RowCacheConfig(num_rows=8, first_refresh=1)},
    )
    init_cores_(module.all_cores(), shape=shape)
    ids = torch.tensor([0, 9, 2**31 - 1, 2**31, 2**31 + 9])  # 0 and 2**31, 9 and 2**31 + 9
    expected = rows_of_cores(module.all_cores(), ids, shape=shape).detach()
    train(module, ids)
    before = rows_of_cores(module.all_cores(), ids, shape=shape).detach()
    assert not torch.equal(before, expected)
    output = module(ids, torch.arange(6))
    torch.testing.assert_close(output, before)
    (output * torch.arange(1.0, 6.0)[:, None]).sum().backward()
    assert cache_of(module).statistics_dict()["hits"] == 5
    stepped = module.eval()(ids, torch.arange(6))
    torch.testing.assert_close(stepped, before - 0.1 * torch.arange(1.0, 6.0)[:, None])


# U35
def test_u35_features_of_one_table_count_a_row_once():
    module = make_module(8, num_features=46, first_refresh=1)
    ids = torch.arange(46) % 4
    for _ in range(3):
        train(module, ids)
    counts = cache_of(module).statistics_dict()
    assert (counts["unique_misses"], counts["misses"], counts["hits"]) == (4, 46, 92)
    assert counts["fills"] == 4
    assert counts["bytes"] == cache_of(make_module(8)).num_bytes  # as for a table of one feature


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("on_evict", ["fold", "drop"])
def test_2_no_lookup_returns_another_row_however_traffic_drifts(policy, on_evict):
    module = make_module(policy=policy, on_evict=on_evict, refresh_growth=1)
    learned: dict[int, Tensor] = {}
    for ids in hot_batches(40, drift=50):
        cache = cache_of(module)
        is_due = cache.is_due
        before = {row: cache.rows[s].clone() for s, row in enumerate(cache.ids.tolist())}
        output = module(ids, torch.arange(len(ids) + 1))
        cached = {row: s for s, row in enumerate(cache.ids.tolist()) if row >= 0}
        of_cores = rows_of_cores(module.all_cores(), ids, shape=SHAPE)
        for row, found, value in zip(ids.tolist(), output, of_cores, strict=True):
            wanted = before[row] if row in cached and row in before else value
            torch.testing.assert_close(found, wanted)
        assert is_due or cached.keys() == before.keys() - {-1}
        (output - 0.1).square().sum().backward()
        learned = {row: cache.rows[s].clone() for row, s in cached.items()}
    assert cache_of(module).statistics_dict()["evictions"] > 100
    assert learned


def test_3_a_refresh_keeps_what_rows_that_stay_have_learned_bit_for_bit():
    module = make_module(refresh_growth=1, first_refresh=5)
    for ids in hot_batches(10, drift=7):
        train(module, ids)
    cache = cache_of(module)
    assert cache.is_due
    ids, rows, sums = cache.ids.clone(), cache.rows.clone(), cache.sum.clone()
    with torch.no_grad():
        module._caches.start_step(module.all_cores())
    stayed = cache.ids == ids
    assert stayed.any()
    assert (~stayed).any()
    assert torch.equal(cache.rows[stayed], rows[stayed])
    assert torch.equal(cache.sum[stayed], sums[stayed])
    assert (cache.sum[~stayed] == 0).all()
    new = cache.ids[~stayed]
    of_cores = rows_of_cores(module.all_cores(), new, shape=SHAPE)
    torch.testing.assert_close(cache.rows[~stayed], of_cores)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_3_training_goes_on_after_a_restore_bit_for_bit(optimizer, dtype):
    own = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.02)
    straight, restored = (
        make_module(dtype=dtype, optimizer=own, refresh_growth=2) for _ in range(2)
    )
    batches = hot_batches(24, drift=20)
    for ids in batches[:11]:
        train(straight, ids)
    restored.load_state_dict(copy.deepcopy(straight.state_dict()))
    for ours, theirs in zip(restored.optimizer.states(), straight.optimizer.states(), strict=True):
        ours.copy_(theirs)
    for ids in batches[11:]:
        train(straight, ids)
        train(restored, ids)
    assert cache_of(straight).statistics_dict()["refreshes"] >= 3
    for name, value in straight.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name


def test_an_interval_from_a_checkpoint_is_at_most_that_of_the_new_schedule():
    long, short = (make_module(refresh_growth=99, max_refresh_interval=n) for n in (90, 20))
    for ids in hot_batches(12):
        train(long, ids)
    assert cache_of(long).interval == 90
    short.load_state_dict(long.state_dict())
    assert cache_of(short).interval == 20


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_4_memory_is_what_the_formula_says_and_not_of_the_size_of_the_table(optimizer, dtype):
    own = TTOptimizerConfig(optimizer=optimizer)
    cache = RowCache(
        TTTable(name="t", shape=SHAPE),
        RowCacheConfig(num_rows=100, dtype=dtype, optimizer=own),
        optimizer=None,
    )
    stated = row_cache_bytes(
        104,
        8,
        optimizer=optimizer,
        element_size=dtype.itemsize,
        has_step=optimizer == "adam" or dtype.itemsize == 2,
    )
    assert cache.num_bytes == stated.total
    assert cache.rows.nbytes == stated.rows
    assert cache.ids.nbytes == stated.tags
    assert cache.heats.nbytes == stated.heats
    assert cache.counter_ids.nbytes + cache.counter_heats.nbytes == stated.counter
    assert max(buffer.numel() for buffer in cache.buffers()) <= 104 * 8 < SHAPE.num_embeddings


def test_rows_of_equal_heat_do_not_swap():
    module = make_module(8, first_refresh=1, refresh_growth=1)
    for _ in range(20):
        train(module, torch.arange(24))
    counts = cache_of(module).statistics_dict()
    assert (counts["fills"], counts["evictions"]) == (8, 0)


def test_evaluation_neither_counts_nor_changes_the_cache():
    module = make_module(first_refresh=1)
    for ids in hot_batches(3):
        train(module, ids)
    before = copy.deepcopy(module.state_dict())
    ids = hot_batches(1)[0]
    for is_training, has_grad in ((False, False), (True, False)):
        module.train(is_training)
        with torch.set_grad_enabled(has_grad):
            module(ids, torch.arange(len(ids) + 1))
    for name, value in module.state_dict().items():
        assert torch.equal(before[name], value), name


def test_a_lookup_in_inference_mode_changes_nothing_and_training_goes_on_bit_for_bit():
    module, other = make_module(), make_module()
    for step, ids in enumerate(hot_batches(8, drift=30)):
        if step in (1, 2, 5):  # before the first fill, when it is due, and later
            before = copy.deepcopy(module.state_dict())
            with torch.inference_mode():
                found = module(ids, torch.arange(len(ids) + 1))
            with torch.no_grad():
                assert torch.equal(found, other(ids, torch.arange(len(ids) + 1)))
            assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
        train(module, ids)
        train(other, ids)
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert cache_of(module).statistics_dict()["hits"] > 0


def test_a_module_made_in_inference_mode_is_looked_up_and_not_trained():
    source = make_module()
    for ids in hot_batches(4):
        train(source, ids)
    ids = torch.arange(400)
    with torch.inference_mode():
        module = make_module()
        module.load_state_dict(source.state_dict())
        found = module.eval()(ids, torch.arange(401))
    assert torch.equal(found, source.eval()(ids, torch.arange(401)))
    with torch.no_grad():
        assert torch.equal(found, module(ids, torch.arange(401)))
    with pytest.raises(
        RuntimeError, match=r"cores must be made outside torch.inference_mode\(\) to"
    ):
        train(module.train(), ids)


def test_without_pooling_a_cached_row_is_looked_up_and_stepped_as_a_row():
    rate = 0.1
    optimizer = TTOptimizerConfig(learning_rate=rate)
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=SHAPE)],
        pooling="none",
        optimizer=optimizer,
        caches={"t": RowCacheConfig(num_rows=64, first_refresh=2, refresh_growth=1)},
    )
    init_cores_(module.all_cores(), shape=SHAPE, generator=torch.Generator().manual_seed(0))
    cache = cache_of(module)
    for ids in hot_batches(10, drift=7):
        offsets = torch.tensor([0, len(ids) // 3, len(ids)])
        output = module(ids, offsets)
        cached, rows = cache.ids.clone(), cache.rows.clone()
        table = cache.write_into(dense(module.all_cores(), shape=SHAPE)).detach()
        torch.testing.assert_close(output, table[ids])
        grads = torch.zeros_like(table).index_add(0, ids, 2 * output.detach())
        output.square().sum().backward()
        is_cached = cached >= 0
        torch.testing.assert_close(
            cache.rows[is_cached], rows[is_cached] - rate * grads[cached[is_cached]]
        )
    counts = cache.statistics_dict()
    assert counts["evictions"] > 0
    assert counts["hits"] > 500


def test_a_refresh_waits_for_lookups_in_flight():
    module = make_module(first_refresh=1, refresh_growth=1)
    cache = cache_of(module)
    first = module(torch.arange(8), torch.arange(9))
    second = module(torch.arange(100, 108), torch.arange(9))  # due, but the first is in flight
    assert (cache.ids == -1).all()
    del second
    first.sum().backward()
    train(module, torch.arange(8))
    assert cache.statistics_dict()["fills"] == 16


def test_an_abandoned_lookup_does_not_hold_the_cache_up():
    module = make_module(first_refresh=1, refresh_growth=1)
    output = module(torch.arange(8), torch.arange(9))
    del output
    train(module, torch.arange(8))
    assert cache_of(module).statistics_dict()["fills"] == 8


def test_a_backward_that_the_slots_no_longer_fit_is_refused():
    bag = TTEmbeddingBag(
        8000,
        8,
        tt_ranks=[4, 4],
        mode="sum",
        include_last_offset=True,
        cache=RowCacheConfig(num_rows=64, first_refresh=1, optimizer=TTOptimizerConfig()),
    )
    output = bag(torch.arange(8), torch.arange(9)).sum()
    output.backward(retain_graph=True)
    train(bag, torch.arange(8))
    with pytest.raises(RuntimeError, match="row caches must be those of the forward pass"):
        output.backward()


def test_a_dense_table_has_the_cached_rows():
    config = RowCacheConfig(
        num_rows=8, first_refresh=1, optimizer=TTOptimizerConfig(learning_rate=0.1)
    )
    bag = TTEmbeddingBag(50, 8, tt_ranks=[4, 4], mode="sum", include_last_offset=True, cache=config)
    for _ in range(3):
        train(bag, torch.tensor([3, 3, 3, 49]), target=5.0)
    dense = bag.to_dense()
    torch.testing.assert_close(dense, bag.eval()(torch.arange(50), torch.arange(51)))
    assert dense[3].mean() > 1  # what the row learned, not what the cores hold
    bag.reset_parameters()
    assert (bag.row_cache.ids == -1).all()


def test_weights_get_the_gradient_of_cached_rows():
    module = make_module(first_refresh=1)
    for ids in hot_batches(2):
        train(module, ids)
    ids = hot_batches(1)[0]
    values = module.eval()(ids, torch.arange(len(ids) + 1)).detach()
    weights = torch.rand(len(ids), requires_grad=True)
    cotangent = torch.randn_like(values)
    module.train()(ids, torch.arange(len(ids) + 1), per_sample_weights=weights).backward(cotangent)
    torch.testing.assert_close(weights.grad, (values * cotangent).sum(1))
    assert cache_of(module).statistics_dict()["hits"] > 0


def test_an_optimizer_is_asked_for_where_the_cores_have_none():
    bag = TTEmbeddingBag(8000, 8, tt_ranks=[4, 4], mode="sum", cache=RowCacheConfig(num_rows=8))
    with pytest.raises(ValueError, match=r"cache.optimizer must be given .* got None for table"):
        bag(torch.tensor([[1]]))
    with torch.no_grad():
        assert bag(torch.tensor([[1]])).shape == (1, 8)


def test_caches_must_be_of_tables():
    with pytest.raises(ValueError, match=r"caches must be of the tables \['t'\], got \['x'\]"):
        TTTableBatchedEmbeddingBags(
            [TTTable(name="t", shape=SHAPE)], caches={"x": RowCacheConfig(num_rows=8)}
        )


def fold(cores: list[Tensor], ids: Tensor, values: Tensor, kept: Tensor, **kwargs) -> Tensor:
    return fold_rows(
        [
            RowFold(
                TTTable(name="t", shape=SHAPE),
                cores,
                ids=ids,
                values=values,
                weights=torch.ones(len(ids)),
                kept_ids=kept,
                kept_weights=torch.ones(len(kept)),
            )
        ],
        **kwargs,
    )[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_folding_brings_the_cores_nearer_and_reports_the_distances(dtype):
    cores = [core.detach().to(dtype) for core in make_module().all_cores()]
    ids = torch.arange(0, 8000, 200)
    values = rows_of_cores(cores, ids, shape=SHAPE).double()
    values += 0.3 * values.std() * torch.randn_like(values)
    missed = [(rows_of_cores(cores, ids, shape=SHAPE) - values).square().sum()]
    before, after = fold(cores, ids, values, torch.tensor([], dtype=torch.int64))
    missed.append((rows_of_cores(cores, ids, shape=SHAPE) - values).square().sum())
    assert after < 0.8 * before
    for reported, found in zip((before, after), missed, strict=True):
        rtol = 0.1 if dtype == torch.bfloat16 else 1e-3  # the oracle multiplies in bfloat16
        torch.testing.assert_close(reported, found.double(), rtol=rtol, atol=0)


def test_rows_that_are_to_stay_move_less():
    ids, kept = torch.arange(0, 8000, 200), torch.arange(1, 8000, 50)
    moved = []
    for held in (kept, kept[:0]):
        cores = [core.detach().clone() for core in make_module().all_cores()]
        old = rows_of_cores(cores, kept, shape=SHAPE)
        values = rows_of_cores(cores, ids, shape=SHAPE) + old.std()
        fold(cores, ids, values, held)
        moved.append(float((rows_of_cores(cores, kept, shape=SHAPE) - old).square().sum()))
    assert moved[0] < 0.8 * moved[1]


def test_folding_no_rows_leaves_the_cores():
    cores = [core.detach().clone() for core in make_module().all_cores()]
    old = [core.clone() for core in cores]
    none = torch.tensor([], dtype=torch.int64)
    assert fold(cores, none, torch.zeros(0, 8), none).tolist() == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(cores, old, strict=True))


def train_replicas(rank: int) -> tuple[list[Tensor], dict]:
    """Two replicas of the cores with a cache each; rank 1 has no ids for 20 steps."""

    def reduce(tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            dist.all_reduce(tensor)
        return tensors

    module = make_module(reduce=reduce, first_refresh=5, refresh_growth=1)
    for ids in hot_batches(40, drift=30, seed=rank):
        train(module, ids if rank == 0 else ids[:0])
    for ids in hot_batches(20, drift=-30, seed=rank):
        train(module, ids)
    return [core.detach() for core in module.all_cores()], cache_of(module).statistics_dict()


# U23
@pytest.mark.slow
def test_u23_replicas_fold_alike_while_one_has_no_ids():
    ranks = Ranks(2)
    try:
        (cores, counts), (others, idle) = ranks.run(train_replicas)
    finally:
        ranks.stop()
    assert all(torch.equal(a, b) for a, b in zip(cores, others, strict=True))
    assert counts["evictions"] > 0
    assert counts["refreshes"] == idle["refreshes"] == 11
    assert 0 < counts["fold_residual"] < 1


@pytest.mark.slow
def test_a_filled_cache_is_exported_and_compiled_in_evaluation():
    bag = TTEmbeddingBag(
        8000,
        8,
        tt_ranks=[4, 4],
        mode="sum",
        include_last_offset=True,
        cache=RowCacheConfig(num_rows=64, first_refresh=1, optimizer=TTOptimizerConfig()),
    )
    ids, offsets = torch.arange(8), torch.arange(9)
    for _ in range(3):
        train(bag, ids)
    bag.eval()
    with torch.no_grad():
        wanted = bag(ids, offsets)
        exported = torch.export.export(bag, (ids, offsets)).module()
        assert torch.equal(exported(ids, offsets), wanted)
        compiled = torch.compile(bag, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ids, offsets), wanted)
    assert bag.row_cache.num_steps == 3


class InDistributedDataParallel(nn.Module):
    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets)


def train_in_ddp(rank: int) -> str:
    cache = RowCacheConfig(num_rows=8, optimizer=TTOptimizerConfig())
    bag = TTEmbeddingBag(100, 8, tt_ranks=[4, 4], mode="sum", include_last_offset=True, cache=cache)
    model = nn.parallel.DistributedDataParallel(InDistributedDataParallel(bag))
    try:
        model(torch.arange(3), torch.arange(4))
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_data_parallel_training_with_a_cache_is_refused_on_every_rank():
    ranks = Ranks(2)
    try:
        messages = ranks.run(train_in_ddp)
    finally:
        ranks.stop()
    assert all("cannot be trained inside DistributedDataParallel" in text for text in messages)
