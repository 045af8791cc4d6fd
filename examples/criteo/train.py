"""Trains TorchRec's DLRM on Criteo rows with its largest tables in Tensor-Train (TT) form.

    torchrun --standalone --nproc_per_node 2 examples/criteo/train.py --data FILE
    python examples/criteo/train.py

FILE is a Criteo TSV, plain or gzip; without it rows are made up (see made_rows.py). Writes
`metrics.json` under --output_dir. Flags have the names and meanings of facebookresearch/dlrm's
dlrm_main.py where it has them.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from blocks import Split
from data import KAGGLE_NUM_EMBEDDINGS, CriteoDataset, made_dataset, open_dataset
from model import (
    OptimizerConfig,
    configs_of_file,
    largest_columns,
    sharded_dlrm,
    sharding_types,
    table_configs,
)
from report import Quality, embedding_report, measure, peak_memory_bytes, row_cache_report
from torch.distributed.elastic.multiprocessing.errors import record
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from tqdm import tqdm

from torchrec_tt import RowCacheConfig

MADE = "made"
_PAPER_BATCH_SIZE = 128  # over all ranks
_CHECK_STEPS = 50  # the loss is looked at over all ranks this often
_MADE_SIGNAL_COLUMNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one model."""

    steps: int
    samples_per_second: float
    sharding_types: dict[str, str]
    row_caches: dict[str, dict[str, float]]
    quality: Quality


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags; exits with one line for what they cannot be."""
    parser = argparse.ArgumentParser(
        description="Train a DLRM with Tensor-Train tables on Criteo rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", default=MADE, help=f"a Criteo TSV, plain or gzip, or '{MADE}' for made-up rows")
    add("--made_rows", type=_positive, default=350_000, help="how many rows to make up")
    add("--output_dir", type=Path, default=Path("runs/criteo"), help="where metrics.json goes")
    add("--epochs", type=_positive, default=1, help="passes through the training rows")
    add("--batch_size", type=_positive, help="training rows per rank and step; default 128 / ranks")
    add("--test_batch_size", type=_positive, default=1024, help="test rows per rank and step")
    add("--learning_rate", type=_positive_float, default=0.1, help="of every parameter")
    add("--adagrad", action="store_true", help="Adagrad in place of SGD")
    add("--seed", type=int, default=0, help="of the made rows and of the first weights")
    add("--embedding_dim", type=_positive, default=16, help="columns of each table")
    add(
        "--num_embeddings_per_feature",
        type=_int_list,
        default=list(KAGGLE_NUM_EMBEDDINGS),
        help="rows of each of the 26 tables, comma separated; default: Criteo Kaggle's",
    )
    add("--dense_arch_layer_sizes", type=_int_list, default=[512, 256, 64, 16], help="bottom MLP")
    add("--over_arch_layer_sizes", type=_int_list, default=[512, 256, 1], help="top MLP")
    add("--tt_tables", type=int, default=7, help="how many of the largest tables are TT")
    add("--tt_rank", type=_positive, default=32, help="every inner rank of a TT table")
    add("--tt_cores", type=int, choices=(2, 3, 4), default=3, help="cores of a TT table")
    add("--tt_cache", type=_ratio, help="part of a TT table's rows to cache on each rank; none")
    add("--tables", type=Path, help="a file of torchrec-tt tune in place of --tt_* and the rows")
    add("--freeze_tt", action="store_true", help="leave the TT cores as initialised")
    add("--compare_dense", action="store_true", help="then train the uncompressed model too")
    args = parser.parse_args(argv)
    num_tables = len(KAGGLE_NUM_EMBEDDINGS)
    if len(args.num_embeddings_per_feature) != num_tables:
        parser.error(
            f"--num_embeddings_per_feature must have {num_tables} entries, "
            f"got {len(args.num_embeddings_per_feature)}"
        )
    if not 1 <= args.tt_tables <= num_tables:
        parser.error(f"--tt_tables must be 1 to {num_tables}, got {args.tt_tables}")
    if args.dense_arch_layer_sizes[-1] != args.embedding_dim:
        parser.error(
            f"--dense_arch_layer_sizes must end in --embedding_dim {args.embedding_dim}, "
            f"got {args.dense_arch_layer_sizes}"
        )
    if len(args.over_arch_layer_sizes) < 2 or args.over_arch_layer_sizes[-1] != 1:
        parser.error(
            f"--over_arch_layer_sizes must have two layers or more and end in 1, "
            f"got {args.over_arch_layer_sizes}"
        )
    return args


@record
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    _quiet_libraries()
    _init_process_group()
    try:
        configs, file, made = prepare(args)
    except (ValueError, OSError) as error:
        _exit(error)
    try:
        metrics = run(args, configs=configs, file=file)
    except (PlannerError, FloatingPointError) as error:
        _exit(error)
    if dist.get_rank() == 0:
        metrics = {"ranks": dist.get_world_size(), "data": args.data, **made, **metrics}
        print(_summary(metrics))
        (args.output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    dist.destroy_process_group()


def prepare(
    args: argparse.Namespace,
) -> tuple[list[EmbeddingBagConfig], CriteoDataset, dict[str, float]]:
    """Returns the tables, the checked rows, and what is known of them if they are made up.

    Raises:
        ValueError: for rows or sizes that cannot be trained on; the same on every rank.
        OSError: for files that cannot be read or written.
    """
    if args.batch_size is None:
        args.batch_size = max(1, _PAPER_BATCH_SIZE // dist.get_world_size())
    if args.tables is not None:
        configs = configs_of_file(args.tables, embedding_dim=args.embedding_dim)
        args.num_embeddings_per_feature = [config.num_embeddings for config in configs]
    tt_columns = largest_columns(args.num_embeddings_per_feature, count=args.tt_tables)
    if args.tables is None:
        configs = table_configs(
            args.num_embeddings_per_feature,
            embedding_dim=args.embedding_dim,
            tt_columns=tt_columns,
            tt_ranks=[args.tt_rank] * (args.tt_cores - 1),
            cache=None if args.tt_cache is None else RowCacheConfig(load_factor=args.tt_cache),
        )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=args.output_dir):  # before hours of training, not after
        pass
    if dist.get_rank() == 0:
        (args.output_dir / "metrics.json").unlink(missing_ok=True)
    if args.data != MADE:
        return (
            configs,
            open_dataset(Path(args.data), num_embeddings=args.num_embeddings_per_feature),
            {},
        )
    rows = made_dataset(
        args.made_rows,
        num_embeddings=args.num_embeddings_per_feature,
        signal_columns=tt_columns[-_MADE_SIGNAL_COLUMNS:],
        seed=args.seed,
    )
    return configs, rows, {"best_auroc": rows.best_auroc}


def run(
    args: argparse.Namespace, *, configs: list[EmbeddingBagConfig], file: CriteoDataset
) -> dict[str, Any]:
    """Trains and tests the model, then the uncompressed one if asked, and returns the metrics.

    Raises:
        PlannerError: if the tables do not fit the ranks.
        FloatingPointError: if the loss is not finite.
    """
    outcome = train_and_evaluate(configs, file=file, args=args)
    metrics = {
        "train_rows": file.num_rows("train"),
        "test_rows": file.num_rows("test"),
        "steps": outcome.steps,
        **dataclasses.asdict(outcome.quality),
        **embedding_report(configs, outcome.sharding_types),
        "peak_memory_bytes": peak_memory_bytes(),
        "samples_per_second": outcome.samples_per_second,
        **({"row_caches": outcome.row_caches} if outcome.row_caches else {}),
    }
    if args.compare_dense:
        configs = table_configs(args.num_embeddings_per_feature, embedding_dim=args.embedding_dim)
        outcome = train_and_evaluate(configs, file=file, args=args)
        metrics |= {
            "dense_auroc": outcome.quality.auroc,
            "dense_logloss": outcome.quality.logloss,
            "dense_samples_per_second": outcome.samples_per_second,
        }
    return metrics


def train_and_evaluate(
    configs: list[EmbeddingBagConfig], *, file: CriteoDataset, args: argparse.Namespace
) -> Outcome:
    """Trains a DLRM of these tables on the file's training rows and tests it on the rest."""
    torch.manual_seed(args.seed)
    model, optimizer = sharded_dlrm(
        configs,
        dense_arch_layer_sizes=args.dense_arch_layer_sizes,
        over_arch_layer_sizes=args.over_arch_layer_sizes,
        batch_size=args.batch_size,
        optimizer=OptimizerConfig(
            learning_rate=args.learning_rate, adagrad=args.adagrad, freeze_tt=args.freeze_tt
        ),
        is_planned_freely=args.tables is not None,
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    start = time.perf_counter()
    steps = sum(
        train_epoch(pipeline, file=file, args=args, epoch=epoch) for epoch in range(args.epochs)
    )
    seconds = time.perf_counter() - start
    model.eval()
    return Outcome(
        steps=steps,
        samples_per_second=args.epochs * file.num_rows("train") / seconds,
        sharding_types=sharding_types(model),
        row_caches=row_cache_report(model),
        quality=evaluate(pipeline, file=file, args=args),
    )


def train_epoch(
    pipeline: TrainPipelineSparseDist, *, file: CriteoDataset, args: argparse.Namespace, epoch: int
) -> int:
    """Trains on every training row once and returns the number of steps.

    Raises:
        FloatingPointError: if the loss is not finite; on every rank.
    """
    batches = _batches(file, "train", args=args, batch_size=args.batch_size)
    num_steps = file.num_batches(
        "train", batch_size=args.batch_size, world_size=dist.get_world_size()
    )
    sum_losses = torch.zeros(())
    with _progress_bar(num_steps, description=f"epoch {epoch}") as bar:
        for step in range(1, num_steps + 1):
            loss, _, _ = pipeline.progress(batches)
            sum_losses += loss
            if step % _CHECK_STEPS == 0 or step == num_steps:
                dist.all_reduce(sum_losses)
                if not sum_losses.isfinite():
                    raise FloatingPointError(
                        f"loss must be finite, got {sum_losses.item()} by step {step} of epoch "
                        f"{epoch}: try a smaller --learning_rate than {args.learning_rate}"
                    )
                num_losses = dist.get_world_size() * (step % _CHECK_STEPS or _CHECK_STEPS)
                bar.set_postfix(loss=f"{sum_losses.item() / num_losses:.4f}", refresh=False)
                sum_losses.zero_()
            bar.update()
    return num_steps


@torch.no_grad()
def evaluate(
    pipeline: TrainPipelineSparseDist, *, file: CriteoDataset, args: argparse.Namespace
) -> Quality:
    """Returns the quality of the predictions for all test rows."""
    batches = _batches(file, "test", args=args, batch_size=args.test_batch_size)
    num_steps = file.num_batches(
        "test", batch_size=args.test_batch_size, world_size=dist.get_world_size()
    )
    outputs = []
    with _progress_bar(num_steps, description="test") as bar:
        for _ in range(num_steps):
            _, logits, labels = pipeline.progress(batches)
            outputs.append(torch.stack([logits, labels.float()]))
            bar.update()
    local = torch.cat(outputs, dim=1)  # [2, rows of a rank]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    # Rows went to the ranks in turn, and a rank with a row less has its last one twice.
    logits, labels = torch.stack(parts, dim=2).flatten(1)[:, : file.num_rows("test")]
    return measure(logits, labels.long())


def _init_process_group() -> None:
    """Joins the ranks that torchrun started; without torchrun this process is the only one."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _quiet_libraries() -> None:
    """Drops warnings of torch and TorchRec that no user of this script can act on."""
    for logger in (logging.getLogger(), logging.getLogger("torch.fx")):
        logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch")
    # FBGEMM's CPU operator differentiates itself, in C++ and out of the dispatcher's sight.
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")


def _exit(error: Exception) -> NoReturn:
    """Ends this rank with one line, written at once lest the ranks' lines mix."""
    sys.stderr.write(f"train.py: error: {error}\n")
    sys.stderr.flush()
    dist.destroy_process_group()
    sys.exit(1)


def _batches(
    file: CriteoDataset, split: Split, *, args: argparse.Namespace, batch_size: int
) -> Iterator[Batch]:
    return file.batches(
        split,
        batch_size=batch_size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )


def _progress_bar(num_steps: int, *, description: str) -> tqdm:
    """Returns a bar on rank 0's terminal, and a silent one elsewhere and in logs."""
    is_silent = dist.get_rank() != 0 or not sys.stderr.isatty()
    return tqdm(total=num_steps, desc=description, unit="step", mininterval=1, disable=is_silent)


def _summary(metrics: dict[str, Any]) -> str:
    """Returns one line that says how good, and against what."""
    low, high = metrics["auroc_interval"]
    parts = [f"AUROC {metrics['auroc']:.4f} ({low:.4f} to {high:.4f})"]
    if "best_auroc" in metrics:
        parts.append(f"best reachable {metrics['best_auroc']:.4f}")
    parts.append(f"logloss {metrics['logloss']:.4f}")
    parts.append(f"normalized entropy {metrics['normalized_entropy']:.4f}")
    parts.append(f"base rate {metrics['base_rate']:.4f}")
    if "dense_auroc" in metrics:
        parts.append(
            f"uncompressed model {metrics['dense_auroc']:.4f} and {metrics['dense_logloss']:.4f}"
        )
    parts.append(f"embeddings {metrics['compression_ratio']:.1f}x smaller")
    if "row_caches" in metrics:
        hits, misses = (
            sum(table[name] for table in metrics["row_caches"].values())
            for name in ("hits", "misses")
        )
        parts.append(f"{100 * hits / max(1, hits + misses):.1f} % of TT lookups cached")
    parts.append(f"{metrics['samples_per_second']:.0f} samples/s")
    return ", ".join(parts)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _ratio(text: str) -> float:
    value = _positive_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1), got {text}")
    return value


def _int_list(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
