"""Row caches on traffic that changes: what folding is worth, hit rates, and schedules."""

import itertools
from collections.abc import Callable, Iterator

import embedding_bag as bench
import torch
from cached_tables import (
    BATCH,
    NARROW,
    RATIOS,
    ROWS,
    WIDE,
    Line,
    cache_of,
    hit_rate,
    make_module,
    timed,
    training_step,
)
from torch import Tensor

from torchrec_tt import RowCacheConfig, make_shape
from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.cores import dense
from torchrec_tt.tt.init import init_cores_

DRIFTING_ROWS, DRIFTING_SLOTS = 100_000, 2000


def zipf_law(num_rows: int) -> Tensor:  # [num_rows] float64, cumulative
    law = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-1.05).cumsum(0)
    return law / law[-1]


def drift(*, num_steps: int = 600) -> Iterator[Line]:
    """Rows learn targets that are low-rank but for some noise; figures are of the last half."""
    best = float(zipf_law(DRIFTING_ROWS)[DRIFTING_SLOTS - 1])
    places: dict[str, Callable[[Tensor, int], Tensor]] = {  # of a popularity at a step
        "cool slowly": lambda rank, step: rank - 10 * step,
        "come back": lambda rank, step: rank + 50_000 * (step // 100 % 2),
        "are gone at once": lambda rank, step: rank + 2 * step,
    }
    for (title, place), noise in itertools.product(places.items(), (0.3, 1.0)):
        runs = {
            kind: drifted(kind, place, noise=noise, num_steps=num_steps)
            for kind in ("none", "drop", "fold")
        }
        shown = ", ".join(f"{kind} {loss:.4f}" for kind, (loss, _) in runs.items())
        line = f"hot rows {title}, noise {noise}: {shown}; fold / drop"
        loss, rate = runs["fold"]
        yield line, loss / runs["drop"][0], None
        yield f"    hit rate {rate:.3f} of {best:.3f} for the true top rows", rate / best, None


def drifted(
    kind: str, place: Callable[[Tensor, int], Tensor], *, noise: float, num_steps: int
) -> tuple[float, float]:
    """Loss and hit rate."""
    rows, dim = DRIFTING_ROWS, 16
    generator = torch.Generator().manual_seed(1)
    low_rank = make_shape(rows, dim, tt_ranks=[4, 4])
    cores = [torch.empty(size) for size in low_rank.core_shapes]
    init_cores_(cores, shape=low_rank, generator=generator)
    targets = dense(cores, shape=low_rank)
    targets = targets / targets.std() + noise * torch.randn(rows, dim, generator=generator)
    targets /= targets.std()
    law = zipf_law(rows)
    scatter = torch.randperm(rows, generator=generator)
    config = TTOptimizerConfig(optimizer="adagrad", learning_rate=0.1)
    cache = RowCacheConfig(
        num_rows=DRIFTING_SLOTS,
        first_refresh=100,
        refresh_growth=1,
        on_evict="drop" if kind == "none" else kind,
    )
    shape = make_shape(rows, dim, tt_ranks=[16, 16])
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name="t", shape=shape)],
        optimizer=config,
        caches=None if kind == "none" else {"t": cache},
    )
    init_cores_(module.all_cores(), shape=shape, generator=generator)
    total = 0.0
    for step in range(num_steps):
        if 2 * step == num_steps and kind != "none":
            cache_of(module).reset_statistics()
        uniform = torch.rand(2048, dtype=torch.float64, generator=generator)
        rank = torch.searchsorted(law, uniform).clamp_(max=rows - 1)
        ids = scatter[place(rank, step) % rows]
        error = module(ids, torch.arange(2049)) - targets[ids]
        (error.square().sum() / 2048).backward()
        total += float(error.detach().square().mean()) * (2 * step >= num_steps)
    loss = total / (num_steps - num_steps // 2)
    return loss, 0.0 if kind == "none" else hit_rate(module)


def intervals(*, num_steps: int = 600) -> Iterator[Line]:
    """Refreshes at fixed intervals where 10 new rows a step become the hottest; last half."""
    generator = torch.Generator().manual_seed(1)
    law = zipf_law(DRIFTING_ROWS)
    scatter = torch.randperm(DRIFTING_ROWS, generator=generator)
    shape = make_shape(DRIFTING_ROWS, 16, tt_ranks=[16, 16])
    best = float(law[DRIFTING_SLOTS - 1])
    for policy, interval in itertools.product(("lfu", "lru"), (100, 50, 25, 10, 5)):
        config = RowCacheConfig(
            num_rows=DRIFTING_SLOTS, policy=policy, first_refresh=interval, refresh_growth=1
        )
        module = make_module(shape, config)
        refreshes: list[float] = []
        steps: list[float] = []
        assert module._caches is not None
        module._caches._refresh = timed(module._caches._refresh, refreshes)
        train = timed(training_step(module), steps)
        for step in range(num_steps):
            if 2 * step == num_steps:
                cache_of(module).reset_statistics()
                refreshes.clear()
                steps.clear()
            uniform = torch.rand(2048, dtype=torch.float64, generator=generator)
            rank = torch.searchsorted(law, uniform).clamp_(max=DRIFTING_ROWS - 1)
            ids = scatter[(rank - 10 * step) % DRIFTING_ROWS]
            grad = torch.randn(2048, 16, generator=generator) * 0.01
            train(ids, torch.arange(2049), grad, train=True)
        share, rate = sum(refreshes) / sum(steps), hit_rate(module)
        title = f"{policy}, a refresh every {interval} steps, {share:.2f} of the time: hit rate"
        yield f"{title} {rate:.3f} of {best:.3f} for the true top rows", rate / best, None


def moving(*, num_steps: int = 700) -> Iterator[Line]:
    """At the default schedule; the hottest row of each step was the second before (Zipf 1.05)."""
    law, scatter = bench.popularity(1.05)
    names = {"none": None, **{f"{100 * r:g} %": r for r in RATIOS}}
    modules = {
        name: make_module(WIDE, None if ratio is None else RowCacheConfig(load_factor=ratio))
        for name, ratio in names.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in range(num_steps):
        if 2 * step == num_steps:
            for name in list(names)[1:]:
                cache_of(modules[name]).reset_statistics()
        rank = torch.searchsorted(law, torch.rand(BATCH, dtype=torch.float64))
        batch = (
            scatter[(rank + step) % ROWS],
            torch.arange(BATCH + 1),
            torch.randn(BATCH, 64) * 0.01,
        )
        for turn in range(len(modules)):  # who comes first in a step finds the batch far away
            name = list(modules)[(step + turn) % len(modules)]
            timed(training_step(modules[name]), seconds[name])(*batch, train=True)
    step_ms = {
        name: 2e3 * sum(each[num_steps // 2 :]) / num_steps for name, each in seconds.items()
    }
    for name in list(names)[1:]:
        best, rate = float(law[cache_of(modules[name]).num_slots - 1]), hit_rate(modules[name])
        yield (
            f"{name} of the rows: hit rate {rate:.3f} of {best:.3f} for each step's top rows",
            rate / best,
            None,
        )
        line = f"    a step takes {step_ms[name]:.2f} ms of {step_ms['none']:.2f}"
        yield line, step_ms[name] / step_ms["none"], None


def schedules(*, num_steps: int = 1650) -> Iterator[Line]:
    """0.01 % of the rows by decay and greatest interval: traffic of `moving`, and at rest."""
    law, scatter = bench.popularity(1.05)
    settings = [(0.5, 1000), (0.25, 1000), (0.0, 1000), (0.25, 250), (0.0, 250)]
    settings += [(0.5, 100), (0.25, 100), (0.0, 100)]
    for title, drift in (("moving", 1), ("at rest", 0)):
        modules = {}
        for decay, interval in settings:
            config = RowCacheConfig(
                load_factor=RATIOS[0], decay=decay, max_refresh_interval=interval
            )
            modules[decay, interval] = make_module(NARROW, config)
        for step in range(num_steps):
            if step == num_steps - 1000:
                for module in modules.values():
                    cache_of(module).reset_statistics()
            rank = torch.searchsorted(law, torch.rand(BATCH, dtype=torch.float64))
            ids = scatter[(rank + drift * step) % ROWS]
            for module in modules.values():
                module(ids, torch.arange(BATCH + 1)).backward(torch.zeros(BATCH, 4))
        for (decay, interval), module in modules.items():
            best = float(law[cache_of(module).num_slots - 1])
            line = f"{title}, decay {decay}, at most {interval} steps between refreshes: hit rate"
            rate = hit_rate(module)
            yield f"{line} {rate:.3f} of {best:.3f}", rate / best, None
