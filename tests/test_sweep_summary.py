import math

import pytest
from rich.console import Console

from torchrec_tt.sweep_summary import summary, table_of_summary


def record(compression: str, seed: int, logloss: float, **changes: object) -> dict:
    return {
        "compression": compression,
        "tt_rank": 32,
        "tt_tables": 7,
        "seed": seed,
        "embedding_bytes": 4_000_000,
        "compression_ratio": 10.0,
        "samples_per_second": 1000.0,
        "logloss": logloss,
        "auroc": 0.8 + seed / 100,
        "auroc_interval": [0.7, 0.9],
        **changes,
    }


def test_means_over_seeds_have_t_intervals_and_losses_are_paired() -> None:
    dense = [record("none", seed, 0.5 + seed / 10) for seed in (0, 1)]
    tt = [record("tt", 0, 0.505, auroc=0.79), record("tt", 1, 0.618, auroc=0.78)]  # 1 %, 3 % more
    _, row = summary([*dense, *tt])
    assert row["num_seeds"] == 2
    assert row["logloss"] == pytest.approx(0.5615)
    assert row["loss_ratio"] == pytest.approx(0.02)
    # standard deviation 0.01 * sqrt(2), over sqrt(2), times t of one degree of freedom
    assert row["loss_ratio_interval"] == pytest.approx(0.12706)
    assert row["auroc_interval"] == pytest.approx(12.706 * 0.01 / math.sqrt(2) / math.sqrt(2))
    assert row["auroc_difference"] == pytest.approx(-0.02)  # of -0.01 and -0.03
    assert row["auroc_difference_interval"] == pytest.approx(0.12706)


def test_one_seed_has_the_runs_own_interval_and_no_pair_no_loss() -> None:
    (row,) = summary([record("tt", 0, 0.5)])
    assert row["auroc_interval"] == pytest.approx(0.1)
    assert (row["logloss_interval"], row["loss_ratio"]) == (None, None)


def test_other_tables_are_not_what_a_run_is_compared_with() -> None:
    _, row = summary([record("none", 0, 0.5), record("tt", 0, 0.5, tt_tables=3)])
    assert (row["loss_ratio"], row["auroc_difference"]) == (None, None)


def test_row_caches_are_counted_beside_the_tables() -> None:
    caches = {"t_0": {"bytes": 300_000, "hits": 5}, "t_1": {"bytes": 200_000, "hits": 5}}
    (row,) = summary([record("tt", 0, 0.5, row_caches=caches)])
    assert (row["embedding_bytes"], row["cache_bytes"]) == (4_000_000, 500_000)


def test_the_table_shows_what_varies() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table_of_summary(summary([record("none", 0, 0.5), record("tt", 0, 0.505)])))
    text = capture.get()
    assert "compression" in text
    assert "tt_rank" not in text
    assert "| 1.00% |" in " ".join(text.split())
