import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.ops.cached_rows import Caches, fill
from tests.ops.reference import Batch, big_batch, dense_lookup, make_cores, make_lookup
from tests.ops.test_random_lookups import random_table
from torchrec_tt.ops.embedding_bag import (
    cpu_isa,
    embedding_bag_backward_dense,
    embedding_bag_backward_update,
    embedding_bag_forward,
    plan,
    sum_dtype,
)
from torchrec_tt.ops.lookup import Lookup
from torchrec_tt.ops.row_cache import advise_huge_pages, step_cached_rows
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def assert_close(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Close relative to the largest entry: sums of products of random sign, maybe only one."""
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.to(expected.dtype),
        expected,
        rtol=torch.finfo(actual.dtype).eps if actual.dtype != expected.dtype else 0,
        atol=256 * torch.finfo(expected.dtype).eps * largest,
        msg=lambda text: f"{message}: {text}",
    )


class Case:
    """A batch through tables of which some have a cache, by our operators and by definition."""

    def __init__(
        self,
        lookup: Lookup,
        caches: Caches,
        batch: Batch,
        *,
        dtype: torch.dtype = torch.float32,
        is_weighted: bool = False,
    ) -> None:
        self.lookup, self.caches, self.batch = lookup, caches, batch
        self.cores = [core.detach() for core in make_cores(lookup, dtype=dtype)]
        self.sums = sum_dtype(self.cores[0])
        self.weights = batch.weights.detach() if is_weighted else None
        self.plan = plan(batch.indices, batch.offsets, lookup=lookup, cache_ids=caches.ids)
        self.call = {
            "offsets": batch.offsets,
            "lookup": lookup,
            "per_sample_weights": self.weights,
        }
        self.forward = embedding_bag_forward(
            self.plan, self.cores, cached_rows=caches.rows, **self.call
        )
        generator = torch.Generator().manual_seed(13)
        self.cotangent = torch.randn(self.forward.shape, generator=generator, dtype=self.sums)

    def expected(self) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:
        """Output, and gradients of cores, rows (of their slots in use) and weights."""
        cores = [core.to(self.sums).requires_grad_() for core in self.cores]
        slots = self.caches.held()
        rows = [
            rows[held].to(self.sums).requires_grad_()
            for rows, held in zip(self.caches.rows, slots, strict=True)
        ]
        weights = None if self.weights is None else self.weights.clone().requires_grad_()
        cached = [
            (ids[held], own) for ids, held, own in zip(self.caches.ids, slots, rows, strict=True)
        ]
        output = dense_lookup(cores, self.batch, lookup=self.lookup, weights=weights, cached=cached)
        leaves = [*cores, *rows, *([] if weights is None else [weights])]
        grads = torch.autograd.grad(output, leaves, self.cotangent)
        first, second = len(cores), len(cores) + len(rows)
        return (
            output.detach(),
            list(grads[:first]),
            list(grads[first:second]),
            None if weights is None else grads[second],
        )

    def backward_dense(self) -> tuple[list[Tensor], Tensor]:
        return embedding_bag_backward_dense(
            self.cotangent,
            self.plan,
            self.cores,
            cached_rows=self.caches.rows,
            weights_grad=self.weights is not None,
            **self.call,
        )

    def step(self, states: list[Tensor], config: TTOptimizerConfig, **kwargs) -> None:
        step_cached_rows(
            self.cotangent,
            self.plan,
            cache_ids=self.caches.ids,
            cached_rows=kwargs.pop("cached_rows", self.caches.rows),
            states=states,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            eps=config.eps,
            betas=config.betas,
            weight_decay=config.weight_decay,
            decoupled_weight_decay=config.decoupled_weight_decay,
            **self.call,
            **kwargs,
        )

    def check(self, message: str = "") -> None:
        """Holds the output and every gradient to the definition."""
        output, cores, _, weights = self.expected()
        assert_close(self.forward, output, f"{message} output")
        grad_cores, grad_weights = self.backward_dense()
        for k, (grad, wanted) in enumerate(zip(grad_cores, cores, strict=True)):
            assert_close(grad, wanted, f"{message} core {k}")
        if weights is not None:
            assert_close(grad_weights, weights, f"{message} weights")
        self.check_update(grad_cores, grad_weights)

    def check_update(self, grads: list[Tensor], grad_weights: Tensor) -> None:
        """The cores' step in backward is one on their dense gradients."""
        config = TTOptimizerConfig(optimizer="sgd", learning_rate=0.1)
        fused, plain = ([core.clone() for core in self.cores] for _ in range(2))
        ours, theirs = CoreOptimizer(fused, config), CoreOptimizer(plain, config)
        again = embedding_bag_backward_update(
            self.cotangent,
            self.plan,
            fused,
            ours.states(),
            optimizer="sgd",
            learning_rate=0.1,
            eps=0.0,
            rounding_seeds=ours.rounding_seeds(),
            cached_rows=self.caches.rows,
            weights_grad=self.weights is not None,
            **self.call,
        )
        theirs.step(plain, grads)
        assert torch.equal(again, grad_weights)
        for core, wanted in zip(fused, plain, strict=True):
            torch.testing.assert_close(core, wanted)


def make_states(rows: list[Tensor], config: TTOptimizerConfig, *, has_step: bool) -> list[Tensor]:
    """Moments that some steps have left, of every table with a cache."""
    states = []
    for own in rows:
        if not own.numel():
            continue
        size = own.shape[:1] if config.optimizer == "rowwise_adagrad" else own.shape
        moments = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2}[config.optimizer]
        dtype = sum_dtype(own)
        states += [0.5 + torch.rand(size, dtype=dtype) for _ in range(moments)]
        if has_step:
            states.append(torch.tensor([4]))
    return states


def step_row(row: Tensor, grad: Tensor, moments: list[Tensor], config: TTOptimizerConfig) -> Tensor:
    """One row's step, from the formulas of TTOptimizerConfig; the fifth of its table."""
    lr, eps, decay = config.learning_rate, config.eps, config.weight_decay
    if decay and config.decoupled_weight_decay:
        row = row * (1 - lr * decay)
    else:
        grad = grad + decay * row
    if config.optimizer == "sgd":
        return row - lr * grad
    if config.optimizer == "adam":
        mean, square = moments
        mean += (1 - config.betas[0]) * (grad - mean)
        square += (1 - config.betas[1]) * (grad * grad - square)
        bias1, bias2 = (1 - beta**5 for beta in config.betas)
        return row - lr * (mean / bias1) / ((square / bias2).sqrt() + eps)
    (total,) = moments
    total += grad.square().mean() if config.optimizer == "rowwise_adagrad" else grad.square()
    return row - lr * grad / (total.sqrt() + eps)


def check_step(case: Case, config: TTOptimizerConfig) -> None:
    """Holds a step's rows and states to the definition; rows that are not asked for stay."""
    caches = case.caches
    _, _, grads, _ = case.expected()
    states = make_states(caches.rows, config, has_step=config.optimizer == "adam")
    wanted = [rows.clone() for rows in caches.rows]
    wanted_states = [state.clone() for state in states]
    remaining = list(wanted_states)
    asked = rows_of(case)
    for t, held in enumerate(caches.held()):
        if not caches.rows[t].numel():
            continue
        count = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 3}[config.optimizer]
        own, remaining = remaining[:count], remaining[count:]
        if config.optimizer == "adam":
            own.pop().add_(1)
        for k, slot in enumerate(held.tolist()):
            if int(caches.ids[t][slot]) in asked[t]:
                row = wanted[t][slot].to(case.sums)
                moments = [moment[slot] for moment in own]
                wanted[t][slot] = step_row(row, grads[t][k], moments, config)
    case.step(states, config)
    for t, (rows, want) in enumerate(zip(caches.rows, wanted, strict=True)):
        if rows.dtype == case.sums:
            assert_close(rows, want, f"rows {t}")
        else:
            torch.testing.assert_close(rows, want)  # rounded to nearest, at times to a neighbour
        untouched = [slot for slot, row in enumerate(caches.ids[t].tolist()) if row not in asked[t]]
        assert torch.equal(rows[untouched], want[untouched])
    for k, (state, want) in enumerate(zip(states, wanted_states, strict=True)):
        if state.is_floating_point():
            assert_close(state, want, f"state {k}")
        else:
            assert torch.equal(state, want)


def rows_of(case: Case) -> list[set[int]]:
    """The rows that the batch asks of every table."""
    asked: list[set[int]] = [set() for _ in case.lookup.tables]
    batch_size = (len(case.batch.offsets) - 1) // len(case.lookup.feature_tables)
    for feature, t in enumerate(case.lookup.feature_tables):
        begin, end = case.batch.offsets[feature * batch_size :][[0, batch_size]].tolist()
        offset = case.lookup.tables[t].row_offset
        asked[t] |= {offset + row for row in case.batch.indices[begin:end].tolist()}
    return asked


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tables = [random_table(rng, f"t{i}") for i in range(rng.choice((1, 1, 2, 5)))]
    one_dim = len({table.shape.embedding_dim for table in tables}) == 1
    lookup = Lookup(tables, pooling=rng.choice(("sum", "mean", "none" if one_dim else "sum")))
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    halves = () if dtype == torch.float64 else (torch.bfloat16, torch.float16)
    caches = Caches.draw(lookup, rng, dtype=rng.choice((wide, wide, *halves)))
    torch.set_num_threads(rng.choice((1, 1, 2, 3)))
    batch = Batch.draw(lookup, batch_size=rng.choice((1, 2, 17, 64)), dtype=wide)
    if rng.random() < 0.3:
        batch.indices, batch.offsets = batch.indices.int(), batch.offsets.int()
    return Case(lookup, caches, batch, dtype=dtype, is_weighted=rng.random() < 0.5)


def check_many(first: int, count: int) -> None:
    before = torch.get_num_threads()
    try:
        for seed in range(first, first + count):
            case = draw_case(seed)
            case.check(f"seed {seed},")
            rng = random.Random(seed)
            config = TTOptimizerConfig(
                optimizer=rng.choice(OPTIMIZERS),
                learning_rate=0.1,
                eps=1e-3,
                weight_decay=rng.choice((0.0, 0.1)),
                decoupled_weight_decay=rng.random() < 0.5,
                stochastic_rounding=False,
            )
            check_step(case, config)
    finally:
        torch.set_num_threads(before)


def test_40_random_lookups_through_caches_equal_tables_with_the_rows_put_in():
    check_many(0, 40)


@pytest.mark.slow
def test_500_random_lookups_through_caches_equal_tables_with_the_rows_put_in():
    check_many(1000, 500)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_100_random_lookups_through_caches_on_lesser_instruction_sets(isa, monkeypatch):
    order = ["generic", "avx2", "avx512"]
    if order.index(isa) >= order.index(cpu_isa()):
        pytest.skip(f"{isa} is not less than this processor's {cpu_isa()}")
    monkeypatch.setenv("TORCHREC_TT_ISA", isa)
    code = "from tests.ops.test_row_cache import check_many; check_many(2000, 100)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def make_case(*names: str, ratios: tuple[float, ...], batch_size: int = 23, **kwargs) -> Case:
    """A cache for every table, the rows cached given as a share of each table's."""
    lookup = make_lookup(*names)
    caches, rng = Caches([], []), random.Random(1)
    for table, ratio in zip(lookup.tables, ratios, strict=True):
        caches.add(table, rng, ratio=ratio, dtype=torch.float32)
    return Case(lookup, caches, Batch.draw(lookup, batch_size=batch_size), **kwargs)


def counts(case: Case) -> list[int]:
    return case.plan[-1].tolist()


def test_cached_rows_are_keys_past_those_of_all_tables_in_the_order_of_their_slots():
    case = make_case("3 cores", "2 cores", ratios=(0.4, 0.4))
    order, inverse, row_keys, row_starts, prefix_starts, _ = case.plan
    num_rows, num_tt_rows, num_prefixes, _ = counts(case)
    assert 0 < num_tt_rows < num_rows
    assert prefix_starts[num_prefixes:].eq(num_tt_rows).all()
    padded = [table.shape.num_rows_padded for table in case.lookup.tables]
    keys = row_keys[:num_rows].tolist()
    assert keys == sorted(set(keys))
    assert all((key < sum(padded)) == (u < num_tt_rows) for u, key in enumerate(keys))
    first = [sum(padded), sum(padded) + case.caches.ids[0].numel()]
    features = torch.arange(2).repeat_interleave(case.batch.offsets[::23].diff())
    for i, (row, t) in enumerate(zip(case.batch.indices.tolist(), features.tolist(), strict=True)):
        u = int(inverse[i])
        is_cached = row in case.caches.ids[t].tolist()
        assert is_cached == (u >= num_tt_rows)
        if is_cached:
            assert int(case.caches.ids[t][keys[u] - first[t]]) == row
        own = order[row_starts[u] : row_starts[u + 1]].tolist()
        assert i in own
        assert own == sorted(own)


@pytest.mark.parametrize("ids", [[], [torch.empty(0, dtype=torch.int64)] * 2])
def test_without_caches_the_plan_is_as_before(ids):
    lookup = make_lookup("3 cores", "4 cores")
    batch = Batch.draw(lookup)
    before = plan(batch.indices, batch.offsets, lookup=lookup)
    after = plan(batch.indices, batch.offsets, lookup=lookup, cache_ids=ids)
    empty = plan(
        batch.indices,
        batch.offsets,
        lookup=lookup,
        cache_ids=[torch.full((16,), -1), torch.full((8,), -1)],
    )
    for tensor, same, also in zip(before, after, empty, strict=True):
        assert torch.equal(tensor, same)
        assert torch.equal(tensor, also)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_batch_of_hits_alone_leaves_the_cores_without_a_gradient(is_weighted):
    lookup = make_lookup("3 cores", "4 cores")
    ids, rows = [], []
    generator = torch.Generator().manual_seed(3)
    for table in lookup.tables:
        ids.append(fill(list(range(table.block_size)), num_sets=table.block_size))
        assert int((ids[-1] >= 0).sum()) == table.block_size
        size = (ids[-1].numel(), table.shape.embedding_dim)
        rows.append(torch.randn(size, generator=generator))
    case = Case(lookup, Caches(ids, rows), Batch.draw(lookup), is_weighted=is_weighted)
    assert counts(case)[1:3] == [0, 0]
    case.check()
    assert not any(grad.any() for grad in case.backward_dense()[0])
    check_step(case, TTOptimizerConfig(optimizer="adagrad", learning_rate=0.1, eps=1e-3))


@pytest.mark.parametrize("num_bags", [0, 3])
def test_u20_no_indices_leave_the_cached_rows_alone(num_bags):
    case = make_case("3 cores", "2 cores", ratios=(0.5, 1.0), batch_size=0)
    case.batch = Batch(
        torch.empty(0, dtype=torch.int64), torch.zeros(2 * num_bags + 1, dtype=torch.int64), None
    )
    case = Case(case.lookup, case.caches, case.batch)
    assert not case.forward.any()
    before = [rows.clone() for rows in case.caches.rows]
    case.step([], TTOptimizerConfig(learning_rate=1.0))
    assert all(torch.equal(a, b) for a, b in zip(case.caches.rows, before, strict=True))
    assert not any(grad.any() for grad in case.backward_dense()[0])


def test_a_bad_id_reads_row_0_from_the_cache():
    lookup = make_lookup("3 cores", check_mode="ignore")
    ids = fill([0], num_sets=2)
    rows = torch.randn(16, 16)
    offsets = torch.tensor([0, 1])
    the_plan = plan(torch.tensor([-1]), offsets, lookup=lookup, cache_ids=[ids])
    output = embedding_bag_forward(
        the_plan, make_cores(lookup), offsets=offsets, lookup=lookup, cached_rows=[rows]
    )
    assert torch.equal(output, rows[ids == 0])


def test_rows_of_no_elements_leave_their_table_alone():
    case = make_case("3 cores", "4 cores", "2 cores", ratios=(0.5, 0.5, 0.5))
    config = TTOptimizerConfig(optimizer="rowwise_adagrad", learning_rate=0.1)
    before = [rows.clone() for rows in case.caches.rows]
    stepped = [case.caches.rows[0], torch.empty(0), case.caches.rows[2]]
    case.step(make_states(stepped, config, has_step=False), config, cached_rows=stepped)
    changed = [not torch.equal(a, b) for a, b in zip(case.caches.rows, before, strict=True)]
    assert changed == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_depends_on_the_row_and_not_on_its_slot(dtype):
    lookup = make_lookup("3 cores, aligned")
    batch = Batch.draw(lookup, batch_size=200)
    values = torch.randn(lookup.tables[0].shape.num_embeddings, 64).to(dtype)
    config = TTOptimizerConfig(learning_rate=0.01)
    results = []
    for num_sets, seeds in ((50, [7]), (90, [7]), (50, [8]), (50, [])):
        ids = fill(list(range(40)), num_sets=num_sets)
        held = ids >= 0
        rows = torch.zeros(ids.numel(), 64, dtype=dtype)
        rows[held] = values[ids[held]]
        case = Case(lookup, Caches([ids], [rows]), batch)
        case.step([torch.tensor([3])] if seeds else [], config, rounding_seeds=seeds)
        results.append(rows[held][ids[held].argsort()])
    assert len(results[0]) == 40
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])


def test_stochastic_rounding_keeps_the_expectation_of_a_step():
    lookup = make_lookup("3 cores, aligned")
    ids = fill([5], num_sets=1)
    slot = int((ids == 5).nonzero())
    offsets, step = torch.tensor([0, 1]), torch.tensor([0])
    rows = torch.ones(8, 64, dtype=torch.bfloat16)
    the_plan = plan(torch.tensor([5]), offsets, lookup=lookup, cache_ids=[ids])
    for _ in range(400):
        step_cached_rows(
            torch.ones(1, 64),
            the_plan,
            cache_ids=[ids],
            cached_rows=[rows],
            states=[step],
            offsets=offsets,
            lookup=lookup,
            optimizer="sgd",
            learning_rate=1e-3,  # a quarter of bfloat16's distance below 1
            eps=0.0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            decoupled_weight_decay=False,
            rounding_seeds=[1],
        )
    # 64 columns of 400 steps each: the mean's standard deviation is 0.004
    assert abs(float(rows[slot].float().mean()) - 0.6) < 0.02
    assert int(step) == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("rowwise_adagrad", torch.float32), ("adam", torch.float32), ("adagrad", torch.bfloat16)],
)
def test_cached_rows_do_not_depend_on_the_number_of_threads(optimizer, dtype):
    lookup, _, indices, offsets = big_batch()
    indices = torch.cat([indices, indices // 2]).view(2, 3, -1).transpose(0, 1).reshape(-1)
    offsets = torch.arange(0, len(indices) + 1, 2)
    caches = Caches.draw(lookup, random.Random(4), ratios=(0.5,), dtype=dtype)
    weights = torch.linspace(0.1, 1.0, len(indices))
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=0.1)
    seeds = [1, 2, 3] if dtype == torch.bfloat16 else []
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            own = Caches(caches.ids, [rows.clone() for rows in caches.rows])
            case = Case(lookup, own, Batch(indices, offsets, weights), is_weighted=True)
            assert counts(case)[1] < counts(case)[0] - 10_000
            has_step = optimizer == "adam" or bool(seeds)
            torch.manual_seed(0)
            states = make_states(own.rows, config, has_step=has_step)
            grads, grad_weights = case.backward_dense()
            case.step(states, config, rounding_seeds=seeds)
            results.append([case.forward, *grads, grad_weights, *own.rows, *states])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plan", "forward", "backward_dense", "backward_update", "step_cached_rows"]
)
def test_opcheck(name):
    case = make_case("3 cores", "2 cores", ratios=(0.5, 0.0), is_weighted=True)
    lookup, batch, caches = case.lookup, case.batch, case.caches
    tables, features = lookup.encoded_tables, lookup.feature_tables
    after = (batch.offsets, case.weights, tables, features, "sum")
    head = (case.plan, case.cores)
    states = [torch.ones_like(core) for core in case.cores]
    step = ("adagrad", 0.1, 1e-8)
    row_states = [torch.ones_like(caches.rows[0])]
    ops = torch.ops.torchrec_tt
    operator, arguments = {
        "plan": (
            ops.plan,
            (batch.indices, batch.offsets, tables, features, "fatal", caches.ids),
        ),
        "forward": (ops.embedding_bag_forward, (*head, caches.rows, *after)),
        "backward_dense": (
            ops.embedding_bag_backward_dense,
            (case.cotangent, *head, caches.rows, *after, True),
        ),
        "backward_update": (
            ops.embedding_bag_backward_update,
            (case.cotangent, *head, states, caches.rows, *after, True, *step, []),
        ),
        "step_cached_rows": (
            ops.step_cached_rows,
            (
                *(case.cotangent, case.plan, caches.ids, caches.rows, row_states),
                *(*after, *step, 0.9, 0.999, 0.0, False, []),
            ),
        ),
    }[name]
    torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [torch.full((12,), -1)],
            r"multiple of 8 elements, got 12 .* for table 't0'",
        ),
        ([torch.full((2, 8), -1)], r"of 1 dimension .* got 16 in 2 dimensions"),
        ([torch.full((8,), -1, dtype=torch.int32)], r"be int64, got Int for table 't0'"),
        ([torch.full((8,), -1)] * 2, r"have one tensor per table, 1, or none, got 2"),
        ([torch.full((16,), -1)[::2]], r"be contiguous"),
    ],
)
def test_tags_that_do_not_fit_raise(ids, message):
    lookup = make_lookup("3 cores")
    with pytest.raises(ValueError, match=f"cache_ids must .*{message}"):
        plan(torch.tensor([1]), torch.tensor([0, 1]), lookup=lookup, cache_ids=ids)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"be of the caches that the plan was made with, got 0 slots"),
        ([torch.zeros(8, 16)], r"be of the caches that the plan was made with, got 8 slots"),
        ([torch.zeros(16, 15)], r"\[16, 16\] for table 0"),
        ([torch.zeros(256)[:16]], r"\[16, 16\] for table 0"),
        ([torch.zeros(16, 16).double()], r"float32, bfloat16 or float16, got Double for table 0"),
        ([torch.zeros(16, 16, dtype=torch.int32)], r"float32, .* got Int"),
        ([torch.zeros(16, 32)[:, ::2]], r"be contiguous"),
        ([torch.zeros(16, 16)] * 2, r"have one tensor per table, 1, or none, got 2"),
    ],
)
def test_rows_that_do_not_fit_raise(rows, message):
    lookup = make_lookup("3 cores")
    ids = fill(list(range(15)), num_sets=2)
    offsets = torch.arange(16)
    the_plan = plan(torch.arange(15), offsets, lookup=lookup, cache_ids=[ids])
    call = {"offsets": offsets, "lookup": lookup, "cached_rows": rows}
    with pytest.raises(ValueError, match=f"cached_rows must .*{message}"):
        embedding_bag_forward(the_plan, make_cores(lookup), **call)
    with pytest.raises(ValueError, match=f"cached_rows must .*{message}"):
        embedding_bag_backward_dense(torch.ones(15, 16), the_plan, make_cores(lookup), **call)


def test_float64_cores_want_float64_rows():
    lookup = make_lookup("3 cores")
    ids = fill([1], num_sets=1)
    offsets = torch.tensor([0, 1])
    the_plan = plan(torch.tensor([1]), offsets, lookup=lookup, cache_ids=[ids])
    with pytest.raises(ValueError, match="cached_rows must be float64 like the cores, got Float"):
        embedding_bag_forward(
            the_plan,
            make_cores(lookup, dtype=torch.float64),
            offsets=offsets,
            lookup=lookup,
            cached_rows=[torch.zeros(8, 16)],
        )


def test_a_step_that_does_not_fit_raises_before_anything_is_stepped():
    case = make_case("3 cores", "2 cores", ratios=(0.5, 0.5))
    before = [rows.clone() for rows in case.caches.rows]
    adagrad = TTOptimizerConfig(optimizer="adagrad")
    states = make_states(case.caches.rows, adagrad, has_step=False)
    sgd = TTOptimizerConfig()
    for arguments, kwargs, message in (
        ((states[:1], adagrad), {}, "states must have 2 tensors for adagrad, got 1"),
        ((states[::-1], adagrad), {}, "states must be contiguous"),
        (([], sgd), {"cached_rows": case.caches.rows[:1]}, "cached_rows must have one tensor per"),
        (([], sgd), {"cached_rows": [before[0][:8], before[1]]}, "cached_rows must be contiguous"),
        (([], sgd), {"rounding_seeds": [1]}, "rounding_seeds must have 2 entries or none, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            case.step(*arguments, **kwargs)
    case.cotangent = case.cotangent[:, 1:]
    with pytest.raises(ValueError, match="grad_output must be"):
        case.step([], sgd)
    assert all(torch.equal(a, b) for a, b in zip(case.caches.rows, before, strict=True))


def test_huge_pages_hold_what_they_were_given():
    sizes = (3 * 2**20, 5, 0)
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    advise_huge_pages([*tensors, torch.empty(4, device="meta")])
    for tensor, size in zip(tensors, sizes, strict=True):
        assert torch.equal(tensor, torch.arange(size, dtype=torch.float32))
