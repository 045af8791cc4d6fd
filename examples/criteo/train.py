"""Trains TorchRec's DLRM on Criteo rows with its largest tables in Tensor-Train (TT) form.

    torchrun --standalone --nproc_per_node 2 examples/criteo/train.py --data FILE
    python examples/criteo/train.py

FILE is a Criteo TSV, plain or gzip; without it rows are made up (see made_rows.py). Writes
`metrics.json` under --output_dir. See flags.py for the flags.
"""

import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import rich.console
import torch
import torch.distributed as dist
from baselines import quantize_int4_
from checkpoints import CheckpointError, Progress, restore, save
from data import CriteoDataset
from files import naming
from flags import PAPER_BATCH_SIZE, Flags, parse_args
from job import (
    Model,
    compressed_tables,
    dense_tables,
    model_of,
    open_rows,
    optimizer_config,
    plan,
    tables,
    trained_tables,
)
from log import Log, check_writable
from loop import RowsError, Training, evaluate, global_batch_size, train
from model import Planned, shard, sharding_types
from process_group import init_process_group
from profiling import profiled
from report import (
    Quality,
    embedding_report,
    peak_memory_bytes,
    row_cache_report,
    run_line,
    summary,
    without_nan,
)
from schedule import Schedule
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.elastic.multiprocessing.errors import record
from torchrec.distributed.planner.types import PlannerError

_WIDTH_OF_LOG = 160  # where nothing knows the width; it holds a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a model; its quality is that on the test rows."""

    progress: Progress
    sharding_types: dict[str, str]
    row_caches: dict[str, dict[str, float]]
    quality: Quality


@record
def main(argv: Sequence[str] | None = None) -> None:
    flags = parse_args(argv)
    _quiet_libraries()
    init_process_group()
    if flags.batch_size is None:
        batch_size = max(1, PAPER_BATCH_SIZE // dist.get_world_size())
        flags = dataclasses.replace(flags, batch_size=batch_size)
    try:
        if flags.compression not in ("tt", "none") and dist.get_world_size() > 1:
            raise ValueError(
                f"--compression {flags.compression} must run on one rank, "
                f"got {dist.get_world_size()}"
            )
        configs = tables(flags)
        if flags.plan_only:
            _show(plan(flags, trained_tables(flags, configs)))
            dist.destroy_process_group()
            return
        for folder in (flags.output_dir, flags.checkpoint_dir):
            if folder is not None:
                check_writable(Path(folder))
        log = Log(flags.tensorboard_dir)
        rows = open_rows(flags, configs)
        trained = trained_tables(flags, configs)
        models = [model_of(flags, trained, rows=rows)]
        if flags.compare_dense:
            models.append(model_of(flags, dense_tables(configs), rows=rows, name="dense"))
    except (ValueError, OSError, PlannerError) as error:
        _exit(error)
    try:
        metrics = run(flags, models, rows=rows, log=log)
        if dist.get_rank() == 0:
            _report(flags, metrics)
    except (PlannerError, FloatingPointError, RowsError, CheckpointError, OSError) as error:
        _exit(error)
    log.close()
    dist.destroy_process_group()


def run(flags: Flags, models: list[Model], *, rows: CriteoDataset, log: Log) -> dict[str, Any]:
    """Trains and tests the models one after the other and returns the metrics.

    Raises:
        PlannerError: if the tables do not fit the ranks.
        FloatingPointError: if the loss is not finite.
        RowsError: if rows cannot be read.
        CheckpointError: if a checkpoint cannot be read or written.
        OSError: if a file cannot be written.
    """
    if dist.get_rank() == 0:
        (Path(flags.output_dir) / "metrics.json").unlink(missing_ok=True)
    log.line(run_line(flags, rows))
    if rows.missing_days:
        log.line(f"warning: {flags.data} has a gap, no days {rows.missing_days}")
    outcome = train_and_test(flags, models[0], rows=rows, log=log)
    metrics = {
        "ranks": dist.get_world_size(),
        "global_batch_size": global_batch_size(flags),
        "optimizer": "Adagrad" if flags.adagrad else "SGD",
        "learning_rate": flags.learning_rate,
        **{f"{split}_rows": rows.num_rows(split) for split in ("train", "val", "test")},
        "quality_split": "test",
        **({} if rows.best_auroc is None else {"best_auroc": rows.best_auroc}),
        **_scores(outcome),
        "validations": outcome.progress.validations,
        "compression": flags.compression,
        **embedding_report(
            models[0].stored, outcome.sharding_types, dense_configs=models[0].configs
        ),
        "peak_memory_bytes": peak_memory_bytes(),
        **({"row_caches": outcome.row_caches} if outcome.row_caches else {}),
    }
    for model in models[1:]:
        log.line("then the uncompressed model")
        dense = _scores(train_and_test(flags, model, rows=rows, log=log))
        metrics |= {f"dense_{name}": value for name, value in dense.items()}
        metrics["time_ratio"] = dense["samples_per_second"] / metrics["samples_per_second"]
    return metrics


def train_and_test(flags: Flags, model: Model, *, rows: CriteoDataset, log: Log) -> Outcome:
    """Trains a model from its checkpoint, or from the start, and tests it.

    Raises:
        as `run`.
    """
    torch.manual_seed(flags.seed)
    saved = model.saved
    planned = plan(
        flags, model.configs, fixed_types=None if saved is None else saved.sharding_types
    )
    if flags.print_sharding_plan:
        _show(planned)
    sharded, optimizer = shard(planned, optimizer=optimizer_config(flags))
    progress = Progress()
    if saved is not None:
        progress = restore(saved, model=sharded, optimizer=optimizer)
        log.line(f"resumed from {saved.path}: epoch {progress.epoch}, row {progress.row}")
    types = sharding_types(sharded)
    training = Training(
        flags=flags,
        rows=rows,
        model=sharded,
        optimizer=optimizer,
        schedule=Schedule(
            base_rate=flags.learning_rate,
            warmup_steps=flags.lr_warmup_steps,
            decay_start=flags.lr_decay_start,
            decay_steps=flags.lr_decay_steps,
        ),
        progress=progress,
        log=log,
    )
    if model.folder is not None:
        training.save = lambda: save(
            model.folder,
            model=sharded,
            optimizer=optimizer,
            progress=progress,
            settings=model.settings,
            sharding_types=types,
            keep=flags.keep_checkpoints,
        )
    trace = None
    if flags.profile:
        trace = Path(flags.output_dir) / (
            f"{model.name}_trace.json" if model.name else "trace.json"
        )
    with profiled(trace) as training.profiler:
        train(training)
    if flags.compression == "int4":
        _quantize_int4(sharded, compressed_tables(tables(flags)))
    return Outcome(
        progress=progress,
        sharding_types=types,
        row_caches=row_cache_report(sharded),
        quality=evaluate(training, "test", limit=flags.limit_test_batches),
    )


def _report(flags: Flags, metrics: dict[str, Any]) -> None:
    """Prints the summary and writes `metrics.json`."""
    metrics = {"data": flags.data, **metrics}
    print(summary(metrics), flush=True)
    path = Path(flags.output_dir) / "metrics.json"
    text = json.dumps(without_nan(metrics), indent=2, allow_nan=False)
    with naming(path):
        path.write_text(text + "\n")


def _scores(outcome: Outcome) -> dict[str, Any]:
    """Returns what can be compared between two models of a run."""
    progress = outcome.progress
    return {
        "steps": progress.step,
        **dataclasses.asdict(outcome.quality),
        "samples_per_second": progress.rows_trained / progress.seconds,
        "data_wait_ratio": progress.wait_seconds / progress.seconds,
    }


def _quantize_int4(model: nn.Module, names: list[str]) -> None:
    for key, value in model.state_dict().items():
        if any(key.endswith(f".embedding_bags.{name}.weight") for name in names):
            shards = value.local_shards() if isinstance(value, ShardedTensor) else []
            for weight in [shard.tensor for shard in shards] or [value]:
                quantize_int4_(weight)


def _show(planned: Planned) -> None:
    """Prints the plan on rank 0."""
    if planned.report is not None:
        width = None if sys.stdout.isatty() else _WIDTH_OF_LOG
        rich.console.Console(width=width).print(planned.report.table())
        sys.stdout.flush()


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


if __name__ == "__main__":
    main()
