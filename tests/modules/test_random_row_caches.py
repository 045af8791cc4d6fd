"""Random training with row caches against a dictionary of what each row must return."""

import copy
import random

import pytest
import torch
from torch import Tensor

from torchrec_tt import RowCacheConfig, make_shape
from torchrec_tt.modules.row_cache import RowCache
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import rows as rows_of_cores
from torchrec_tt.tt.init import init_cores_

LEARNING_RATE, EPS = 0.02, 1e-3


def assert_near(found: Tensor, wanted: Tensor, **kwargs) -> None:
    """Sums in another order: near as float32 goes, measured by the largest element."""
    largest = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * largest + 1e-7, **kwargs)


class Row:
    """A cached row and its past, stepped as torch.optim's SGD and Adagrad step a parameter."""

    def __init__(self, value: Tensor, optimizer: str) -> None:
        self.value, self.optimizer = value.clone(), optimizer
        self.squares = torch.zeros_like(value[:1] if optimizer == "rowwise_adagrad" else value)

    def step(self, grad: Tensor) -> None:
        if self.optimizer == "sgd":
            self.value -= LEARNING_RATE * grad
            return
        squares = grad.square()
        self.squares += squares.mean() if self.optimizer == "rowwise_adagrad" else squares
        self.value -= LEARNING_RATE * grad / (self.squares.sqrt() + EPS)


class Model:
    """What every row of the tables must be; cores are taken over from the module when checked."""

    def __init__(self, module: TTTableBatchedEmbeddingBags, optimizer: str) -> None:
        self.module, self.optimizer = module, optimizer
        self.cached: list[dict[int, Row]] = [{} for _ in module.tables]
        self.lookups = [0 for _ in module.tables]
        self.hits = [0 for _ in module.tables]

    def cache(self, t: int) -> RowCache | None:
        return self.module.row_caches._modules.get(self.module.tables[t].name)

    def rows(self, t: int, ids: Tensor) -> Tensor:
        table = self.module.tables[t]
        ids = ids + table.row_offset
        values = rows_of_cores(list(self.module.cores[table.name]), ids, shape=table.shape)
        own = [self.cached[t].get(row) for row in ids.tolist()]
        return torch.stack(
            [value if row is None else row.value for value, row in zip(values, own, strict=True)]
        )

    def step(self, t: int, ids: Tensor, grads: Tensor) -> None:
        total: dict[int, Tensor] = {}
        for row, grad in zip((ids + self.module.tables[t].row_offset).tolist(), grads, strict=True):
            self.lookups[t] += 1
            self.hits[t] += row in self.cached[t]
            total[row] = total.get(row, 0) + grad
        for row, grad in total.items():
            if row in self.cached[t]:
                self.cached[t][row].step(grad)

    def take_refresh(self, before: list[dict[int, int]]) -> None:
        """Which rows are cached is the policy's choice; what they are is not."""
        for t, table in enumerate(self.module.tables):
            cache = self.cache(t)
            if cache is None:
                continue
            slots = {row: slot for slot, row in enumerate(cache.ids.tolist()) if row >= 0}
            assert len(slots) == int((cache.ids >= 0).sum())  # no row lies in two slots
            for row, slot in slots.items():
                assert table.row_offset <= row < table.row_offset + table.block_size
                if row in before[t]:
                    assert before[t][row] == slot
                else:
                    value = rows_of_cores(
                        list(self.module.cores[table.name]), torch.tensor([row]), shape=table.shape
                    )[0]
                    self.cached[t][row] = Row(value.detach(), self.optimizer)
            for row in before[t].keys() - slots.keys():
                del self.cached[t][row]

    def check(self) -> None:
        """Every cached row of the module, its state and the counts of lookups."""
        for t in range(len(self.cached)):
            cache = self.cache(t)
            if cache is None:
                continue
            assert {row for row in cache.ids.tolist() if row >= 0} == self.cached[t].keys()
            for slot, row in enumerate(cache.ids.tolist()):
                if row >= 0:
                    own = self.cached[t][row]
                    assert_near(cache.rows[slot], own.value)
                    if self.optimizer != "sgd":
                        found = cache.sum[slot].reshape(-1)
                        assert_near(found, own.squares)
            counts = cache.statistics_dict()
            assert counts["hits"] == self.hits[t]
            assert counts["hits"] + counts["misses"] == self.lookups[t]


def make_module(rng: random.Random, optimizer: str) -> TTTableBatchedEmbeddingBags:
    tables, caches = [], {}
    for t in range(rng.choice((1, 2, 3))):
        ranks = [rng.randint(1, 5) for _ in range(rng.choice((1, 2, 3)))]
        shape = make_shape(rng.randint(60, 400), 2 ** len(ranks) * 2, tt_ranks=ranks)
        offset = rng.choice((0, rng.randint(0, 30)))
        tables.append(TTTable(name=f"t{t}", shape=shape, row_offset=offset))
        if t == 0 or rng.random() < 0.7:
            caches[f"t{t}"] = RowCacheConfig(
                num_rows=rng.choice((8, 20, 64)),
                policy=rng.choice(("lfu", "lfu", "lru")),
                decay=rng.choice((0.0, 0.5, 1.0)),
                first_refresh=rng.randint(1, 3),
                refresh_growth=rng.choice((1, 1.5)),
                max_refresh_interval=4,
                on_evict=rng.choice(("fold", "drop")),
            )
    config = TTOptimizerConfig(optimizer=optimizer, learning_rate=LEARNING_RATE, eps=EPS)
    module = TTTableBatchedEmbeddingBags(tables, optimizer=config, caches=caches)
    for table in tables:
        init_cores_(list(module.cores[table.name]), shape=table.shape)
        with torch.no_grad():
            for core in module.cores[table.name]:
                core.mul_(3)
    return module


def draw(rng: random.Random, table: TTTable, step: int) -> Tensor:
    """A few hot rows, which change now and then, and others."""
    hot = [(37 * (step // 10) + 3 * i) % table.block_size for i in range(12)]
    ids = [
        rng.choice(hot) if rng.random() < 0.7 else rng.randrange(table.block_size)
        for _ in range(rng.choice((0, 1, 20, 60)))
    ]
    return torch.tensor(ids, dtype=torch.int64)


def slots_of(model: Model) -> list[dict[int, int]]:
    found = []
    for t in range(len(model.cached)):
        cache = model.cache(t)
        ids = [] if cache is None else cache.ids.tolist()
        found.append({row: slot for slot, row in enumerate(ids) if row >= 0})
    return found


def run(seed: int, steps: int) -> int:
    """One training; returns how many rows were evicted."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = rng.choice(("sgd", "adagrad", "rowwise_adagrad"))
    module = make_module(rng, optimizer)
    model = Model(module, optimizer)
    saved: tuple | None = None
    for step in range(steps):
        ids = [draw(rng, table, step) for table in module.tables]
        bags = [[len(x) // 2, len(x)] for x in ids]  # two bags each
        ends, start = [0], 0
        for x, b in zip(ids, bags, strict=True):
            ends += [start + e for e in b]
            start += len(x)
        before = slots_of(model)
        is_training = rng.random() < 0.8
        module.train(is_training)
        with torch.set_grad_enabled(is_training):
            output = module(torch.cat(ids), torch.tensor(ends))
        model.take_refresh(before)
        wanted = []
        for t, (x, b) in enumerate(zip(ids, bags, strict=True)):
            values = (
                model.rows(t, x) if len(x) else torch.zeros(0, module.tables[t].shape.embedding_dim)
            )
            wanted.append(torch.stack([values[: b[0]].sum(0), values[b[0] :].sum(0)]))
        assert_near(output, torch.cat(wanted, dim=1), msg=lambda m: f"seed {seed}: {m}")
        if is_training:
            cotangent = 0.1 * torch.randn_like(output)
            uncached = torch.cat(wanted, dim=1)
            uncached = uncached + 0 * sum(core.sum() for core in module.all_cores())
            grads = torch.autograd.grad(uncached, module.all_cores(), cotangent)
            cores = [core.detach().clone() for core in module.all_cores()]
            output.backward(cotangent)
            for core, old, grad in zip(module.all_cores(), cores, grads, strict=True):
                if optimizer == "sgd":
                    assert_near(core.detach(), old - LEARNING_RATE * grad)
                elif not grad.any():  # cached rows give the cores nothing
                    assert torch.equal(core.detach(), old)
            parts = cotangent.split([table.shape.embedding_dim for table in module.tables], dim=1)
            for t, (x, b, part) in enumerate(zip(ids, bags, parts, strict=True)):
                model.step(t, x, part.repeat_interleave(torch.tensor([b[0], b[1] - b[0]]), dim=0))
        model.check()
        if rng.random() < 0.1:
            states = copy.deepcopy([*module.optimizer.states()])
            saved = (copy.deepcopy(module.state_dict()), states, copy.deepcopy(model.cached))
            saved += (list(model.lookups), list(model.hits))
        elif saved is not None and rng.random() < 0.1:
            module.load_state_dict(copy.deepcopy(saved[0]))
            for state, old in zip(module.optimizer.states(), saved[1], strict=True):
                state.copy_(old)
            model.cached = copy.deepcopy(saved[2])
            model.lookups, model.hits = list(saved[3]), list(saved[4])
            model.check()
    return sum(int(cache.statistics[4]) for cache in module.row_caches.values())


def test_a_row_is_what_the_model_says_through_200_steps():
    assert sum(run(seed, 20) for seed in range(10)) > 0


@pytest.mark.slow
def test_a_row_is_what_the_model_says_through_2500_steps():
    assert sum(run(seed, 50) for seed in range(100, 150)) > 500
