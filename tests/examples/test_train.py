import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "criteo" / "train.py"
CONFIGS = SCRIPT.parent / "configs"
KAGGLE_ROWS = ROOT.parent / "shared" / "data" / "criteo_kaggle_8k.tsv.gz"
SMALL = ",".join(str(40 + 100 * column) for column in range(26))
SMALL_FLAGS = (
    *("--data", "made", "--made_rows", "1400", "--num_embeddings_per_feature", SMALL),
    *("--tt_tables", "4", "--tt_rank", "4", "--test_batch_size", "64"),
    *("--dense_arch_layer_sizes", "32,16", "--over_arch_layer_sizes", "32,1"),
)
METRICS = {
    *("ranks", "data", "global_batch_size", "optimizer", "learning_rate", "quality_split"),
    *("train_rows", "val_rows", "test_rows", "validations"),
    *("dense_embedding_bytes", "embedding_bytes", "compression_ratio", "tables"),
    *("peak_memory_bytes", "compression"),
}
SCORES = {
    *("steps", "auroc", "auroc_interval", "logloss", "normalized_entropy", "base_rate"),
    *("samples_per_second", "data_wait_ratio"),
}


def train(*flags, ranks=2):
    """Runs the example, under torchrun where there is more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), SCRIPT, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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


@pytest.mark.slow
def test_two_ranks_train_both_models_and_measure_them(tmp_path):
    metrics = trained(*SMALL_FLAGS, "--epochs", "2", "--compare_dense", output_dir=tmp_path)
    assert set(metrics) == {
        *METRICS,
        *SCORES,
        *(f"dense_{name}" for name in SCORES),
        *("best_auroc", "time_ratio"),
    }
    assert (metrics["ranks"], metrics["global_batch_size"]) == (2, 128)
    assert [metrics[f"{split}_rows"] for split in ("train", "val", "test")] == [1200, 100, 100]
    assert [v["step"] for v in metrics["validations"]] == [10, 20]
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
    metrics = trained(*SMALL_FLAGS, "--no-adagrad", output_dir=tmp_path, ranks=1)
    assert (metrics["ranks"], metrics["steps"]) == (1, -(-1200 // 128))


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["hash", "robe", "int4"])
def test_what_tt_is_compared_with_trains_on_one_rank(tmp_path, compression):
    metrics = trained(
        *SMALL_FLAGS, "--compression", compression, "--epochs", "2", output_dir=tmp_path, ranks=1
    )
    assert metrics["compression"] == compression
    assert metrics["compression_ratio"] > 1
    assert metrics["logloss"] < 1
    kinds = {table["kind"] for table in metrics["tables"]}
    assert kinds == ({"dense", "int4"} if compression == "int4" else {"dense"})


@pytest.mark.slow
def test_what_tt_is_compared_with_is_refused_on_two_ranks(tmp_path):
    run = train(*SMALL_FLAGS, "--compression", "hash", "--output_dir", str(tmp_path))
    assert run.returncode != 0
    assert errors(run) == {"train.py: error: --compression hash must run on one rank, got 2"}


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
def test_a_full_disk_at_the_end_is_one_line(tmp_path, limit_files):
    limit_files(4096)
    run = train(*SMALL_FLAGS, "--output_dir", str(tmp_path), ranks=1)
    assert run.returncode == 1
    assert run.stdout.startswith("AUROC 0.")
    expected = f"train.py: error: [Errno 27] File too large: '{tmp_path}/metrics.json'"
    assert run.stderr.splitlines()[-1] == expected
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_loss_that_is_not_finite_ends_the_job_with_one_line(tmp_path):  # U65
    (tmp_path / "metrics.json").write_text("of an earlier run")
    flags = ("--no-adagrad", "--learning_rate", "1e30")
    run = train(*SMALL_FLAGS, *flags, "--output_dir", str(tmp_path))
    assert run.returncode != 0
    (text,) = errors(run)
    assert text.startswith("train.py: error: loss must be finite, got nan by step 10 of epoch 0")
    assert text.endswith("try a smaller --learning_rate than 1e+30")
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
def test_scores_that_are_not_finite_end_the_job_with_one_line(tmp_path):
    """One step at such a rate has a finite loss, and leaves parameters that have none."""
    flags = ("--no-adagrad", "--learning_rate", "1e30", "--limit_train_batches", "1")
    run = train(*SMALL_FLAGS, *flags, "--output_dir", str(tmp_path))
    assert run.returncode != 0
    (text,) = errors(run)
    assert text.startswith("train.py: error: logloss of the val rows must be finite, got nan")
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not KAGGLE_ROWS.exists(), reason=f"{KAGGLE_ROWS} is not there")
def test_kaggle_rows_train_in_seven_tt_tables_of_rank_32(tmp_path):
    flags = ("--config", str(CONFIGS / "kaggle.yaml"), "--data", str(KAGGLE_ROWS), "--epochs", "4")
    metrics = trained(*flags, output_dir=tmp_path)
    assert [metrics[f"{split}_rows"] for split in ("train", "val", "test")] == [6857, 572, 571]
    assert metrics["compression_ratio"] == pytest.approx(117.4, abs=0.05)
    assert metrics["auroc"] > 0.66
    assert metrics["peak_memory_bytes"] < 2e9


@pytest.mark.slow
def test_default_flags_learn_a_planted_signal(tmp_path):  # U65
    """The label is the parity of cat_0, one in ten of them wrong: the best AUROC is 0.90."""
    path = tmp_path / "rows.tsv"
    generator = random.Random(0)
    ids = [f"{generator.getrandbits(32):08x}" for _ in range(1460)]
    with path.open("w") as file:
        for _ in range(20_000):
            cats = [generator.choice(ids), *(f"{generator.getrandbits(32):08x}" for _ in range(25))]
            label = int(cats[0], 16) % 2 ^ (generator.random() < 0.1)
            ints = [str(generator.randrange(50)) for _ in range(13)]
            file.write("\t".join([str(label), *ints, *cats]) + "\n")
    assert trained("--data", str(path), output_dir=tmp_path, ranks=1)["auroc"] > 0.85


@pytest.mark.slow
def test_a_run_says_what_it_trains_on_and_how_good_it_is(tmp_path):  # U73, U74
    flags = (*SMALL_FLAGS, "--batch_size", "96", "--epochs", "2", "--output_dir", str(tmp_path))
    run = train(*flags, ranks=1)
    assert (
        "global batch 96 (96 on each of 1 ranks), base learning rate 0.03 (Adagrad, eps 1e-08), "
        "2 x 1200 training rows; validation on 100 rows; the results are of the test split, "
        "100 rows\n"
    ) in run.stderr
    number = r"0\.\d{4}"
    scores = (
        rf"AUROC {number} \({number} to {number}\), logloss {number}, "
        rf"normalized entropy \d\.\d{{4}}, base rate {number}"
    )
    assert len(re.findall(f"samples/s: validation {scores}\n", run.stderr)) == 2
    assert re.match(f"{scores}, best reachable {number}, embeddings ", run.stdout)
    assert "\r" not in run.stderr  # no bar in a log


@pytest.mark.slow
def test_limits_and_frequencies_count_batches(tmp_path):
    flags = (
        *("--limit_train_batches", "5", "--validation_freq_within_epoch", "2", "--epochs", "2"),
        *("--limit_val_batches", "1", "--limit_test_batches", "1", "--test_batch_size", "32"),
        *("--lr_warmup_steps", "4", "--lr_decay_start", "6", "--lr_decay_steps", "4", "--print_lr"),
    )
    run = train(*SMALL_FLAGS, *flags, "--output_dir", str(tmp_path), ranks=1)
    assert run.returncode == 0, run.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["steps"] == 10
    assert [v["step"] for v in metrics["validations"]] == [2, 4, 5, 7, 9, 10]
    rates = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("lr:")]
    scales = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 9 / 16, 4 / 16, 1 / 16, 1 / 16]
    assert rates == pytest.approx([0.03 * scale for scale in scales])


@pytest.mark.slow
def test_the_last_smaller_batch_may_be_left_out(tmp_path):
    flags = ("--drop_last_training_batch", "--epochs", "2")
    metrics = trained(*SMALL_FLAGS, *flags, output_dir=tmp_path, ranks=1)
    assert metrics["steps"] == 2 * (1200 // 128)


@pytest.mark.slow
@pytest.mark.parametrize("interaction", ["dcn", "projection"])
def test_other_interactions_train(tmp_path, interaction):
    flags = (
        *("--interaction_type", interaction, "--dcn_num_layers", "2", "--dcn_low_rank_dim", "8"),
        *("--interaction_branch1_layer_sizes", "32,32"),
        *("--interaction_branch2_layer_sizes", "32,16"),
    )
    assert trained(*SMALL_FLAGS, *flags, output_dir=tmp_path, ranks=1)["steps"] == 10


@pytest.mark.slow
def test_a_plan_needs_no_rows(tmp_path):
    flags = (*SMALL_FLAGS[2:], "--plan_only", "--data", "nowhere.tsv")
    run = train(*flags, "--output_dir", str(tmp_path / "none"))
    assert run.returncode == 0, run.stderr
    for column in range(26):
        assert f"t_cat_{column} " in run.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_profile_and_tensorboard_write_their_files(tmp_path):
    events = tmp_path / "events"
    flags = ("--profile", "--batch_size", "40", "--tensorboard_dir", str(events))
    run = train(*SMALL_FLAGS, *flags, "--output_dir", str(tmp_path), ranks=1)
    assert run.returncode == 0, run.stderr
    assert "Self CPU %" in run.stdout
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("name") == "## next_batch ##" for event in trace["traceEvents"])
    found = EventAccumulator(str(events)).Reload()
    assert [event.step for event in found.Scalars("validation/auroc")] == [30]
    assert found.Scalars("train/learning_rate")[0].value == pytest.approx(0.03)
