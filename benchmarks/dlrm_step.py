"""Times DLRM training steps over CPU ranks: TT tables by sharding type, beside uncompressed ones.

The paper's DLRM for Criteo: 26 tables, of which the largest are in Tensor-Train (TT) form, SGD,
over gloo, one thread a rank. `planner` leaves the sharding of every table to tt_planner; the others
constrain the TT tables and leave the regular ones to it. `uncompressed` is stock TorchRec (its
collection, sharders, FBGEMM's TBE) planned by its EmbeddingShardingPlanner. All models of one
number of ranks take turns in the same processes, on the same batches; the table has medians over
the rounds. Ids are log-uniform (Zipf with exponent 1), scattered over the rows.

    OMP_NUM_THREADS=1 python benchmarks/dlrm_step.py --ranks 1,2,4 --json dlrm.json
"""

import argparse
import json
import logging
import os
import platform
import socket
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
    tt_planner,
)

# Rows per table; terabyte's are capped at 10 million, as in the paper.
ROWS = {
    "kaggle": "1460,583,10131227,2202608,305,24,12517,633,3,93145,5683,8351593,3194,27,14992,"
    "5461306,10,5652,2173,4,7046547,18,15,286181,105,142572",
    "terabyte": "9980333,36084,17217,7378,20134,3,7112,1442,61,9758201,1333352,313829,10,2208,"
    "11156,122,4,970,14,9994222,7267859,9946608,415421,12420,101,36",
}
MODELS = ("planner", "table_wise", "row_wise", "data_parallel", "uncompressed")
LEARNING_RATE = 0.01
DENSE_FEATURES = 13


def table_configs(args: argparse.Namespace, *, is_tt: bool) -> list[EmbeddingBagConfig]:
    num_embeddings = [int(rows) for rows in ROWS[args.tables].split(",")]
    smallest_tt = sorted(num_embeddings)[-args.tt_tables]
    configs = []
    for i, rows in enumerate(num_embeddings):
        common = {
            "name": f"t{i}",
            "num_embeddings": rows,
            "embedding_dim": args.dim,
            "feature_names": [f"f{i}"],
        }
        if is_tt and rows >= smallest_tt:
            configs.append(TTEmbeddingBagConfig(**common, tt_ranks=[args.tt_rank, args.tt_rank]))
        else:
            configs.append(EmbeddingBagConfig(**common))
    return configs


class Trained:
    """A sharded DLRM that steps on batches."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        is_tt = name != "uncompressed"
        configs = table_configs(args, is_tt=is_tt)
        collection = TTEmbeddingBagCollection if is_tt else EmbeddingBagCollection
        model = DLRMTrain(
            DLRM(
                embedding_bag_collection=collection(tables=configs, device="meta"),
                dense_in_features=DENSE_FEATURES,
                dense_arch_layer_sizes=[*args.dense_arch, args.dim],
                over_arch_layer_sizes=[*args.over_arch, 1],
            )
        )
        fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
        sharder = (
            TTEmbeddingBagCollectionSharder(fused_params=fused_params)
            if is_tt
            else EmbeddingBagCollectionSharder(fused_params=fused_params)
        )
        plan = self._planner(name, configs, args).collective_plan(
            model, [sharder], dist.group.WORLD
        )
        self.model = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
        )
        self.types = {
            table: sharding.sharding_type
            for module_plan in plan.plan.values()
            for table, sharding in module_plan.items()
        }
        self.tt_tables = [c.name for c in configs if isinstance(c, TTEmbeddingBagConfig)]
        self.optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
        )

    @staticmethod
    def _planner(
        name: str, configs: list[EmbeddingBagConfig], args: argparse.Namespace
    ) -> EmbeddingShardingPlanner:
        topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
        reservation = FixedPercentageStorageReservation(percentage=0.05)
        if name == "uncompressed":
            return EmbeddingShardingPlanner(
                topology=topology, batch_size=args.batch_size, storage_reservation=reservation
            )
        constraints = {}
        if name != "planner":
            types = [ShardingType[name.upper()].value]
            constraints = {
                c.name: ParameterConstraints(sharding_types=types)
                for c in configs
                if isinstance(c, TTEmbeddingBagConfig)
            }
        return tt_planner(
            topology,
            batch_size=args.batch_size,
            constraints=constraints,
            storage_reservation=reservation,
        )

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()

    def placement(self) -> str:
        """Returns how many TT tables, or all where there are none, have each sharding type."""
        types = [self.types[table] for table in self.tt_tables or self.types]
        return ", ".join(f"{types.count(t)} {t}" for t in sorted(set(types)))


def make_batch(args: argparse.Namespace, generator: torch.Generator) -> Batch:
    ids = []
    for rows in map(int, ROWS[args.tables].split(",")):
        popularity = torch.rand(args.batch_size, generator=generator, dtype=torch.float64)
        rank = torch.pow(float(rows + 1), popularity).long() - 1
        ids.append((rank.clamp_(0, rows - 1) * 2_654_435_761) % rows)
    keys = [f"f{i}" for i in range(len(ids))]
    return Batch(
        dense_features=torch.rand(args.batch_size, DENSE_FEATURES, generator=generator),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(
            keys=keys,
            values=torch.cat(ids),
            lengths=torch.ones(len(ids) * args.batch_size, dtype=torch.int64),
        ),
        labels=torch.randint(0, 2, (args.batch_size,), generator=generator),
    )


def time_steps(models: dict[str, Trained], batches: list[Batch], rounds: int) -> dict[str, float]:
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


def run_rank(rank: int, world_size: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # TorchRec's, on every rank
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    models = {name: Trained(name, args) for name in args.models}
    generator = torch.Generator().manual_seed(rank)
    batches = [make_batch(args, generator) for _ in range(args.steps)]
    times = time_steps(models, batches, args.rounds)
    if rank == 0:
        report(models, times, world_size, args)
    dist.barrier()
    dist.destroy_process_group()


def report(
    models: dict[str, Trained], times: dict[str, float], world_size: int, args: argparse.Namespace
) -> None:
    """Prints a line a model and appends its record to the JSON file."""
    records = []
    for name, milliseconds in times.items():
        placement = models[name].placement()
        ratio = milliseconds / times["uncompressed"] if "uncompressed" in times else float("nan")
        print(
            f"{args.tables:>9} {world_size:>5} {name:>13} {milliseconds:>8.1f}"
            f" {1e3 / milliseconds:>8.2f} {ratio:>13.2f}  {placement}",
            flush=True,
        )
        records.append(
            {
                "tables": args.tables,
                "ranks": world_size,
                "model": name,
                "batch_size": args.batch_size,
                "dim": args.dim,
                "tt_rank": args.tt_rank,
                "step_ms": milliseconds,
                "placement": placement,
            }
        )
    if args.json:
        with open(args.json) as file:
            records = json.load(file) + records
        with open(args.json, "w") as file:
            json.dump(records, file, indent=2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=_integers, default=[2], help="numbers of ranks, comma separated")
    add("--tables", choices=list(ROWS), default="kaggle", help="whose rows per table")
    add("--models", type=lambda text: text.split(","), default=list(MODELS), help="of these")
    add("--batch_size", type=int, default=2048, help="per rank")
    add("--dim", type=int, default=16)
    add("--tt_tables", type=int, default=7, help="how many of the largest tables are TT")
    add("--tt_rank", type=int, default=32)
    add("--dense_arch", type=_integers, default=[512, 256, 64], help="bottom MLP, without its last")
    add("--over_arch", type=_integers, default=[512, 256], help="top MLP, without its last")
    add("--steps", type=int, default=4, help="per round, each with its own batch")
    add("--rounds", type=int, default=7, help="through the models, counted")
    add("--json", help="write the records to this file")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"--models must be of {MODELS}, got {sorted(unknown)}")
    return args


def main() -> None:
    args = parse_arguments()
    if args.json:
        with open(args.json, "w") as file:
            json.dump([], file)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, batch "
        f"{args.batch_size} a rank, dim {args.dim}, {args.tt_tables} TT tables of rank "
        f"{args.tt_rank}, bottom MLP {args.dense_arch}, top MLP {args.over_arch}"
    )
    print(
        f"{'tables':>9} {'ranks':>5} {'model':>13} {'ms':>8} {'steps/s':>8} {'/uncompressed':>13}"
        "  sharding of the TT tables, or of all"
    )
    for world_size in args.ranks:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        mp.spawn(run_rank, args=(world_size, port, args), nprocs=world_size)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
