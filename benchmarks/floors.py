"""Checks the speed that the CPU kernels promise: every case beside its floor and its target.

Ratios of median times of a training step (forward + backward + SGD), the two sides taking turns in
one run on the batches of `embedding_bag.py`; and what a step takes beyond its three operators.
Processor time, which a busy machine disturbs less, but for two threads. Exits with 1 where a floor
is missed.

    OMP_NUM_THREADS=1 python benchmarks/floors.py
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Literal

import embedding_bag as bench
import torch
from torch import Tensor

from torchrec_tt.modules.table_batched import TTTableBatchedEmbeddingBags
from torchrec_tt.ops.embedding_bag import cpu_isa, cpu_peak_gflops
from torchrec_tt.ops.lookup import TTTable
from torchrec_tt.optim import TTOptimizerConfig
from torchrec_tt.tt.factorize import make_shape
from torchrec_tt.tt.shape import TTShape

BALANCED = (200, 220, 250)
Limits = dict[str, tuple[float, float]]  # instruction set: (floor, target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A ratio to reach: times faster than a rival, or at most so many times its time."""

    bags: int
    pooling: int
    dim: int
    rival: Literal["bmm", "tbe", "two threads"]
    limits: Limits
    order: str = "scattered"
    is_fast: bool = False  # row factors of the least modelled cost
    small_tables: int = 0  # beside the table, in the same call, each with few of the ids
    rounds: int = 6  # through the batches: the machine's speed changes within seconds

    @property
    def title(self) -> str:
        factors = ", fast factors" if self.is_fast else ""
        beside = f", {self.small_tables} small tables" if self.small_tables else ""
        return f"{self.bags}x{self.pooling} dim {self.dim}{factors}, ids {self.order}{beside}"


def _both(floor: float, target: float) -> Limits:
    return {"avx2": (floor, target), "avx512": (floor, target)}


CASES = {
    "bmm_16384x1": Case(
        bags=16384, pooling=1, dim=64, rival="bmm", limits={"avx2": (25, 35), "avx512": (40, 60)}
    ),
    "bmm_2048x15": Case(
        bags=2048, pooling=15, dim=64, rival="bmm", limits={"avx2": (28, 40), "avx512": (50, 75)}
    ),
    "bmm_16384x15": Case(
        bags=16384,
        pooling=15,
        dim=64,
        rival="bmm",
        limits={"avx2": (65, 90), "avx512": (110, 160)},
        rounds=2,  # of eight seconds a step there
    ),
    "bmm_2048x1_dim16": Case(bags=2048, pooling=1, dim=16, rival="bmm", limits=_both(10, 16)),
    "bmm_2048x10_dim16": Case(bags=2048, pooling=10, dim=16, rival="bmm", limits=_both(45, 70)),
    "tbe_16384x1": Case(
        bags=16384, pooling=1, dim=64, rival="tbe", limits={"avx2": (6, 4), "avx512": (3.7, 2.5)}
    ),
    "tbe_16384x1_fast": Case(
        bags=16384,
        pooling=1,
        dim=64,
        rival="tbe",
        limits={"avx2": (2.8, 1.5), "avx512": (2.0, 1.2)},
        order="popular",
        is_fast=True,
    ),
    "two_threads_16384x15": Case(
        bags=16384, pooling=15, dim=64, rival="two threads", limits=_both(1.7, 1.9), rounds=30
    ),
    "two_threads_one_large": Case(
        bags=16384,
        pooling=15,
        dim=64,
        rival="two threads",
        limits=_both(1.7, 1.9),
        small_tables=7,
        rounds=30,
    ),
}
OVERHEADS = {"overhead_1_table": (1, 120), "overhead_26_tables": (26, 200)}  # microseconds


def on_threads(step: bench.Step, threads: int) -> bench.Step:
    def run(*batch: Tensor, train: bool) -> None:
        torch.set_num_threads(threads)
        step(*batch, train=train)
        torch.set_num_threads(1)

    return run


def beside_small_tables(shape: TTShape, count: int, bags: int) -> bench.Step:
    """A step of one call for `count` tables more, which get an id each for the first 64 bags."""
    small = make_shape(bench.NUM_EMBEDDINGS, 8, tt_ranks=[8, 8], row_factors=BALANCED)
    tables = [TTTable(name=f"table_{t}", shape=small if t else shape) for t in range(count + 1)]
    module = TTTableBatchedEmbeddingBags(
        tables, optimizer=TTOptimizerConfig(learning_rate=bench.LEARNING_RATE)
    )
    for table in tables:
        bench.init_cores_(list(module.cores[table.name]), shape=table.shape)
    grad_output = torch.randn(bags, module.lookup.num_columns) * 0.01

    def step(indices: Tensor, offsets: Tensor, _: Tensor, *, train: bool) -> None:
        starts = torch.arange(1, len(offsets)).clamp(max=64)
        ends = [len(indices) + 64 * t + starts for t in range(count)]
        ids = torch.cat([indices, indices[:64].repeat(count)])
        module(ids, torch.cat([offsets, *ends])).backward(grad_output)

    return step


def measure(case: Case, *, num_batches: int) -> tuple[float, float]:
    """Returns the ratio, and the share of the arithmetic peak that ours reaches on one thread."""
    factors = {"row_strategy": "fast"} if case.is_fast else {"row_factors": BALANCED}
    shape = make_shape(bench.NUM_EMBEDDINGS, case.dim, tt_ranks=[32, 32], **factors)
    small = case.small_tables
    ours = beside_small_tables(shape, small, case.bags) if small else bench.tt_step(shape)
    rival = on_threads(ours, 2) if case.rival == "two threads" else bench.STEPS[case.rival](shape)
    batches = [
        bench.make_batch(case.bags, case.pooling, order=case.order, exponent=1.05, dim=case.dim)
        for _ in range(num_batches)
    ]
    clock = time.perf_counter if case.rival == "two threads" else time.process_time
    steps = {"ours": ours, "rival": rival}
    times = bench.measure(steps, batches, case.rounds, phases=("train",), clock=clock)
    ours_ms, rival_ms = (times[name]["train"] for name in ("ours", "rival"))
    gflop = 1e-9 * statistics.median(bench.step_flops(shape, batch[0]) for batch in batches)
    share = gflop / (1e-3 * ours_ms) / cpu_peak_gflops()
    return (rival_ms / ours_ms if case.rival == "bmm" else ours_ms / rival_ms), share


def measure_overhead(num_tables: int, *, steps: int = 500) -> float:
    """Returns the microseconds of a step at batch 128 beyond its three operators.

    A step and its operators, called with what the step gives them, take turns; medians. All bags
    are empty, so that the kernels, whose time is not asked for, do not blur the difference.
    """
    shape = make_shape(bench.NUM_EMBEDDINGS, 64, tt_ranks=[32, 32], row_factors=BALANCED)
    module = TTTableBatchedEmbeddingBags(
        [TTTable(name=f"table_{t}", shape=shape) for t in range(num_tables)],
        optimizer=TTOptimizerConfig(learning_rate=0.0),
    )
    cores = module.all_cores()
    for t in range(num_tables):
        bench.init_cores_(cores[3 * t : 3 * t + 3], shape=shape)
    batch = torch.empty(0, dtype=torch.int64), torch.zeros(128 * num_tables + 1, dtype=torch.int64)
    grad_output = torch.randn(128, 64 * num_tables)
    _, offsets = batch

    lookup, ops = module.lookup, torch.ops.torchrec_tt
    tables = (lookup.encoded_tables, lookup.feature_tables)

    @torch.no_grad()
    def operators() -> None:
        batch_plan = ops.plan(*batch, *tables, lookup.check_mode, [])
        call = ([], offsets, None, *tables, lookup.pooling)
        output = ops.embedding_bag_forward(batch_plan, cores, *call)  # kept, as by a step
        ops.embedding_bag_backward_update(
            grad_output, batch_plan, cores, [], *call, False, "sgd", 0.0, 0.0, []
        )
        del output

    runs = {"step": lambda: module(*batch).backward(grad_output), "operators": operators}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            times[name].append(1e6 * (time.process_time() - begin))
    return statistics.median(times["step"]) - statistics.median(times["operators"])


def report(name: str, title: str, value: float, limits: tuple[float, float] | None) -> bool:
    """Prints a line; returns whether the floor holds, which is where a target points from."""
    if limits is None:
        print(f"{name:>21} {title:<52} {value:>8.2f} {'-':>7} {'-':>7}", flush=True)
        return True
    floor, target = limits
    holds = value >= floor if target > floor else value <= floor
    is_met = value >= target if target > floor else value <= target
    verdict = "target" if is_met else "floor" if holds else "MISSED"
    print(f"{name:>21} {title:<52} {value:>8.2f} {floor:>7} {target:>7} {verdict}", flush=True)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = [*CASES, *OVERHEADS]
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--batches", type=int, default=3, help="different ones")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(names):
        parser.error(f"cases must be of {names}, got {sorted(unknown)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {cpu_isa()}, peak of a core {cpu_peak_gflops():.0f} GFLOP/s")
    print(f"{'case':>21} {'':<52} {'measured':>8} {'floor':>7} {'target':>7}")
    holds = True
    for name in args.cases or names:
        if name in CASES:
            case = CASES[name]
            value, share = measure(case, num_batches=args.batches)
            title = f"{case.title} ({100 * share:.0f} % of peak)"
            holds &= report(name, title, value, case.limits.get(cpu_isa()))
        else:
            num_tables, most = OVERHEADS[name]
            value = measure_overhead(num_tables)
            holds &= report(name, f"microseconds, {num_tables} tables", value, (most, most))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
