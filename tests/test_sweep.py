import json
from pathlib import Path

import pytest

from torchrec_tt.sweep import SweepFile, _command, run_sweep

SCRIPT = """
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
for name in ("data", "output_dir", "tt_rank", "tt_tables", "seed"):
    parser.add_argument("--" + name)
parser.add_argument("--fail_at", default="")
args = parser.parse_args()
if args.tt_rank == args.fail_at:
    raise SystemExit("it failed")
folder = pathlib.Path(args.output_dir)
with (folder / "runs").open("a") as file:
    file.write(os.environ["RANK"])
(folder / "metrics.json").write_text(json.dumps({"logloss": float(args.tt_rank)}))
"""


def sweep(tmp_path: Path, **changes: object) -> SweepFile:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    settings = {"tt_ranks": [2, 3], "tt_tables": [1], "processes": 1}
    return SweepFile(
        output_dir=str(tmp_path / "runs"), script=str(script), **{**settings, **changes}
    )


@pytest.mark.slow
def test_every_combination_runs_once_and_a_second_sweep_runs_none(tmp_path: Path) -> None:
    seen = []
    spec = sweep(tmp_path)
    records = run_sweep(spec, on_run=lambda i, n, settings: seen.append((i, n, settings)))
    assert [(i, n, settings["tt_rank"]) for i, n, settings in seen] == [(0, 2, 2), (1, 2, 3)]
    assert [record["logloss"] for record in records] == [2.0, 3.0]
    assert json.loads((tmp_path / "runs/results.json").read_text()) == records
    assert run_sweep(spec) == records
    assert [p.read_text() for p in (tmp_path / "runs").glob("*/runs")] == ["0", "0"]
    run_sweep(sweep(tmp_path, arguments=["--fail_at", "99"], tt_ranks=[2]))
    (again,) = (tmp_path / "runs").glob("tt_rank=2*seed=0/runs")
    assert again.read_text() == "00"  # another command is another run


@pytest.mark.slow
def test_a_run_that_fails_ends_the_sweep_and_keeps_what_is_done(tmp_path: Path) -> None:
    spec = sweep(tmp_path, arguments=["--fail_at", "3"])
    with pytest.raises(RuntimeError, match=r"tt_rank=3.* ended with 1; see .*log\.txt"):
        run_sweep(spec)
    assert len(json.loads((tmp_path / "runs/results.json").read_text())) == 1
    (log,) = (tmp_path / "runs").glob("tt_rank=3*/log.txt")
    assert "it failed" in log.read_text()


def test_every_combination_of_the_lists_is_a_run() -> None:
    spec = SweepFile(output_dir="", tt_ranks=[2, 3], tt_tables=[1, 5], seeds=[0, 1, 2])
    settings = list(spec.settings())
    assert len(settings) == 12
    assert settings[-1] == {"tt_rank": 3, "tt_tables": 5, "cache_load_factor": 0.0, "seed": 2}


def test_a_cache_is_the_examples_argument() -> None:
    one = {"tt_ranks": [2], "tt_tables": [1], "seeds": [0]}
    sweep = SweepFile(output_dir="", cache_load_factors=[0.0, 0.01], **one)
    without, with_cache = [_command(sweep, s, Path("run")) for s in sweep.settings()]
    assert "--tt_cache" not in without
    assert with_cache[with_cache.index("--tt_cache") + 1] == "0.01"
    assert "--cache_load_factor" not in with_cache


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"script must be the example's train\.py, got 'no\.py'"):
        run_sweep(SweepFile(output_dir="nowhere", script="no.py"))


def test_one_factor_is_varied_at_a_time_and_its_uncompressed_model_beside_it() -> None:
    spec = SweepFile(
        output_dir="",
        vary="one",
        tt_ranks=[32, 8],
        tt_tables=[7, 3],
        compressions=["tt", "none"],
        seeds=[0, 1],
    )
    settings = list(spec.settings())
    points = [(s["tt_rank"], s["tt_tables"], s["compression"]) for s in settings if not s["seed"]]
    assert points == [(32, 7, "tt"), (8, 7, "tt"), (32, 3, "tt"), (32, 3, "none"), (32, 7, "none")]
    assert len(settings) == 10


def test_a_factor_without_values_is_no_argument() -> None:
    assert "embedding_dim" not in next(SweepFile(output_dir="").settings())
