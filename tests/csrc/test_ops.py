"""The CUDA operators, emulated, glue and kernels together, equal the CPU's."""

import random

import pytest
import torch
from torch import Tensor

from tests.csrc.emulation import SCHEDULES
from tests.ops.reference import SHAPES, Batch, make_cores, make_lookup
from tests.ops.test_random_lookups import random_table
from torchrec_tt.ops.lookup import Lookup
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig

CPU = torch.ops.torchrec_tt
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def emulated(cuda_operators):
    cuda_operators.set_schedule(0)
    return torch.ops.torchrec_tt_emulated


class Call:
    """A lookup with all that its operators take."""

    def __init__(self, lookup: Lookup, *, dtype=torch.float32, batch_size=17, weighted=True):
        batch = Batch.draw(lookup, batch_size=batch_size)
        self.lookup = lookup
        self.indices, self.offsets = batch.indices, batch.offsets
        self.weights = batch.weights.detach() if weighted else None
        self.cores = [core.detach() for core in make_cores(lookup, dtype=dtype)]
        rows = len(batch.indices) if lookup.pooling == "none" else batch_size
        columns = lookup.num_columns
        if lookup.pooling == "none":
            columns = lookup.tables[0].shape.embedding_dim
        self.grad = torch.randn(rows, columns)

    def plan(self, operators) -> list[Tensor]:
        lookup = self.lookup
        return operators.plan(
            *(self.indices, self.offsets, lookup.encoded_tables, lookup.feature_tables),
            *(lookup.check_mode, []),
        )

    def tail(self) -> tuple:
        lookup = self.lookup
        tables = (lookup.encoded_tables, lookup.feature_tables, lookup.pooling)
        return ([], self.offsets, self.weights, *tables)

    def forward(self, operators, *settings) -> Tensor:
        return operators.embedding_bag_forward(
            self.plan(operators), self.cores, *self.tail(), *settings
        )

    def backward(self, operators, *settings) -> list[Tensor]:
        grads, of_weights = operators.embedding_bag_backward_dense(
            self.grad, self.plan(operators), self.cores, *self.tail(), True, *settings
        )
        return [*grads, of_weights]

    def update(self, operators, optimizer: str, *settings) -> list[Tensor]:
        """The cores and states after a step, and the weights' gradient."""
        cores = [core.clone() for core in self.cores]
        config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.1, eps=1e-3)
        own = CoreOptimizer(cores, config, rounding_seeds=list(range(len(cores))))
        states = own.states()
        of_weights = operators.embedding_bag_backward_update(
            *(self.grad, self.plan(operators), cores, states, *self.tail(), True),
            *(optimizer, 0.1, 1e-3, own.rounding_seeds(), *settings),
        )
        return [*cores, *states, of_weights]


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        largest = float(b.abs().max()) if b.numel() else 0.0
        # sums in another order; a value of 16 bits may then round to its neighbour
        rtol = torch.finfo(b.dtype).eps if b.dtype in DTYPES[1:] else 0
        torch.testing.assert_close(a, b, rtol=rtol, atol=4e-6 * largest)


@pytest.mark.parametrize("seed", range(60))
def test_random_lookups_gradients_and_steps_equal_the_cpus(seed, cuda_operators, emulated):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cuda_operators.set_schedule(seed % 5)
    tables = [random_table(rng, f"t{i}") for i in range(rng.choice((1, 1, 2, 5)))]
    one_dim = len({table.shape.embedding_dim for table in tables}) == 1
    lookup = Lookup(tables, pooling=rng.choice(("sum", "mean", "none" if one_dim else "sum")))
    size = rng.choice((1, 2, 17))
    call = Call(lookup, dtype=rng.choice(DTYPES), batch_size=size, weighted=rng.random() < 0.5)
    if rng.random() < 0.3:
        call.indices, call.offsets = call.indices.int(), call.offsets.int()
    deterministic = rng.random() < 0.5
    assert_close([call.forward(emulated)], [call.forward(CPU)])
    assert_close(call.backward(emulated, "highest", deterministic), call.backward(CPU))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_in_backward_equal_the_cpus(optimizer, dtype, emulated):
    call = Call(make_lookup("3 cores", "2 cores", "4 cores"), dtype=dtype)
    assert_close(call.update(emulated, optimizer), call.update(CPU, optimizer))


def test_adam_on_dense_gradients_equals_the_cpus(emulated):
    call = Call(make_lookup("3 cores", "2 cores"))
    grads = call.backward(CPU)[:-1]
    after = []
    for operators in (emulated, CPU):
        cores = [core.clone() for core in call.cores]
        config = TTOptimizerConfig(optimizer="adam", learning_rate=0.1)
        states = CoreOptimizer(cores, config).states()
        for _ in range(2):
            operators.step_cores(
                *(cores, grads, states, "adam", 0.1, 1e-8, 0.9, 0.99, 0.01, True, [])
            )
        after.append([*cores, *states])
    assert_close(*after)


def test_deterministic_results_do_not_depend_on_the_schedule(cuda_operators, emulated):
    call = Call(make_lookup("3 cores", "4 cores"), batch_size=60)
    results = []
    for seed in (*SCHEDULES, 3):
        cuda_operators.set_schedule(seed)
        results.append([*call.backward(emulated, "highest", True), call.forward(emulated)])
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.parametrize(("precision", "rtol"), [("high", 2e-3), ("medium", 2e-2)])
def test_a_lower_precision_rounds_factors(precision, rtol, emulated):
    call = Call(make_lookup("3 cores, aligned"))
    exact, rounded = call.forward(emulated), call.forward(emulated, precision)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=rtol * float(exact.abs().max()))


# U20
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_without_ids(name, emulated):
    call = Call(make_lookup(name))
    call.indices, call.weights = call.indices[:0], None
    call.offsets = torch.zeros_like(call.offsets)
    assert_close([call.forward(emulated)], [call.forward(CPU)])
    assert_close(call.backward(emulated), call.backward(CPU))
    assert_close(call.update(emulated, "adagrad"), call.update(CPU, "adagrad"))


@pytest.mark.parametrize("offsets", [[0, 7, 3], [0, 9, 9], [-4, 1, 2], [2, 2, 0], [0, 3, 1]])
def test_u32_wrong_offsets_touch_no_memory_that_is_not_theirs(offsets, emulated):
    """Until the host hears of them, their bags are empty."""
    call = Call(make_lookup("3 cores", pooling="mean"), batch_size=2)
    call.indices, call.weights = torch.tensor([1, 2, 3]), torch.ones(3)
    call.offsets = torch.tensor(offsets)
    plan = call.plan(emulated)
    with pytest.raises(ValueError, match="offsets must"):
        emulated.check_errors(0)
    output = emulated.embedding_bag_forward(plan, call.cores, *call.tail())
    assert torch.equal(output, torch.zeros(2, 16))
    grads, _ = emulated.embedding_bag_backward_dense(
        call.grad, plan, call.cores, *call.tail(), True
    )
    assert not any(grad.any() for grad in grads)


# U29: until the host hears of them, such ids read and train row 0.
def test_ids_out_of_range_touch_no_memory_that_is_not_theirs(emulated):
    call = Call(make_lookup("3 cores"), batch_size=3)
    call.indices, call.weights = torch.tensor([4, 58, -1, 2**40]), None
    call.offsets = torch.tensor([0, 1, 2, 4])
    found = [call.plan(emulated)]
    with pytest.raises(ValueError, match=r"indices must be in \[0, 58\) .* got 58 at position 1"):
        emulated.check_errors(0)
    call.indices = torch.tensor([4, 0, 0, 0])
    found.append(call.plan(emulated))
    of_bad_ids, of_row_0 = (
        [
            emulated.embedding_bag_forward(plan, call.cores, *call.tail()),
            *emulated.embedding_bag_backward_dense(
                call.grad, plan, call.cores, *call.tail(), False, "highest", True
            )[0],
        ]
        for plan in found
    )
    assert all(map(torch.equal, of_bad_ids, of_row_0))


def test_other_offsets_than_the_plans_stay_within_the_indices(emulated):
    call = Call(make_lookup("3 cores"), batch_size=2)
    call.indices, call.weights = torch.tensor([1, 2, 3]), torch.ones(3)
    call.offsets = torch.tensor([0, 1, 3])
    plan = call.plan(emulated)
    for offsets in ([0, 7, 3], [-4, 1, 2**40], [2, 2, 0]):
        call.offsets = torch.tensor(offsets)
        output = emulated.embedding_bag_forward(plan, call.cores, *call.tail())
        assert output.isfinite().all()
        del output
        used_before = [torch.full((2**k,), 2**40) for k in range(4, 20) for _ in range(4)]
        del used_before  # so that new memory is not all zeros
        gradients = emulated.embedding_bag_backward_dense(
            call.grad, plan, call.cores, *call.tail(), True, "highest", False
        )
        assert all(gradient.isfinite().all() for gradient in gradients[0])


def core_of(shape=(3, 6), dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cores": []}, "cores must not be empty"),
        ({"cores": [core_of(dtype=torch.float64)] * 3}, "float32, bfloat16 or float16 on CUDA"),
        ({"cores": [core_of(), core_of(device="meta"), core_of()]}, "core 1 must be on the device"),
        ({"cores": [core_of(), core_of((3, 4)), core_of()]}, "core 1 must have 168 elements"),
        ({"plan": [torch.zeros(1).int()] * 5}, "plan must hold 6 tensors, got 5"),
        ({"plan": [torch.zeros(1).int()] * 6}, "plan 2 must be Long"),
        ({"offsets": torch.zeros(3)}, "offsets must be int32 or int64, got Float"),
        ({"offsets": torch.arange(36)[::2]}, "offsets must be contiguous"),
        ({"weights": torch.ones(1)}, "per_sample_weights must have .* elements, got 1"),
        ({"weights": torch.ones(1).double()}, "per_sample_weights must be Float, got Double"),
        ({"pooling": "max"}, "pooling must be sum, mean or none, got max"),
        ({"precision": "low"}, "precision must be highest, high or medium, got low"),
        ({"cached_rows": [torch.ones(8, 16)] * 2}, "cached_rows must have one tensor per table, 1"),
        ({"cached_rows": [torch.ones(8, 15)]}, "cached_rows 0 must have 128 elements, got 120"),
        ({"cached_rows": [torch.ones(8, 16).double()]}, "cached_rows must be float32, bfloat16 or"),
    ],
)
def test_bad_arguments_raise(change, message, emulated):
    call = Call(make_lookup("3 cores"))
    arguments = {
        "plan": call.plan(emulated),
        "cores": call.cores,
        "cached_rows": [],
        "offsets": call.offsets,
        "weights": None,
        "tables": call.lookup.encoded_tables,
        "features": call.lookup.feature_tables,
        "pooling": "sum",
        "precision": "highest",
    } | change
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    forward = emulated.embedding_bag_forward.default
    with pytest.raises(ValueError, match=message):
        forward.redispatch(keys, *arguments.values())


def test_states_and_gradients_that_do_not_fit_raise(emulated):
    cores = [core_of()]
    settings = (0.1, 1e-8, 0.9, 0.99, 0.0, False)
    for grads, states, optimizer, message in (
        ([], [], "sgd", "grads must have one tensor per core, 1, got 0"),
        ([core_of((3, 5))], [], "sgd", "gradient 0 must have 18 elements, got 15"),
        ([core_of()], [], "adagrad", "states must have 1 tensors for adagrad, got 0"),
        ([core_of()], [core_of((2, 2))], "adagrad", "state 0 must have 18 elements, got 4"),
        ([core_of()], [], "lamb", "optimizer must be sgd, adagrad, rowwise_adagrad or adam"),
    ):
        with pytest.raises(ValueError, match=message):
            emulated.step_cores(cores, grads, states, optimizer, *settings, [])
