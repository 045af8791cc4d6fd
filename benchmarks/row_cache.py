"""What row caches do: hit rates, step times, the cost of refreshes, and what folding is worth.

Sections, each under two minutes on one core:

    hits      hit rate over that of the true top rows, by capacity, on Zipf 1.05 and 1.2
    criteo    the same on real columns (`--criteo FILE`, a Criteo TSV, plain or .gz)
    steps     a training step with a filled cache over one without, counting included
    refresh   share of the training time that refreshes take at the default schedule
    crossing  a training step over nn.EmbeddingBag's on the uncompressed table, by hit rate
    drift     loss on drifting streams, folding evicted rows over dropping them, and hit rate over
              that of each step's true top rows
    intervals the same by fixed intervals between refreshes, and the share of the time they take
    moving    hit rate and step time, refreshes included, where a hot row leaves at each step
    schedules hit rate by decay and greatest interval where hot rows leave, and where they stay
    counters  true top rows that ours and other counters of as many bytes find for a first fill
    memory    bytes of tags and counter over those of the cached rows

Prints one table; `--json` writes its lines as records. Limits are those that a figure is held to;
exits with 1 where one is missed.

    OMP_NUM_THREADS=1 python benchmarks/row_cache.py hits steps
"""

import argparse
import gzip
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import embedding_bag as bench
import row_counters
import torch
from cached_tables import (
    BATCH,
    FAST,
    NARROW,
    RATIOS,
    ROWS,
    WIDE,
    Line,
    cache_of,
    fill,
    hit_rate,
    make_module,
    timed,
    training_step,
)
from drifting_rows import drift, intervals, moving, schedules

from torchrec_tt import RowCacheConfig, make_shape
from torchrec_tt.ops.embedding_bag import cpu_isa
from torchrec_tt.tt.row_cache import num_slots, row_cache_bytes

CRITEO_ROWS = {2: 10_131_227, 11: 8_351_593, 20: 7_046_547, 15: 5_461_306, 3: 2_202_608}


def hits(*, steps: int = 1000) -> Iterator[Line]:
    for exponent in (1.05, 1.2):
        law, _ = bench.popularity(exponent)
        modules = {r: make_module(NARROW, RowCacheConfig(load_factor=r)) for r in RATIOS}
        for step in range(steps):
            batch = bench.make_batch(BATCH, 1, order="scattered", exponent=exponent, dim=4)
            for module in modules.values():
                if step == 3 * steps // 4:
                    cache_of(module).reset_statistics()
                module(*batch[:2]).backward(batch[2])
        for ratio, module in modules.items():
            best = float(law[cache_of(module).num_slots - 1])
            rate = hit_rate(module)
            title = f"Zipf {exponent}, {100 * ratio:g} % of the rows: hit rate {rate:.3f} of"
            yield f"{title} {best:.3f} for the true top rows", rate / best, -0.95


def criteo(path: Path, *, epochs: int = 10) -> Iterator[Line]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [line.split("\t") for line in text.decode().splitlines()]
    for column, size in CRITEO_ROWS.items():
        ids = torch.tensor([int(row[14 + column] or "0", 16) % size for row in rows])
        shape = make_shape(size, 4, tt_ranks=[2, 2])
        module = make_module(shape, RowCacheConfig(load_factor=RATIOS[0]))
        for epoch in range(epochs):
            if epoch == epochs - 1:
                cache_of(module).reset_statistics()
            for part in ids.split(64):
                module(part, torch.arange(len(part) + 1)).backward(torch.zeros(len(part), 4))
        slots = cache_of(module).num_slots
        top = ids.unique(return_counts=True)[1].sort(descending=True).values[:slots].sum()
        best, rate = float(top) / len(ids), hit_rate(module)
        title = f"column {column}, {slots} slots: hit rate {rate:.3f} of"
        yield f"{title} {best:.3f} for the true top rows", rate / best, -0.95


def steps() -> Iterator[Line]:
    """On batches as they come (Zipf 1.05); the cache holds the true top rows."""
    _, scatter = bench.popularity(1.05)
    names = {"none": None, **{f"{100 * r:g} %": r for r in RATIOS}}
    runs: dict[str, bench.Step] = {}
    for name, ratio in names.items():
        config = RowCacheConfig(load_factor=ratio, first_refresh=10**9) if ratio else None
        module = make_module(WIDE, config)
        if ratio:
            fill(module, scatter[: cache_of(module).num_slots])
        runs[name] = training_step(module)
    times = take_turns(runs, [zipf_batch() for _ in range(4)])
    for name in list(names)[1:]:
        yield (
            f"{name} of the rows cached: a step takes {times[name]:.2f} ms of {times['none']:.2f}",
            times[name] / times["none"],
            0.6 if name == "1 %" else None,
        )


def zipf_batch() -> bench.Batch:
    return bench.make_batch(BATCH, 1, order="scattered", exponent=1.05, dim=64)


def take_turns(runs: dict[str, bench.Step], batches: list[bench.Batch]) -> dict[str, float]:
    """Median milliseconds of processor time of a training step."""
    times = bench.measure(runs, batches, 3, phases=("train",), clock=time.process_time)
    return {name: phases["train"] for name, phases in times.items()}


def refresh(*, measured: int = 2000) -> Iterator[Line]:
    """The fill and the refreshes of 2,000 steps on fresh batches; later ones cost as the last."""
    for ratio in RATIOS:
        config = RowCacheConfig(load_factor=ratio)
        module = make_module(WIDE, config)
        caches = module._caches
        assert caches is not None
        refreshes: list[float] = []
        steps: list[float] = []
        caches._refresh = timed(caches._refresh, refreshes)
        train = timed(training_step(module), steps)
        for _ in range(measured):
            train(*zipf_batch(), train=True)
        counts = cache_of(module).statistics_dict()
        yield (
            f"{100 * ratio:g} % cached, the first {measured} steps: {len(refreshes)} refreshes, "
            f"{counts['evictions']} evictions, fold residual {counts['fold_residual']:.2f}",
            sum(refreshes) / sum(steps),
            0.02,
        )
        step_ms = (sum(steps) - sum(refreshes)) / measured
        later = refreshes[-1] * (10_000 - measured) / config.greatest_interval(ROWS)
        share = (sum(refreshes) + later) / (10_000 * step_ms)
        last = f"the last refresh takes {1e3 * refreshes[-1]:.0f} ms, a step {1e3 * step_ms:.1f}"
        yield f"{100 * ratio:g} % cached, 10,000 steps: {last}", share, 0.02


def crossing() -> Iterator[Line]:
    """Hits are of the 100,000 most popular rows by their Zipf law, misses of the others.

    The claim that it is below 1 at 90 % is held to with the factors that are made for speed.
    """
    law, scatter = bench.popularity(1.05)
    slots = num_slots(100_000)
    modules = {
        name: make_module(shape, RowCacheConfig(num_rows=slots, first_refresh=10**9))
        for name, shape in {"balanced": WIDE, "fast": FAST}.items()
    }
    for module in modules.values():
        fill(module, scatter[:slots])
    runs = {name: training_step(module) for name, module in modules.items()}
    runs["dense"] = bench.embedding_bag_step(WIDE)
    cached = float(law[slots - 1])
    for rate in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        batches = []
        for _ in range(3):
            uniform, is_hit = torch.rand(2, BATCH, dtype=torch.float64)
            place = torch.where(is_hit < rate, uniform * cached, cached + uniform * (1 - cached))
            ids = scatter[torch.searchsorted(law, place).clamp_(max=ROWS - 1)]
            batches.append((ids, torch.arange(BATCH + 1), torch.randn(BATCH, 64) * 0.01))
        for module in modules.values():
            cache_of(module).reset_statistics()
        times = take_turns(runs, batches)
        for name, module in modules.items():
            title = f"{100 * hit_rate(module):.0f} % hits, {name} factors: {times[name]:.2f} ms"
            limit = 1.0 if rate == 0.9 and name == "fast" else None
            yield (
                f"{title}, nn.EmbeddingBag {times['dense']:.2f} ms",
                times[name] / times["dense"],
                limit,
            )


def counters() -> Iterator[Line]:
    """At 160 lookups a slot: 100 steps of 16384 where 0.1 % of 10,131,227 rows are cached."""
    sizes = {"num_rows": 1_000_000, "num_slots": 1000, "steps": 80}
    for exponent, size in itertools.product((1.05, 1.2), (24, 36, 48)):
        found = row_counters.recall(exponent=exponent, bytes_per_slot=size, **sizes)
        for name, (share, of_lookups) in found.items():
            title = (
                f"Zipf {exponent}, {size} bytes a slot, {name}: {of_lookups:.3f} of their lookups"
            )
            yield f"{title}, recall", share, None


def memory() -> Iterator[Line]:
    stated = row_cache_bytes(num_slots(10_000), 64, optimizer="sgd")
    beside = stated.tags + stated.heats + stated.counter
    title = f"10,000,000 rows, dim 64, 0.1 %: {beside} bytes of tags, heats and counter over"
    yield f"{title} {stated.rows} of rows", beside / stated.rows, 0.15


SECTIONS: dict[str, Callable[..., Iterator[Line]]] = {
    "hits": hits,
    "criteo": criteo,
    "steps": steps,
    "refresh": refresh,
    "crossing": crossing,
    "drift": drift,
    "intervals": intervals,
    "moving": moving,
    "schedules": schedules,
    "counters": counters,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--criteo", type=Path, help="a Criteo TSV, plain or .gz")
    parser.add_argument("--json", help="also write the records to this file")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"sections must be of {list(SECTIONS)}, got {sorted(unknown)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.ones(7 * 2**20)  # once it has freed so much, glibc keeps memory, as beside a large layer
    print(f"torch {torch.__version__}, {cpu_isa()}")
    records = []
    for name in args.sections or SECTIONS:
        if name == "criteo" and args.criteo is None:
            continue
        given = [args.criteo] if name == "criteo" else []
        for title, figure, limit in SECTIONS[name](*given):
            least = limit is not None and limit < 0
            holds = limit is None or (figure >= -limit if least else figure <= limit)
            bound = "" if limit is None else f"{'at least' if least else 'at most'} {abs(limit)}"
            verdict = "" if holds else " MISSED"
            print(f"{name:>9} {title:<88} {figure:>6.3f} {bound}{verdict}", flush=True)
            records.append({"section": name, "title": title, "figure": figure, "holds": holds})
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=2))
    sys.exit(0 if all(record["holds"] for record in records) else 1)


if __name__ == "__main__":
    main()
