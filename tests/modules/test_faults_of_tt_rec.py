"""The faults of TT-Rec's released code, each with a test that fails on code that has it."""

import copy
import math
import time

import pytest
import torch

from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig
from torchrec_tt.tt.cores import rows
from torchrec_tt.tt.cost import core_bytes, optimizer_state_bytes
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.init import init_cores_

IN_BACKWARD = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def make_module(*row_factors: int, embedding_dim: int = 8, rank: int = 4, **kwargs):
    shape = make_shape(
        math.prod(row_factors),
        embedding_dim,
        tt_ranks=[rank] * (len(row_factors) - 1),
        row_factors=row_factors,
    )
    module = TTTableBatchedEmbeddingBags([TTTable(name="t", shape=shape)], **kwargs)
    generator = torch.Generator().manual_seed(0)
    init_cores_(module.all_cores(), shape=shape, generator=generator)
    return module


def train(module, ids, *, target: float = 1.0) -> None:
    output = module(ids, torch.arange(len(ids) + 1))
    (output - target).square().sum().backward()


@pytest.mark.parametrize("optimizer", IN_BACKWARD)
def test_1_a_step_reaches_every_slice_of_every_core(optimizer):
    module = make_module(200, 3, 150, optimizer=TTOptimizerConfig(optimizer=optimizer))
    before = [core.detach().clone() for core in module.all_cores()]
    train(module, torch.arange(200 * 3 * 150))
    for core, old in zip(module.all_cores(), before, strict=True):
        assert (core.detach() != old).any(dim=1).all()


def test_2_no_lookup_returns_another_row_however_traffic_drifts():
    module = make_module(20, 20, 20, optimizer=TTOptimizerConfig(learning_rate=0.01))
    shape = module.tables[0].shape
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        hot = (torch.randint(0, 60, (200,), generator=generator) + 500 * step) % 8000
        train(module, hot, target=0.1)
        ids = torch.cat([hot, torch.randint(0, 8000, (200,), generator=generator)])
        with torch.no_grad():
            found = module(ids, torch.arange(401))
            torch.testing.assert_close(found, rows(module.all_cores(), ids, shape=shape))


@pytest.mark.parametrize("optimizer", IN_BACKWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_3_training_goes_on_after_a_restore_as_if_nothing_had_happened(optimizer, dtype):
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.02)
    straight = make_module(5, 6, 7, optimizer=config, dtype=dtype)
    restored = make_module(5, 6, 7, optimizer=config, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 210, (50,), generator=generator) for _ in range(6)]
    for ids in batches[:3]:
        train(straight, ids)
    restored.load_state_dict(copy.deepcopy(straight.state_dict()))
    for ours, theirs in zip(restored.optimizer.states(), straight.optimizer.states(), strict=True):
        ours.copy_(theirs)
    for ids in batches[3:]:
        train(straight, ids)
        train(restored, ids)
    for ours, theirs in zip(restored.all_cores(), straight.all_cores(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_4_nothing_of_the_size_of_the_rows_is_kept(optimizer):
    module = make_module(200, 220, 250, optimizer=TTOptimizerConfig(optimizer=optimizer))
    train(module, torch.arange(0, 11_000_000, 1_000_003))
    shape = module.tables[0].shape
    kept = {t.data_ptr(): t.nbytes for t in [*module.parameters(), *module.buffers()]}
    kept |= {t.data_ptr(): t.nbytes for t in module.optimizer.states()}
    expected = core_bytes(shape) + optimizer_state_bytes(shape, optimizer=optimizer)
    assert sum(kept.values()) == expected < shape.num_embeddings


@pytest.mark.parametrize("method", ["sampled_gaussian", "gaussian", "uniform"])
def test_5_initial_rows_are_centred_spread_as_documented_and_quick_to_draw(method):
    shape = make_shape(10_131_227, 16, tt_ranks=[32, 32])
    cores = [torch.empty(size) for size in shape.core_shapes]
    begin = time.perf_counter()
    init_cores_(cores, shape=shape, method=method, generator=torch.Generator().manual_seed(0))
    assert time.perf_counter() - begin < 3  # 9 s there
    ids = torch.randint(0, shape.num_embeddings, (20_000,))
    values = rows(cores, ids, shape=shape)
    wanted = (3 * shape.num_embeddings) ** -0.5
    assert 0.8 * wanted < values.std() < 1.2 * wanted
    assert values.mean().abs() < 0.1 * wanted


@pytest.mark.slow
def test_6_equal_ids_cost_once():
    module = make_module(
        40, 40, 40, embedding_dim=64, rank=64, optimizer=TTOptimizerConfig(learning_rate=0.0)
    )
    times: dict[str, list[float]] = {"equal": [], "distinct": []}
    batches = {"equal": torch.full((16384,), 7), "distinct": torch.randperm(64_000)[:16384]}
    for _ in range(5):
        for name, ids in batches.items():
            begin = time.process_time()
            train(module, ids)
            times[name].append(time.process_time() - begin)
    assert min(times["equal"]) < 0.5 * min(times["distinct"])  # about a tenth


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_6_a_step_neither_reads_nor_writes_slices_without_a_gradient(optimizer):
    module = make_module(5, 6, 7, optimizer=TTOptimizerConfig(optimizer=optimizer))
    cores = module.all_cores()
    used = [[0, 1], [3], [2, 5]]
    for core, digits in zip(cores, used, strict=True):
        unused = [digit for digit in range(len(core)) if digit not in digits]
        with torch.no_grad():
            core[unused] = float("nan")
    before = [core.detach().clone() for core in cores]
    ids = [(i * 6 + j) * 7 + k for i in used[0] for j in used[1] for k in used[2]]
    train(module, torch.tensor(ids))
    for core, old, digits in zip(cores, before, used, strict=True):
        unused = [digit for digit in range(len(core)) if digit not in digits]
        assert core[unused].isnan().all()
        assert core[digits].isfinite().all()
        assert not torch.equal(core[digits], old[digits])


def test_7_gradients_that_are_views_give_what_their_copies_give():
    module = make_module(5, 6, 7)
    output = module(torch.arange(8), torch.arange(9))
    for cotangent in (
        torch.randn(8, 8).T,
        torch.randn(1, 8).expand(8, 8),
        torch.randn(8, 16)[:, ::2],
    ):
        grads = torch.autograd.grad(output, module.all_cores(), cotangent, retain_graph=True)
        wanted = torch.autograd.grad(
            output, module.all_cores(), cotangent.contiguous(), retain_graph=True
        )
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


# U59
@pytest.mark.parametrize("optimizer", IN_BACKWARD)
def test_7_steps_on_gradients_that_are_views_are_those_on_their_copies(optimizer):
    for cotangent in (torch.randn(8, 8).T, torch.randn(1, 8).expand(8, 8)):
        modules = []
        for grad in (cotangent, cotangent.contiguous()):
            module = make_module(5, 6, 7, optimizer=TTOptimizerConfig(optimizer=optimizer))
            module(torch.arange(8), torch.arange(9)).backward(grad)
            modules.append(module)
        cores = [module.all_cores() for module in modules]
        assert all(torch.equal(a, b) for a, b in zip(*cores, strict=True))


def test_7_ids_out_of_range_and_unknown_optimizers_raise():
    module = make_module(5, 6, 7)
    for bad in (-1, 210, 2**40):
        with pytest.raises(ValueError, match=rf"\[0, 210\) for table 't', got {bad}"):
            module(torch.tensor([bad]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="optimizer must be one of"):
        CoreOptimizer(module.all_cores(), TTOptimizerConfig(optimizer="adagrad2"))


def test_7_tables_of_different_shapes_go_in_one_call():
    shapes = [
        make_shape(100, 4, tt_ranks=[3]),
        make_shape(1000, 16, tt_ranks=[4, 5]),
        make_shape(1000, 8, tt_ranks=[2, 3, 2]),
    ]
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)]
    )
    for table in module.tables:
        init_cores_(list(module.cores[table.name]), shape=table.shape)
    ids = torch.tensor([1, 99, 999, 5, 0, 500])
    output = module(ids, torch.arange(7))
    parts = [
        rows(list(module.cores[table.name]), ids[2 * i : 2 * i + 2], shape=table.shape)
        for i, table in enumerate(module.tables)
    ]
    torch.testing.assert_close(output, torch.cat(parts, dim=1))
