from pathlib import Path

import pytest

from torchrec_tt.plots import _lines, plot_sweep, plot_tuned
from torchrec_tt.sweep_summary import loss_ratios

pytest.importorskip("matplotlib")


def records() -> list[dict]:
    return [
        {
            "tt_rank": rank,
            "tt_tables": tables,
            "cache_load_factor": 0.0,
            "seed": seed,
            "logloss": 0.5 + 0.1 / rank + 0.001 * seed,
            "dense_logloss": 0.49,
            "samples_per_second": 1000.0 - rank,
            "embedding_bytes": 1_000_000 * rank * (8 - tables),
        }
        for rank in (8, 16, 32)
        for tables in (3, 7)
        for seed in (0, 1)
    ]


def text_of(path: Path) -> str:
    return path.read_text()


def test_a_sweep_is_drawn_with_axes_units_and_a_legend(tmp_path: Path) -> None:
    paths = plot_sweep(records(), tmp_path / "new")
    assert [path.name for path in paths] == [
        "sweep_logloss.png",
        "sweep_logloss.svg",
        "sweep_speed.png",
        "sweep_speed.svg",
    ]
    for path in paths:
        assert path.stat().st_size > 10_000
    words = text_of(tmp_path / "new/sweep_logloss.svg")
    for word in (
        "(MB",
        "held-out logloss",
        "3 TT tables",
        "7 TT tables",
        "uncompressed",
        "rank 32",
    ):
        assert word in words


def test_no_line_is_left_out_and_many_have_their_ranks_in_the_legend(tmp_path: Path) -> None:
    many = [
        {**record, "tt_tables": tables, "cache_load_factor": cache}
        for record in records()[:12]
        for tables in range(3, 7)
        for cache in (0.0, 0.001, 0.01)
    ]
    plot_sweep(many, tmp_path)
    words = text_of(tmp_path / "sweep_logloss.svg")
    for tables in range(3, 7):
        for cache in ("", ", cache 0.10%", ", cache 1.00%"):
            assert f"{tables} TT tables{cache}, rank 8, 16, 32 -->" in words


def test_runs_of_other_factors_are_lines_of_their_own(tmp_path: Path) -> None:
    same = {"embedding_dim": 16, "tt_init": "gaussian", "tt_row_strategy": "balanced"}
    runs = [{**record, **same} for record in records()]
    runs.append({**runs[0], "embedding_dim": 64})
    runs.append({**runs[0], "tt_init": "uniform", "tt_row_strategy": "fast"})
    plot_sweep(runs, tmp_path)
    words = text_of(tmp_path / "sweep_logloss.svg")
    assert "3 TT tables, dimension 64, rank 8" in words
    assert "3 TT tables, uniform, fast factors, rank 8" in words
    assert "3 TT tables, rank 8, 16, 32" in words


def test_logloss_is_drawn_over_the_uncompressed_run_beside_each(tmp_path: Path) -> None:
    runs = [{**record, "compression": "tt"} for record in records()]
    dense = [
        {**run, "compression": "none", "logloss": 0.4 + 0.1 * run["seed"] + 0.01 * run["tt_tables"]}
        for run in runs
        if run["tt_rank"] == 8
    ]
    plot_sweep([*runs, *dense[:-1]], tmp_path)
    assert "over uncompressed (%)" not in text_of(tmp_path / "sweep_logloss.svg")
    plot_sweep([*runs, *dense], tmp_path)
    assert "over uncompressed (%)" in text_of(tmp_path / "sweep_logloss.svg")
    ratios = loss_ratios([*runs, *dense])
    by_run = {
        (r["tt_rank"], r["tt_tables"], r["seed"]): x for r, x in zip(runs, ratios, strict=False)
    }
    assert by_run[8, 3, 0] == pytest.approx(0.5125 / 0.43 - 1)
    assert by_run[32, 7, 1] == pytest.approx((0.5 + 0.1 / 32 + 0.001) / 0.57 - 1)


def test_row_caches_count_as_memory(tmp_path: Path) -> None:
    run = records()[0]
    caches = {"t_0": {"bytes": 99_000_000.0}}
    cached = {**run, "cache_load_factor": 0.01, "row_caches": caches}
    assert _lines([run, cached], "logloss") == {
        "3 TT tables": [(40.0, 0.5125, 0.5125, 0.5125, 8)],
        "3 TT tables, cache 1.00%": [(139.0, 0.5125, 0.5125, 0.5125, 8)],
    }


def test_a_frontier_is_drawn(tmp_path: Path) -> None:
    plans = [{"rank_bytes": 10**k, "step_ms": 9.0 - k, "error": 0.1 * k} for k in range(4, 8)]
    paths = plot_tuned(plans, tmp_path)
    assert {path.stem for path in paths} == {"tuned_time", "tuned_error"}
    assert "predicted time of a step (ms)" in text_of(tmp_path / "tuned_time.svg")


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records must have a run"):
        plot_sweep([], tmp_path)
    with pytest.raises(ValueError, match="plans must have a plan"):
        plot_tuned([], tmp_path)
