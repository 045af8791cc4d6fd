"""Compares what the planner predicts of plans with what they measure: step time and bytes.

A model of five TT and five regular tables, SGD, on two CPU ranks over gloo, one thread a rank. Each
plan is sharded and trained in the same processes, on the same batches, taking turns; the table has
medians over the rounds. `pick` is what tt_planner chooses. Bytes are those of parameters after
sharding, the most of any rank. Exits with 1 where a bound is missed.

    torchrec-tt calibrate --output hardware.yaml
    OMP_NUM_THREADS=1 python benchmarks/planner.py --hardware hardware.yaml
"""

import argparse
import json
import logging
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
    tt_planner,
)
from torchrec_tt.distributed.planner.planners import TTEmbeddingShardingPlanner
from torchrec_tt.distributed.planner.stats import PlanReport
from torchrec_tt.tt.traffic import Traffic

DIM = 32
TT = {"tt0": (10_131_227, 32), "tt1": (8_351_593, 32), "tt2": (5_461_306, 16)}
TT |= {"tt3": (2_202_608, 32), "tt4": (286_181, 16)}  # rows and rank
REGULAR = {"r0": 100_000, "r1": 50_000, "r2": 10_000, "r3": 1_000, "r4": 100}
POOLING_FACTOR = dict(zip([*TT, *REGULAR], [5, 1, 5, 1, 5] * 2, strict=True))
EXPONENT = 1.0  # of Zipf's law
SPREAD, CORRELATION, PICK, TIME_ERROR, BYTES_ERROR = 2.0, 0.8, 1.1, 0.3, 0.02

Generators = dict[str, Any]


def table_wise_on(ranks: dict[str, int]) -> Generators:
    return {name: table_wise(rank=rank) for name, rank in ranks.items()}


def every(names: dict[str, Any], kind: Callable[[], Any]) -> Generators:
    return {name: kind() for name in names}


def plans() -> dict[str, Generators]:
    """Returns a sharding for each table, by the plan's name; for two ranks."""
    tt = table_wise_on({"tt0": 0, "tt1": 1, "tt2": 1, "tt3": 1, "tt4": 0})
    regular = table_wise_on({"r0": 0, "r1": 1, "r2": 0, "r3": 1, "r4": 1})
    columns = {name: column_wise(ranks=[0, 1]) for name in REGULAR}
    small = dict(list(REGULAR.items())[2:])
    return {
        "table_wise": {**tt, **regular},
        "table_wise on rank 0": table_wise_on(dict.fromkeys([*TT, *REGULAR], 0)),
        "TT on rank 0, others 1": table_wise_on(
            {**dict.fromkeys(TT, 0), **dict.fromkeys(REGULAR, 1)}
        ),
        "small data_parallel": {**tt, **regular, **every(small, data_parallel)},
        "regular data_parallel": {**tt, **every(REGULAR, data_parallel)},
        "regular row_wise": {**tt, **every(REGULAR, row_wise)},
        "regular column_wise": {**tt, **columns},
        "TT data_parallel": {**every(TT, data_parallel), **regular},
        "TT row_wise": {**every(TT, row_wise), **regular},
        "largest TT row_wise": {**tt, **regular, "tt0": row_wise()},
        "TT data_parallel, others row": {**every(TT, data_parallel), **every(REGULAR, row_wise)},
        "row_wise": {**every(TT, row_wise), **every(REGULAR, row_wise)},
        "data_parallel": {**every(TT, data_parallel), **every(REGULAR, data_parallel)},
    }


class Model(nn.Module):
    """The tables and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        tt = [
            TTEmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[f"f_{name}"],
                tt_ranks=[rank, rank],
            )
            for name, (rows, rank) in TT.items()
        ]
        regular = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f_{name}"]
            )
            for name, rows in REGULAR.items()
        ]
        self.ebc = TTEmbeddingBagCollection([*tt, *regular], device="meta")

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # [B, 10 * DIM]
        return self.ebc(features).values()


def sharder() -> TTEmbeddingBagCollectionSharder:
    return TTEmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
    )


def make_planner(args: argparse.Namespace, world_size: int) -> TTEmbeddingShardingPlanner:
    return tt_planner(
        Topology(world_size=world_size, compute_device="cpu"),
        batch_size=args.batch_size,
        constraints={
            name: ParameterConstraints(pooling_factors=[float(factor)], min_partition=DIM // 2)
            for name, factor in POOLING_FACTOR.items()
        },
        hardware=args.hardware,
        traffic={name: Traffic(zipf_exponent=EXPONENT) for name in POOLING_FACTOR},
        storage_reservation=FixedPercentageStorageReservation(percentage=0.05),
    )


class Trained:
    """A plan that steps on batches."""

    def __init__(self, plan: ShardingPlan) -> None:
        self.model = DistributedModelParallel(
            Model(), device=torch.device("cpu"), plan=plan, sharders=[sharder()]
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = torch.optim.SGD(dense.values(), lr=0.01) if dense else None

    def step(self, features: KeyedJaggedTensor) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.model(features).sum().mul(1e-3).backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def parameter_bytes(self) -> int:
        """Returns the bytes of the parameters that this rank has."""
        parameters = {p.data_ptr(): p for p in self.model.parameters() if p.numel()}
        return sum(p.nbytes for p in parameters.values())


def make_batch(batch_size: int, generator: torch.Generator) -> KeyedJaggedTensor:
    values, lengths = [], []
    rows = {**{name: size for name, (size, _) in TT.items()}, **REGULAR}
    for name, factor in POOLING_FACTOR.items():
        share = torch.rand(batch_size * factor, generator=generator, dtype=torch.float64)
        rank = torch.pow(float(rows[name] + 1), share).long() - 1
        values.append((rank.clamp_(0, rows[name] - 1) * 2_654_435_761) % rows[name])
        lengths.append(torch.full((batch_size,), factor))
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in POOLING_FACTOR],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
    )


def run_rank(rank: int, world_size: int, port: int, args: argparse.Namespace, path: Path) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # TorchRec's, on every rank
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    planner, model = make_planner(args, world_size), Model()
    made = {name: construct(model, generators, world_size) for name, generators in plans().items()}
    made["pick"] = planner.collective_plan(model, [sharder()], dist.group.WORLD)
    trained = {name: Trained(plan) for name, plan in made.items()}
    generator = torch.Generator().manual_seed(rank)
    batches = [make_batch(args.batch_size, generator) for _ in range(args.steps)]
    times = time_steps(trained, batches, args.rounds)
    num_bytes = torch.tensor([model.parameter_bytes() for model in trained.values()])
    dist.all_reduce(num_bytes, dist.ReduceOp.MAX)
    if rank == 0:
        reports = {name: planner.report(model, [sharder()], plan) for name, plan in made.items()}
        results = (times, dict(zip(trained, num_bytes.tolist(), strict=True)), reports)
        path.write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def construct(model: Model, generators: Generators, world_size: int) -> ShardingPlan:
    plan = construct_module_sharding_plan(
        model.ebc,
        generators,
        sharder=sharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    for name in REGULAR:
        if plan[name].sharding_type != "data_parallel":
            plan[name].compute_kernel = "fused"  # the helper says dense on the CPU
    return ShardingPlan({"ebc": plan})


def time_steps(
    models: dict[str, Trained], batches: list[KeyedJaggedTensor], rounds: int
) -> dict[str, float]:
    """Returns each model's median milliseconds a step; the models take turns."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):  # the first one warms up
        for name, model in models.items():
            dist.barrier()
            begin = time.perf_counter()
            for batch in batches:
                model.step(batch)
            dist.barrier()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin) / len(batches))
    return {name: statistics.median(values) for name, values in times.items()}


def predicted_bytes(report: PlanReport) -> int:
    """Returns the parameters' bytes of the rank that has the most."""
    ranks = [0] * len(report.rank_ms)
    for entry in report.tables:
        for rank in entry.ranks:
            if entry.storage is not None:
                ranks[rank] += entry.storage.cores
            elif entry.sharding_type == "data_parallel":
                ranks[rank] += 4 * DIM * REGULAR[entry.table]
            else:
                ranks[rank] += 4 * DIM * REGULAR[entry.table] // len(entry.ranks)
    return max(ranks)


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Returns Spearman's coefficient."""
    orders = []
    for values in (first, second):
        order = sorted(range(len(values)), key=values.__getitem__)
        orders.append([float(order.index(i)) for i in range(len(values))])
    return float(torch.corrcoef(torch.tensor(orders))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hardware", help="a known device or a YAML file; default: cpu")
    parser.add_argument("--batch_size", type=int, default=1024, help="per rank")
    parser.add_argument("--steps", type=int, default=3, help="per round, each with its own batch")
    parser.add_argument("--rounds", type=int, default=5, help="through the plans, counted")
    parser.add_argument("--json", help="write the records to this file")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results")
        mp.spawn(run_rank, args=(2, port, args, path), nprocs=2)
        times, num_bytes, reports = pickle.loads(path.read_bytes())
    sys.exit(report(times, num_bytes, reports, args.json))


def report(
    times: dict[str, float], num_bytes: dict[str, int], reports: dict[str, PlanReport], path: str
) -> int:
    """Prints the comparison; returns 1 where a bound is missed."""
    print(f"{'plan':>28} {'ms':>7} {'predicted':>9} {'error':>6} {'MB':>7} {'predicted':>9}")
    records, errors, byte_errors = [], [], []
    for name, ms in sorted(times.items(), key=lambda item: item[1]):
        predicted, expected = reports[name].step_ms, predicted_bytes(reports[name])
        errors.append(abs(predicted / ms - 1))
        byte_errors.append(abs(expected / num_bytes[name] - 1))
        print(
            f"{name:>28} {ms:>7.1f} {predicted:>9.1f} {predicted / ms - 1:>+6.0%}"
            f" {num_bytes[name] / 1e6:>7.2f} {expected / 1e6:>9.2f}"
        )
        records.append(
            {
                "plan": name,
                "measured_ms": ms,
                "predicted_ms": predicted,
                "measured_bytes": num_bytes[name],
                "predicted_bytes": expected,
            }
        )
    measured = [record["measured_ms"] for record in records]
    checks = {
        "slowest / fastest": (max(measured) / min(measured), SPREAD, 1),
        "rank correlation": (
            rank_correlation(measured, [r["predicted_ms"] for r in records]),
            CORRELATION,
            1,
        ),
        "pick / fastest": (times["pick"] / min(measured), PICK, -1),
        "median error of time": (statistics.median(errors), TIME_ERROR, -1),
        "largest error of bytes": (max(byte_errors), BYTES_ERROR, -1),
    }
    failed = 0
    for name, (value, bound, sign) in checks.items():
        is_met = value * sign >= bound * sign
        failed |= not is_met
        print(
            f"{name:>28} {value:>7.2f} {'at least' if sign > 0 else 'at most'} {bound}"
            f"{'' if is_met else '  MISSED'}"
        )
    if path:
        with open(path, "w") as file:
            json.dump(records, file, indent=2)
    return int(failed)


if __name__ == "__main__":
    main()
