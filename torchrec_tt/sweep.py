"""Trains the Criteo example over a grid of settings, one run after the other, and resumes."""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchrec_tt.schema import (
    Count,
    NumBytes,
    Positive,
    PositiveInt,
    Share,
    check_fields,
    parse,
    read_json,
)
from torchrec_tt.sweep_summary import CHANGE_UNCOMPRESSED


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFile:
    """What a sweep file has: factors as lists of values, and what all runs have in common.

    A factor whose list is left empty is not varied, and the example's default holds.

    Attributes:
        output_dir: a folder for each run, and `results.json`.
        script: the example's `train.py`.
        data: its `--data`.
        tt_ranks: of the TT tables.
        tt_tables: how many of the largest tables are TT.
        cache_load_factors: of their row caches; 0 is none.
        embedding_dims: columns of each table.
        compressions: of those tables: "tt", or what it is compared with (`--compression`).
        tt_inits: what the cores are drawn from.
        tt_row_strategies: "balanced" or "fast" row factors.
        seeds: of the first weights, and of made rows.
        vary: "all": every combination of the lists is a run. "one": the first values of all lists
            are a run, and others differ from it in one factor; each number of TT tables and each
            dimension has a run of compression "none" beside it, if that is listed. With every seed.
        processes: ranks of a run.
        arguments: more flags of the example, for every run, such as "--adagrad".
        compare_dense: whether each run trains the uncompressed model too.
        timeout_seconds: of one run.

    Raises:
        ValueError: for a value that its annotation does not allow, or a grid without a run.
    """

    output_dir: str
    script: str = "examples/criteo/train.py"
    data: str = "made"
    tt_ranks: list[PositiveInt] = field(default_factory=lambda: [8, 16, 32, 64])
    tt_tables: list[Count] = field(default_factory=lambda: [3, 5, 7])
    cache_load_factors: list[Share] = field(default_factory=lambda: [0.0])
    embedding_dims: list[PositiveInt] = field(default_factory=list)
    compressions: list[str] = field(default_factory=list)
    tt_inits: list[str] = field(default_factory=list)
    tt_row_strategies: list[str] = field(default_factory=list)
    seeds: list[Count] = field(default_factory=lambda: [0])
    vary: Literal["all", "one"] = "all"
    processes: PositiveInt = 2
    arguments: list[str] = field(default_factory=list)
    compare_dense: bool = False
    timeout_seconds: Positive = 3600.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tt_ranks", "tt_tables", "cache_load_factors", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must have an entry, got []")

    def settings(self) -> Iterator[dict[str, Any]]:
        """Returns the settings of each run."""
        factors: dict[str, list[Any]] = {
            "tt_rank": self.tt_ranks,
            "tt_tables": self.tt_tables,
            "cache_load_factor": self.cache_load_factors,
            "embedding_dim": self.embedding_dims,
            "compression": self.compressions,
            "tt_init": self.tt_inits,
            "tt_row_strategy": self.tt_row_strategies,
        }
        factors = {name: values for name, values in factors.items() if values}
        if self.vary == "one":
            points = _one_at_a_time(factors)
        else:
            points = [
                dict(zip(factors, p, strict=True)) for p in itertools.product(*factors.values())
            ]
        for point, seed in itertools.product(points, self.seeds):
            yield {**point, "seed": seed}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """What `plot` and `tune` read of a run in `results.json`.

    Attributes:
        tt_rank: of the TT tables.
        tt_tables: how many there are.
        cache_load_factor: of their row caches; 0 is none.
        compression: "tt", or what is in place of the TT tables.
        embedding_dim: columns of each table.
        tt_init: what the cores are drawn from.
        tt_row_strategy: "balanced" or "fast" row factors.
        seed: of the first weights.
        embedding_bytes: of all tables.
        row_caches: by table, "bytes" and what its cache counted.
        logloss: held out.
        samples_per_second: of the training.
        dense_logloss: of the uncompressed model, where that was trained too.
        dense_samples_per_second: of its training.
    """

    tt_rank: PositiveInt
    tt_tables: Count
    embedding_bytes: NumBytes
    logloss: Positive
    samples_per_second: Positive
    cache_load_factor: Share = 0.0
    compression: str = "tt"
    embedding_dim: PositiveInt | None = None
    tt_init: str | None = None
    tt_row_strategy: str | None = None
    seed: Count | None = None
    row_caches: dict[str, dict[str, float]] | None = None
    dense_logloss: Positive | None = None
    dense_samples_per_second: Positive | None = None


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Returns the runs of `results.json`, or of what `torchrec-tt sweep --json` printed.

    Raises:
        ValueError: for a file that is neither, has no run, or a run without what `SweepRecord` has.
        OSError: for a file that cannot be read.
    """
    content = read_json(path)
    records = content.get("results") if isinstance(content, dict) else content
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path} must have runs of a sweep, got {str(content)[:80]}")
    try:
        runs = [
            parse(record, SweepRecord, where=f"run {i}", is_open=True)
            for i, record in enumerate(records)
        ]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return [
        {name: value for name, value in dataclasses.asdict(run).items() if value is not None}
        for run in runs
    ]


def run_sweep(
    sweep: SweepFile, *, on_run: Callable[[int, int, dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Trains what is not trained yet and returns a record for each run, its settings and metrics.

    A run's folder is named by its settings, and a finished one has the example's `metrics.json`
    and the command that made it: the same command is not run again. `results.json`, and the same a
    line a run as `results.jsonl`, are written after every run.

    Args:
        sweep: the grid.
        on_run: called before each run with its number, the number of runs and its settings.

    Raises:
        RuntimeError: if a run fails or takes too long; what it wrote is in `log.txt` of its folder.
        ValueError: if the script is not there.
    """
    if not Path(sweep.script).is_file():
        raise ValueError(f"script must be the example's train.py, got {sweep.script!r}")
    folder = Path(sweep.output_dir)
    all_settings = list(sweep.settings())
    records = []
    for i, settings in enumerate(all_settings):
        if on_run is not None:
            on_run(i, len(all_settings), settings)
        records.append({**settings, **_run(sweep, settings, folder)})
        (folder / "results.json").write_text(json.dumps(records, indent=2) + "\n")
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "results.jsonl").write_text(lines)
    return records


def _one_at_a_time(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    centre = {name: values[0] for name, values in factors.items()}
    points = [centre]
    for name, values in factors.items():
        for value in values[1:]:
            points.append({**centre, name: value})
            if name in CHANGE_UNCOMPRESSED and "none" in factors.get("compression", []):
                points.append({**centre, name: value, "compression": "none"})
    return points


def _run(sweep: SweepFile, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    own = folder / "_".join(f"{name}={value}" for name, value in settings.items())
    command = _command(sweep, settings, own)
    metrics, made_by = own / "metrics.json", own / "command.json"
    if metrics.is_file() and made_by.is_file() and read_json(made_by) == command:
        return read_json(metrics)
    own.mkdir(parents=True, exist_ok=True)
    made_by.unlink(missing_ok=True)
    with (own / "log.txt").open("w") as log:
        try:
            run = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=sweep.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"a run must end within {sweep.timeout_seconds} s, {own.name} did not; see "
                f"{own / 'log.txt'}"
            ) from None
    if run.returncode or not metrics.is_file():
        raise RuntimeError(f"{own.name} ended with {run.returncode}; see {own / 'log.txt'}")
    made_by.write_text(json.dumps(command))
    return read_json(metrics)


def _command(sweep: SweepFile, settings: dict[str, Any], own: Path) -> list[str]:
    """The training's command; the launcher is torch's, in this interpreter."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(sweep.processes), sweep.script]
    command += ["--data", sweep.data, "--output_dir", str(own)]
    for name, value in settings.items():
        if name != "cache_load_factor":
            command += [f"--{name}", str(value)]
        elif value:
            command += ["--tt_cache", str(value)]
    return [*command, *(["--compare_dense"] if sweep.compare_dense else []), *sweep.arguments]
