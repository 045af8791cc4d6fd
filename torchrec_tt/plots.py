"""Pictures of what `sweep` measured and `tune` predicts: memory against quality and time."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_tt.schema import NonNegative, NumBytes, Positive, parse, read_json
from torchrec_tt.sweep_summary import CHANGE_UNCOMPRESSED, cache_bytes, loss_ratios

_OVER = "logloss_over_uncompressed"
_MARKERS = "osD^vP*X"
_SIZE = (6.4, 4.8)  # inches
_MAX_LABELLED = 3  # lines whose points have labels; those of more lie over each other


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """What is drawn of a plan that `tune` found; see `TunedPlan`."""

    rank_bytes: NumBytes
    step_ms: Positive
    error: NonNegative


def read_plans(path: str | Path) -> list[dict[str, Any]] | None:
    """Returns the plans that `torchrec-tt tune --json` printed; None for a file of another kind.

    Raises:
        ValueError: for a file that is no JSON, has no plan, or a plan without what `PlanPoint` has.
        OSError: for a file that cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict) or "plans" not in content:
        return None
    plans = content["plans"]
    if not isinstance(plans, list) or not plans:
        raise ValueError(f"{path}: plans must be a list with an entry, got {str(plans)[:80]}")
    try:
        return [
            dataclasses.asdict(parse(plan, PlanPoint, where=f"plans[{i}]", is_open=True))
            for i, plan in enumerate(plans)
        ]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def plot_sweep(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draws memory, row caches included, against logloss and against speed.

    Logloss is drawn over that of the uncompressed run of the same seed, tables and dimension where
    each run has one beside it. A line is of one number of TT tables and one cache; where dimension,
    initialisation or row factors are not the first run's, it is of those too.

    Args:
        records: of `results.json`.
        folder: where `sweep_logloss` and `sweep_speed` go, as .png and .svg.

    Returns:
        The files.

    Raises:
        ValueError: without records.
    """
    if not records:
        raise ValueError("records must have a run, got none")
    paths = []
    loss: tuple[str, ...] = ("logloss", "held-out logloss", "dense_logloss")
    ratios = loss_ratios(records)
    if None not in ratios:
        percents = [100 * ratio for ratio in ratios if ratio is not None]
        records = [{**r, _OVER: x} for r, x in zip(records, percents, strict=True)]
        loss = (_OVER, "held-out logloss over uncompressed (%)", "")
    for name, key, label, dense_key in (
        ("sweep_logloss", *loss),
        ("sweep_speed", "samples_per_second", "samples per second", "dense_samples_per_second"),
    ):
        figure, axes = _axes("embedding tables and row caches (MB, log scale)", label)
        axes.set_title("Criteo: memory of the tables and what it buys", fontsize="medium")
        lines = _lines(records, key)
        are_few = sum("TT" in title for title in lines) <= _MAX_LABELLED
        for marker, (title, points) in zip(itertools.cycle(_MARKERS), lines.items(), strict=False):
            x, mean, low, high, ranks = zip(*points, strict=True)
            all_ranks = "" if are_few or "TT" not in title else f", rank {_joined(ranks)}"
            axes.plot(x, mean, marker=marker, label=title + all_ranks)
            axes.fill_between(x, low, high, alpha=0.15)
            for place, rank in zip(zip(x, mean, strict=True), ranks, strict=True):
                axes.annotate(
                    f"rank {rank}" if "TT" in title and are_few else "",
                    place,
                    xytext=(5, 5),
                    textcoords="offset points",
                    fontsize="x-small",
                )
        dense = [record[dense_key] for record in records if dense_key in record]
        dense += [record[key] for record in records if _is_first_dense(record, records[0])]
        if dense:
            mean = sum(dense) / len(dense)
            axes.axhline(mean, color="black", linestyle="--", label="uncompressed")
        note = "mean over seeds, shaded from least to most" if _has_seeds(records) else None
        figure.legend(
            loc="outside lower center",
            ncols=2,
            title=note,
            fontsize="small",
            title_fontsize="x-small",
        )
        paths += _save(figure, folder / name)
    return paths


def plot_tuned(plans: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draws the frontier: memory of a rank against predicted time and against the error.

    Args:
        plans: what `torchrec-tt tune --json` prints under `plans`.
        folder: where `tuned_time` and `tuned_error` go, as .png and .svg.

    Returns:
        The files.

    Raises:
        ValueError: without plans.
    """
    if not plans:
        raise ValueError("plans must have a plan, got none")
    paths = []
    for name, key, label, other, other_label in (
        ("tuned_time", "step_ms", "predicted time of a step (ms)", "error", "error of the plan"),
        ("tuned_error", "error", "error (see docs/planner.md)", "step_ms", "predicted ms a step"),
    ):
        figure, axes = _axes("tables on the fullest rank (MB, log scale)", label)
        axes.set_title("The best trade-offs that tune found", fontsize="medium")
        drawn = axes.scatter(
            [plan["rank_bytes"] / 1e6 for plan in plans],
            [plan[key] for plan in plans],
            c=[plan[other] for plan in plans],
            cmap="viridis",
            edgecolors="black",
            linewidths=0.5,
        )
        figure.colorbar(drawn, ax=axes, label=other_label)
        paths += _save(figure, folder / name)
    return paths


def _axes(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")  # 0.1, not a power of ten
    axes.margins(x=0.12)
    axes.grid(alpha=0.3)
    return figure, axes


def _lines(
    records: Sequence[Mapping[str, Any]], key: str
) -> dict[str, list[tuple[float, float, float, float, int]]]:
    """MB, mean, least and most over seeds, TT rank; by what a line is of."""
    groups: dict[str, dict[tuple[float, int], list[float]]] = {}
    for record in records:
        title = _title(record, first=records[0])
        if title == "none":
            continue
        num_bytes = record["embedding_bytes"] + cache_bytes(record)
        place = (num_bytes / 1e6, record["tt_rank"])
        groups.setdefault(title, {}).setdefault(place, []).append(record[key])
    return {
        title: [
            (x, sum(y) / len(y), min(y), max(y), rank) for (x, rank), y in sorted(points.items())
        ]
        for title, points in groups.items()
    }


def _title(record: Mapping[str, Any], *, first: Mapping[str, Any]) -> str:
    compression = record.get("compression", "tt")
    if compression != "tt":
        return compression
    title = f"{record['tt_tables']} TT tables"
    if record.get("cache_load_factor"):
        title += f", cache {record['cache_load_factor']:.2%}"
    for name, words in (
        ("embedding_dim", "dimension {}"),
        ("tt_init", "{}"),
        ("tt_row_strategy", "{} factors"),
    ):
        if record.get(name) != first.get(name):
            title += ", " + words.format(record.get(name))
    return title


def _is_first_dense(record: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether a run is the uncompressed model of the first run's tables and dimension."""
    same = all(record.get(name) == first.get(name) for name in CHANGE_UNCOMPRESSED)
    return record.get("compression") == "none" and same


def _joined(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))


def _has_seeds(records: Sequence[Mapping[str, Any]]) -> bool:
    return len({record.get("seed") for record in records}) > 1


def _save(figure: Any, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
