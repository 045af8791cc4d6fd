import pytest
import torch

from tests.ops.reference import Batch, big_batch, dense_lookup, make_lookup
from torchrec_tt.modules.row_cache_config import RowCacheConfig
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig

NAMES = ("3 cores", "2 cores", "4 cores")


def make_module(**kwargs) -> TTTableBatchedEmbeddingBags:
    module = TTTableBatchedEmbeddingBags(make_lookup(*NAMES).tables, dtype=torch.float64, **kwargs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for core in module.all_cores():
            core.normal_(generator=generator)
    return module


def torch_optimizer(cores, config: TTOptimizerConfig):
    if config.optimizer == "sgd":
        return torch.optim.SGD(cores, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.Adagrad(
        cores, lr=config.learning_rate, eps=config.eps, weight_decay=config.weight_decay
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("is_replicated", [False, True])
def test_stepping_in_backward_equals_torch_optim(optimizer, weight_decay, is_replicated):
    config = TTOptimizerConfig(
        optimizer=optimizer, learning_rate=0.1, eps=1e-6, weight_decay=weight_decay
    )
    calls = []

    def note(grads):
        calls.append(grads)
        return grads

    module = make_module(optimizer=config, reduce_gradients=note if is_replicated else None)
    plain = make_module()
    reference = torch_optimizer(plain.all_cores(), config)
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    for lr in (0.1, 0.1, 0.02):  # the learning rate is read at every step
        module.optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = lr
        module(batch.indices, batch.offsets).square().sum().backward()
        reference.zero_grad()
        plain(batch.indices, batch.offsets).square().sum().backward()
        reference.step()
    assert all(core.grad is None for core in module.all_cores())
    torch.testing.assert_close(module.all_cores(), plain.all_cores())
    assert len(calls) == (3 if is_replicated else 0)
    if optimizer == "adagrad":
        sums = [reference.state[core]["sum"] for core in plain.all_cores()]
        torch.testing.assert_close(module.optimizer.states(), sums)


def test_replicas_are_reduced_before_the_step():
    config = TTOptimizerConfig(learning_rate=0.1)

    def double(grads):
        return [2 * grad for grad in grads]

    module, twice = make_module(optimizer=config, reduce_gradients=double), make_module()
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    module(batch.indices, batch.offsets).sum().backward()
    (2 * twice(batch.indices, batch.offsets).sum()).backward()
    for core, other in zip(module.all_cores(), twice.all_cores(), strict=True):
        torch.testing.assert_close(core.detach(), (other - 0.1 * other.grad).detach())


def test_replicas_are_reduced_although_this_one_had_no_ids():
    calls = []

    def note(grads):
        calls.append(grads)
        return grads

    module = make_module(optimizer=TTOptimizerConfig(), reduce_gradients=note)
    module(torch.empty(0, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)).sum().backward()
    assert len(calls) == 1
    assert all(not grad.any() for grad in calls[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_steps_do_not_depend_on_the_number_of_threads(optimizer, dtype):
    lookup, cores, indices, offsets = big_batch()
    weights = torch.linspace(0.1, 1.0, len(indices))
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.01)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2, 1):
            torch.set_num_threads(threads)
            module = TTTableBatchedEmbeddingBags(lookup.tables, dtype=dtype, optimizer=config)
            with torch.no_grad():
                for core, value in zip(module.all_cores(), cores, strict=True):
                    core.copy_(value)
            own_weights = weights.clone().requires_grad_()
            for _ in range(2):
                module(indices, offsets, per_sample_weights=own_weights).square().sum().backward()
            states = [*module.all_cores(), *module.optimizer.states()]
            results.append([own_weights.grad, *(state.detach() for state in states)])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_weights_are_cast_to_the_cores_and_get_their_gradient():
    module = make_module(optimizer=TTOptimizerConfig(learning_rate=0.0))
    batch = Batch.draw(module.lookup, dtype=torch.float32)
    output = module(batch.indices, batch.offsets, per_sample_weights=batch.weights)
    weights = batch.weights.detach().double().requires_grad_()
    expected = dense_lookup(module.all_cores(), batch, lookup=module.lookup, weights=weights)
    torch.testing.assert_close(output, expected)
    (grad,) = torch.autograd.grad(output.square().sum(), [batch.weights])
    (wanted,) = torch.autograd.grad(expected.square().sum(), [weights])
    torch.testing.assert_close(grad, wanted.float())


@pytest.mark.parametrize("weights", [torch.ones(1, 1, requires_grad=True), [1.0]])
def test_weights_that_do_not_fit_raise_before_anything_is_stepped(weights):
    module = make_module(optimizer=TTOptimizerConfig())
    offsets = torch.tensor([0] + [1] * len(module.lookup.feature_tables))
    with pytest.raises(ValueError, match="per_sample_weights must"):
        module(torch.tensor([0]), offsets, per_sample_weights=weights)


def test_the_gradient_of_the_output_is_clamped_before_everything_else():
    config = TTOptimizerConfig(learning_rate=0.1, max_gradient=0.5)
    module, plain = make_module(optimizer=config), make_module()
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    output, expected = (
        m(batch.indices, batch.offsets, per_sample_weights=batch.weights) for m in (module, plain)
    )
    grad = torch.linspace(-2, 2, output.numel(), dtype=torch.float64).reshape(output.shape)
    (grad_weights,) = torch.autograd.grad(output, [batch.weights], grad, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, [batch.weights], grad.clamp(-0.5, 0.5), True)
    torch.testing.assert_close(grad_weights, wanted)
    expected.backward(grad.clamp(-0.5, 0.5))
    for core, other in zip(module.all_cores(), plain.all_cores(), strict=True):
        torch.testing.assert_close(core.detach(), (other - 0.1 * other.grad).detach())


def test_a_second_lookup_before_the_first_step_is_refused_in_its_backward():
    module = make_module(optimizer=TTOptimizerConfig())
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    first, second = (module(batch.indices, batch.offsets) for _ in range(2))
    first.sum().backward()
    with pytest.raises(RuntimeError, match="cores must be those of the forward pass"):
        second.sum().backward()


def test_frozen_cores_stay_while_the_weights_get_their_gradient():
    module = make_module(optimizer=TTOptimizerConfig(learning_rate=1.0)).requires_grad_(False)
    before = [core.clone() for core in module.all_cores()]
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    module(batch.indices, batch.offsets, per_sample_weights=batch.weights).sum().backward()
    assert batch.weights.grad.any()
    assert all(torch.equal(a, b) for a, b in zip(module.all_cores(), before, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_frozen_table_stays_while_the_others_train(optimizer):
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.1)
    module, plain = make_module(optimizer=config), make_module(optimizer=config)
    module.cores["t0"].requires_grad_(False)
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    before = [core.detach().clone() for core in module.all_cores()]
    for each in (module, plain):
        each(batch.indices, batch.offsets).sum().backward()
    expected = [*before[:3], *plain.all_cores()[3:]]
    for core, wanted in zip(module.all_cores(), expected, strict=True):
        torch.testing.assert_close(core.detach(), wanted.detach())
    assert not torch.equal(module.all_cores()[3], before[3])


def test_evaluation_leaves_the_cores_alone():
    module = make_module(optimizer=TTOptimizerConfig(learning_rate=1.0))
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    trained = module(batch.indices, batch.offsets)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            output = module(batch.indices, batch.offsets)
        assert not output.requires_grad
        assert torch.equal(output, trained)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_cores_made_in_inference_mode_are_looked_up_and_not_trained(optimizer):
    config = TTOptimizerConfig(optimizer=optimizer)
    trained = make_module(optimizer=config)
    with torch.inference_mode():
        module = make_module(optimizer=config)
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    expected = trained(batch.indices, batch.offsets)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(module(batch.indices, batch.offsets), expected)
    with pytest.raises(RuntimeError, match=r"cores must be made outside torch.inference_mode\(\)"):
        module(batch.indices, batch.offsets)


@pytest.mark.parametrize("optimizer", [None, TTOptimizerConfig()])
def test_u25_a_bad_id_is_an_error_that_names_the_table(optimizer):
    module = make_module(optimizer=optimizer)
    with pytest.raises(ValueError, match=r"\[0, 13\) for table 't1', got 13"):
        module(torch.tensor([13]), torch.tensor([0, 0, 1, 1]))


def test_u25_a_bad_id_warns_once_and_names_the_table():
    module = make_module(check_mode="warning")
    ids, offsets = torch.tensor([13]), torch.tensor([0, 0, 1, 1])
    with pytest.warns(UserWarning, match="for table 't1', got 13: such ids read row 0"):
        output = module(ids, offsets)
    assert torch.equal(module(ids, offsets), output)
    assert torch.equal(output, module(torch.tensor([0]), offsets))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int8}, "dtype must be one of .*, got torch.int8"),
        ({"reduce_gradients": print}, "reduce_gradients must come with an optimizer"),
        ({"pooling": "max"}, "pooling must be one of"),
    ],
)
def test_arguments_that_do_not_fit_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        TTTableBatchedEmbeddingBags(make_lookup("3 cores").tables, **arguments)


def test_repeated_names_raise():
    tables = make_lookup("3 cores").tables * 2
    with pytest.raises(ValueError, match="tables must have different names"):
        TTTableBatchedEmbeddingBags(tables)


@pytest.mark.parametrize("block", [(-1, 3), (50, 9), (0, -1)])
def test_blocks_outside_the_table_raise(block):
    shape = make_lookup("3 cores").tables[0].shape
    with pytest.raises(ValueError, match="row_offset and num_rows must be a block"):
        TTTable(name="t", shape=shape, row_offset=block[0], num_rows=block[1])


def test_a_gradient_of_the_step_is_refused_before_anything_is_stepped():
    module = make_module(optimizer=TTOptimizerConfig(learning_rate=1.0))
    before = [core.detach().clone() for core in module.all_cores()]
    batch = Batch.draw(module.lookup, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        module(batch.indices, batch.offsets).sum().backward(create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(module.all_cores(), before, strict=True))


def test_the_cached_rows_and_cores_of_a_frozen_table_stay_while_the_others_train():
    tables = make_lookup("3 cores", "2 cores", "4 cores").tables
    config = RowCacheConfig(load_factor=0.5, first_refresh=1, refresh_growth=1.0)
    module = TTTableBatchedEmbeddingBags(
        tables,
        optimizer=TTOptimizerConfig(learning_rate=0.1),
        caches={"t0": config, "t2": config},
    )
    with torch.no_grad():
        for core in module.all_cores():
            core.normal_()
    batch = Batch.draw(module.lookup)
    for _ in range(3):
        module(batch.indices, batch.offsets).sum().backward()
    module.cores["t0"].requires_grad_(False)

    def kept(name: str) -> list[torch.Tensor]:
        cache = module.row_caches[name]
        return [x.detach().clone() for x in (cache.ids, cache.rows, *module.cores[name])]

    before = {name: kept(name) for name in ("t0", "t2")}
    assert all(values[0].max() >= 0 for values in before.values())
    for _ in range(3):  # batches of other rows, which a refresh would take in
        ids = batch.indices // 2
        module(ids, batch.offsets).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before["t0"], kept("t0"), strict=True))
    assert not torch.equal(before["t2"][1], kept("t2")[1])
