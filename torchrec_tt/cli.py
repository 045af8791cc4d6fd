"""The `torchrec-tt` command."""

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

_USERS_ERRORS: tuple[type[Exception], ...] = (ImportError, OSError, RuntimeError, ValueError)
Command = Callable[[argparse.Namespace], tuple[dict[str, Any], str | Any, int]]


def doctor(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """What is installed, and what does not fit together."""
    from torchrec_tt.doctor import diagnose

    diagnosis = diagnose()
    return dataclasses.asdict(diagnosis), diagnosis.text(), int(bool(diagnosis.problems))


def inspect(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """Shapes, parameters and bytes of a model file's tables, or of a checkpoint's cores."""
    from torchrec_tt.inspection import inspect_checkpoint, inspect_model, table_of

    path = Path(args.file)
    is_model = path.suffix in (".yaml", ".yml")
    entries = inspect_model(path) if is_model else inspect_checkpoint(path)
    total = {
        name: sum(getattr(entry, name) or 0 for entry in entries)
        for name in ("num_parameters", "num_bytes", "dense_bytes")
    }
    return (
        {"tables": [dataclasses.asdict(entry) for entry in entries], "total": total},
        table_of(entries),
        0,
    )


def plan(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """A plan for the file's cluster, with what it costs and why; needs no device of it."""
    from torchrec_tt.model_file import read_model_file

    model = read_model_file(args.file)
    module, sharders = model.module(), model.sharders()
    with _named(args.file):
        planner = model.planner()
        planner.plan(module, sharders)
    report = planner.report(module, sharders)
    return dataclasses.asdict(report), report.table(), 0


def tune(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """The best trade-offs of memory, time and error under a budget for each rank."""
    from torchrec_tt.inspection import table_of_plans
    from torchrec_tt.model_file import read_model_file
    from torchrec_tt.schema import write_yaml
    from torchrec_tt.sweep import read_records
    from torchrec_tt.tuner import CACHE_LOAD_FACTORS, TT_RANKS, quality_of_sweep
    from torchrec_tt.tuner import tune as tuned

    model = read_model_file(args.file)
    with _named(args.file):
        model.cluster.find_hardware()
    quality = None
    if args.sweep is not None:
        quality = quality_of_sweep(read_records(args.sweep), model)
    plans = tuned(
        model,
        args.budget,
        tt_ranks=args.tt_ranks or TT_RANKS,
        cache_load_factors=args.cache_load_factors or CACHE_LOAD_FACTORS,
        max_error=args.max_error,
        quality=quality,
    )
    if args.output is not None:
        best = min(plans, key=lambda plan: plan.step_ms if args.fastest else plan.error)
        choice = "the fastest" if args.fastest else "of the least error"
        write_yaml(args.output, best.model, comment=f"By torchrec-tt tune: {choice}.")
    return {"plans": [dataclasses.asdict(plan) for plan in plans]}, table_of_plans(plans), 0


def calibrate(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """Measures this machine and writes the file that --hardware and `hardware:` take."""
    import torch

    from torchrec_tt.calibrate import calibrate as measure
    from torchrec_tt.schema import write_yaml

    hardware = measure(ranks=args.ranks, name=args.name)
    write_yaml(
        args.output,
        hardware,
        comment=f"Measured by torchrec-tt calibrate --ranks {args.ranks}, torch "
        f"{torch.__version__}. Times are in ms, speeds in units per ms.",
    )
    return dataclasses.asdict(hardware), f"wrote {args.output}", 0


def compress(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """Makes a checkpoint of an uncompressed model into one with Tensor-Train tables."""
    from torchrec_tt.checkpoint_compression import (
        compress_checkpoint,
        read_compression_file,
        table_of_compressed,
    )

    def progress(table: Any) -> None:
        print(f"{table.name}: relative error {table.relative_error:.4f}", file=sys.stderr)

    file = read_compression_file(args.config)
    done = compress_checkpoint(
        args.source, args.target, file.tables, row_orders=file.orders(), on_table=progress
    )
    return {"tables": [dataclasses.asdict(table) for table in done]}, table_of_compressed(done), 0


def sweep(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """Trains the Criteo example over a grid; finished runs are not run again."""
    from torchrec_tt.schema import read_yaml
    from torchrec_tt.sweep import SweepFile, run_sweep
    from torchrec_tt.sweep_summary import summary, table_of_summary

    spec = read_yaml(args.file, SweepFile)

    def progress(number: int, count: int, settings: dict[str, Any]) -> None:
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        print(f"[{number + 1}/{count}] {words}", file=sys.stderr, flush=True)

    records = run_sweep(spec, on_run=progress)
    path = Path(spec.output_dir, "results.json")
    print(f"wrote {path}", file=sys.stderr)
    rows = summary(records)
    return {"results": records, "path": str(path), "summary": rows}, table_of_summary(rows), 0


def plot(args: argparse.Namespace) -> tuple[dict[str, Any], Any, int]:
    """Draws the results of a sweep, or what `tune --json` printed."""
    from torchrec_tt.plots import plot_sweep, plot_tuned, read_plans
    from torchrec_tt.sweep import read_records

    folder, plans = Path(args.output), read_plans(args.file)
    if plans is None:
        paths = plot_sweep(read_records(args.file), folder)
    else:
        paths = plot_tuned(plans, folder)
    return {"files": [str(path) for path in paths]}, "\n".join(map(str, paths)), 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 1 where it failed, 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    logging.disable(logging.WARNING)  # TorchRec's, on every topology and estimator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            content, text, status = args.run(args)
    except Exception as error:
        if not isinstance(error, _USERS_ERRORS + _planner_errors()):
            raise  # our own mistake
        if args.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"torchrec-tt: error: {error}", file=sys.stderr)
        return 1
    finally:
        logging.disable(logging.NOTSET)
    if args.json:
        print(json.dumps(content, indent=2, default=str))
    else:
        _show(text)
    return status


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors of what the file says begin with its name."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _planner_errors() -> tuple[type[Exception], ...]:
    """TorchRec's error, if it was imported: doctor does without TorchRec."""
    types = sys.modules.get("torchrec.distributed.planner.types")
    return () if types is None else (types.PlannerError,)


def _show(text: Any) -> None:
    if isinstance(text, str):
        print(text)
        return
    from rich.console import Console

    # Into a file or a pipe nothing knows the width; 160 columns hold a report.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchrec-tt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(run: Command) -> argparse.ArgumentParser:
        words = (run.__doc__ or "").strip().split("\n")[0]
        command = commands.add_parser(
            run.__name__,
            help=words,
            description=words,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        return command

    add(doctor)
    add(inspect).add_argument("file", help="a model file (.yaml), a checkpoint folder, or a .pt")
    add(plan).add_argument("file", help="a model file (.yaml), see docs/planner.md")
    tuning = add(tune)
    tuning.add_argument("file", help="a model file (.yaml)")
    tuning.add_argument(
        "--budget", type=_bytes, required=True, help="for the tables on a rank, such as 20MB"
    )
    tuning.add_argument("--tt_ranks", type=_list(int), help="to choose from, comma separated")
    tuning.add_argument("--cache_load_factors", type=_list(float), help="to choose from; 0: none")
    tuning.add_argument("--max_error", type=float, default=float("inf"), help="of the model")
    tuning.add_argument("--sweep", help="results.json of a sweep, to correct the error")
    tuning.add_argument(
        "--output", type=_new_file, help="write the plan of the least error as a model file"
    )
    tuning.add_argument("--fastest", action="store_true", help="write the fastest plan instead")
    calibration = add(calibrate)
    calibration.add_argument(
        "--output", type=_new_file, default="hardware.yaml", help="the file to write"
    )
    calibration.add_argument("--ranks", type=int, default=2, help="processes of this machine")
    calibration.add_argument("--name", default="this machine", help="of the hardware")
    compression = add(compress)
    compression.add_argument("source", help="a checkpoint folder, or a file of torch.save")
    compression.add_argument("target", help="the checkpoint to write, of the same kind")
    compression.add_argument("--config", required=True, help="which tables, and how (.yaml)")
    add(sweep).add_argument("file", help="a sweep file (.yaml), see docs/planner.md")
    plotting = add(plot)
    plotting.add_argument("file", help="results.json of a sweep, or the output of tune --json")
    plotting.add_argument("--output", default=".", help="the folder to write to")
    return parser


def _bytes(text: str) -> int:
    digits = text.rstrip("BbGgIiKkMm")
    unit = text[len(digits) :].lower()
    try:
        value = float(digits) * _UNITS[unit]
        value = int(value)
    except (KeyError, OverflowError, ValueError):  # inf and nan are no integers
        raise argparse.ArgumentTypeError(f"must be like 20MB or 1.5GiB, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
    return value


def _new_file(text: str) -> str:
    if not text or Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return text


def _list(kind: type) -> Callable[[str], list]:
    def parse(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from None

    return parse


if __name__ == "__main__":
    sys.exit(main())
