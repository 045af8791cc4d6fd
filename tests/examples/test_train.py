import json
import subprocess
import sys
from pathlib import Path

import pytest
from train import parse_args

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "criteo" / "train.py"
KAGGLE_ROWS = ROOT.parent / "shared" / "data" / "criteo_kaggle_8k.tsv.gz"
SMALL = ",".join(str(40 + 100 * column) for column in range(26))
SMALL_FLAGS = (
    *("--data", "made", "--made_rows", "1400", "--num_embeddings_per_feature", SMALL),
    *("--tt_tables", "4", "--tt_rank", "4", "--test_batch_size", "64"),
    *("--dense_arch_layer_sizes", "32,16", "--over_arch_layer_sizes", "32,1"),
)
METRICS = {
    *("ranks", "data", "train_rows", "test_rows", "steps", "auroc", "auroc_interval", "logloss"),
    *("normalized_entropy", "base_rate", "dense_embedding_bytes", "embedding_bytes"),
    *("compression_ratio", "peak_memory_bytes", "samples_per_second", "tables"),
}


def train(*flags, ranks=2):
    """Runs the example, under torchrun where there is more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), SCRIPT, *flags],
        env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def trained(*flags, output_dir, ranks=2):
    """Runs the example and returns what it measured."""
    run = train(*flags, "--output_dir", str(output_dir), ranks=ranks)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("AUROC 0.")
    return json.loads((output_dir / "metrics.json").read_text())


def errors(run):
    """The different lines in which ranks say why they stopped.

    torchrun may end a rank that is behind the first before it has said so.
    """
    return {text for text in run.stderr.splitlines() if "train.py: error: " in text}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_embeddings_per_feature", "1,2"], "must have 26 entries, got 2"),
        (["--num_embeddings_per_feature", "1,x"], "must be a positive integer, got x"),
        (["--tt_tables", "27"], "--tt_tables must be 1 to 26, got 27"),
        (["--dense_arch_layer_sizes", "64,8"], "must end in --embedding_dim 16, got [64, 8]"),
        (["--over_arch_layer_sizes", "64,2"], "must have two layers or more and end in 1"),
        (["--over_arch_layer_sizes", "1"], "must have two layers or more and end in 1"),
        (["--batch_size", "0"], "must be a positive integer, got 0"),
        (["--learning_rate", "-1"], "must be a positive number, got -1"),
        (["--learning_rate", "nan"], "must be a positive number, got nan"),
        (["--learning_rate", "inf"], "must be a positive number, got inf"),
        (["--epochs", "x"], "must be a positive integer, got x"),
        (["--tt_cores", "5"], "invalid choice: 5"),
        (["--tt_cache", "1.5"], "must be in (0, 1), got 1.5"),
    ],
)
def test_flags_that_cannot_be_exit_with_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        parse_args(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_defaults_are_the_papers_kaggle_model():
    args = parse_args([])
    assert args.embedding_dim == 16
    assert args.dense_arch_layer_sizes == [512, 256, 64, 16]
    assert args.over_arch_layer_sizes == [512, 256, 1]
    assert (args.learning_rate, args.adagrad) == (0.1, False)
    assert (args.tt_tables, args.tt_rank, args.tt_cores) == (7, 32, 3)


@pytest.mark.slow
def test_two_ranks_train_both_models_and_measure_them(tmp_path):
    metrics = trained(*SMALL_FLAGS, "--epochs", "2", "--compare_dense", output_dir=tmp_path)
    assert set(metrics) == {
        *METRICS,
        *("best_auroc", "dense_auroc", "dense_logloss", "dense_samples_per_second"),
    }
    assert (metrics["ranks"], metrics["train_rows"], metrics["test_rows"]) == (2, 1200, 100)
    assert metrics["steps"] == 2 * -(-1200 // 128)
    assert len(metrics["tables"]) == 26
    assert metrics["embedding_bytes"] == sum(table["bytes"] for table in metrics["tables"])
    tt = {t["name"]: t["sharding_type"] for t in metrics["tables"] if t["kind"] == "tt"}
    assert tt == {
        "t_cat_25": "row_wise",
        "t_cat_24": "table_wise",
        "t_cat_23": "table_wise",
        "t_cat_22": "data_parallel",
    }
    low, high = metrics["auroc_interval"]
    assert low < metrics["auroc"] < high


@pytest.mark.slow
def test_row_caches_of_both_ranks_are_counted_together(tmp_path):
    flags = ("--tt_cache", "0.1", "--batch_size", "4", "--made_rows", "2100")
    metrics = trained(*SMALL_FLAGS, *flags, output_dir=tmp_path)
    caches = metrics["row_caches"]
    assert set(caches) == {"t_cat_22", "t_cat_23", "t_cat_24", "t_cat_25"}
    for counts in caches.values():
        assert counts["hits"] + counts["misses"] == metrics["steps"] * 2 * 4
        assert counts["hit_rate"] == counts["hits"] / (metrics["steps"] * 2 * 4) > 0
        assert 0 < counts["fills"] <= counts["bytes"]


@pytest.mark.slow
def test_one_process_trains_without_torchrun(tmp_path):
    metrics = trained(*SMALL_FLAGS, "--adagrad", output_dir=tmp_path, ranks=1)
    assert (metrics["ranks"], metrics["steps"]) == (1, -(-1200 // 128))


@pytest.mark.slow
def test_malformed_line_ends_the_job_with_one_line(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("0" + "\t" * 39 + "\n1\t2\n")
    run = train("--data", str(path), "--output_dir", str(tmp_path))
    assert run.returncode != 0
    expected = f"train.py: error: {path}, line 2: must have 40 tab-separated fields, got 2"
    assert errors(run) == {expected}
    assert 'train.py", line' not in run.stderr  # no traceback of ours


@pytest.mark.slow
def test_loss_that_is_not_finite_ends_the_job_with_one_line(tmp_path):
    (tmp_path / "metrics.json").write_text("of an earlier run")
    run = train(*SMALL_FLAGS, "--learning_rate", "1e30", "--output_dir", str(tmp_path))
    assert run.returncode != 0
    (text,) = errors(run)
    assert text.startswith("train.py: error: loss must be finite, got nan by step 10 of epoch 0")
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not KAGGLE_ROWS.exists(), reason=f"{KAGGLE_ROWS} is not there")
def test_kaggle_rows_train_in_seven_tt_tables_of_rank_32(tmp_path):
    metrics = trained("--data", str(KAGGLE_ROWS), "--epochs", "4", output_dir=tmp_path)
    assert (metrics["train_rows"], metrics["test_rows"]) == (6857, 571)
    assert metrics["compression_ratio"] == pytest.approx(117.4, abs=0.05)
    assert metrics["auroc"] > 0.66
    assert metrics["peak_memory_bytes"] < 2e9
