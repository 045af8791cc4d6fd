"""What the runs of a sweep say together: means over seeds, their intervals, the loss of quality."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

_FACTORS = (
    *("compression", "tt_rank", "tt_tables", "embedding_dim"),
    *("cache_load_factor", "tt_init", "tt_row_strategy"),
)
CHANGE_UNCOMPRESSED = ("tt_tables", "embedding_dim")  # made rows' labels depend on the TT tables
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_Z_975 = 1.96


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each setting, over its seeds, in the order of the first runs.

    A row has the setting's factors, `num_seeds`, and of `embedding_bytes`, `cache_bytes` (of row
    caches, beyond those), `compression_ratio`, `samples_per_second`, `logloss` and `auroc` the
    means. `logloss_interval` and `auroc_interval` are half the width of the mean's 95 % t-interval;
    with one seed that of the logloss is None and that of the AUROC the run's own (DeLong).
    `loss_ratio` is the mean of logloss over that of the uncompressed run of the same seed, tables
    and dimension, minus 1, `auroc_difference` the mean of AUROC minus that run's, each with its
    `_interval`; all are None where a seed has no such run.

    Args:
        records: of `results.json`; those without a logloss are left out.
    """
    records = [record for record in records if record.get("logloss") is not None]
    dense = _dense_runs(records)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(name) for name in _FACTORS), []).append(record)
    return [
        {**dict(zip(_FACTORS, factors, strict=True)), **_row(runs, dense)}
        for factors, runs in groups.items()
    ]


def table_of_summary(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the rows for a terminal, as Markdown."""
    varied = [name for name in _FACTORS if len({row[name] for row in rows}) > 1]
    table = Table(box=box.MARKDOWN)
    for name in varied:
        table.add_column(name)
    for name in (
        *("MB", "cache MB", "smaller", "seeds", "logloss", "over uncompressed"),
        *("AUROC", "AUROC over uncompressed", "samples/s"),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in varied),
            f"{row['embedding_bytes'] / 1e6:.1f}",
            f"{row['cache_bytes'] / 1e6:.1f}" if row["cache_bytes"] else "",
            f"{row['compression_ratio']:.1f}x",
            str(row["num_seeds"]),
            _with_interval(row["logloss"], row["logloss_interval"], "{:.4f}"),
            _with_interval(row["loss_ratio"], row["loss_ratio_interval"], "{:.2%}"),
            _with_interval(row["auroc"], row["auroc_interval"], "{:.4f}"),
            _with_interval(row["auroc_difference"], row["auroc_difference_interval"], "{:.4f}"),
            f"{row['samples_per_second']:,.0f}",
        )
    return table


def loss_ratios(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Returns each run's logloss over the uncompressed run's, less 1.

    That is the run of the same seed, tables and dimension; None where there is none.
    """
    dense = _dense_runs(records)
    pairs = [(record, dense.get(_dense_key(record))) for record in records]
    return [
        None if other is None else run["logloss"] / other["logloss"] - 1 for run, other in pairs
    ]


def _dense_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in (*CHANGE_UNCOMPRESSED, "seed"))


def _dense_runs(
    records: Sequence[Mapping[str, Any]],
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {_dense_key(r): r for r in records if r.get("compression") == "none"}


def _row(
    runs: Sequence[Mapping[str, Any]], dense: Mapping[Any, Mapping[str, Any]]
) -> dict[str, Any]:
    logloss, auroc = ([run[name] for run in runs] for name in ("logloss", "auroc"))
    auroc_interval = _half_width(auroc)
    if auroc_interval is None:
        low, high = runs[0]["auroc_interval"]
        auroc_interval = (high - low) / 2
    pairs = [(run, dense[_dense_key(run)]) for run in runs if _dense_key(run) in dense]
    is_compared = len(pairs) == len(runs)
    ratios = [run["logloss"] / other["logloss"] - 1 for run, other in pairs]
    differences = [run["auroc"] - other["auroc"] for run, other in pairs]
    return {
        "num_seeds": len(runs),
        **{
            name: statistics.fmean(run[name] for run in runs)
            for name in ("embedding_bytes", "compression_ratio", "samples_per_second")
        },
        "cache_bytes": statistics.fmean(cache_bytes(run) for run in runs),
        "logloss": statistics.fmean(logloss),
        "logloss_interval": _half_width(logloss),
        "auroc": statistics.fmean(auroc),
        "auroc_interval": auroc_interval,
        "loss_ratio": statistics.fmean(ratios) if is_compared else None,
        "loss_ratio_interval": _half_width(ratios) if is_compared else None,
        "auroc_difference": statistics.fmean(differences) if is_compared else None,
        "auroc_difference_interval": _half_width(differences) if is_compared else None,
    }


def cache_bytes(run: Mapping[str, Any]) -> float:
    """Bytes of a run's row caches, which come on top of its tables."""
    return sum(cache["bytes"] for cache in (run.get("row_caches") or {}).values())


def _half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % t-interval of the mean."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    t = _T_975[freedom - 1] if freedom <= len(_T_975) else _Z_975
    return t * statistics.stdev(values) / math.sqrt(len(values))


def _with_interval(value: float | None, half: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) + ("" if half is None else f" +- {form.format(half)}")
