import dataclasses
from pathlib import Path

import pytest
from flags import REFUSED, Flags, parse_args

from torchrec_tt.schema import read_yaml
from torchrec_tt.sweep import SweepFile, _command

CONFIGS = Path(__file__).parents[2] / "examples/criteo/configs"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def refused(flags, capsys):
    """The line with which the script refuses flags."""
    with pytest.raises(SystemExit) as caught:
        parse_args(flags)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: error: ")
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_embeddings_per_feature", "1,2"], "must have 26 entries, got 2"),
        (["--num_embeddings_per_feature", "1,x"], "must be an integer, got x"),
        (["--num_embeddings_per_feature", "1,0"], "must be in [1, 2^31), got 0"),
        (["--num_embeddings", "9", "--tables", "f"], "--tables and --num_embeddings must not both"),
        (["--tables", "f", "--tt_rank", "9"], "--tables and --tt_rank must not both be given"),
        (["--tt_tables", "27"], "--tt_tables must be 1 to 26, got 27"),
        (["--dense_arch_layer_sizes", "64,8"], "must end in --embedding_dim 16, got [64, 8]"),
        (["--over_arch_layer_sizes", "64,2"], "must have two layers or more and end in 1"),
        (["--over_arch_layer_sizes", "1"], "must have two layers or more and end in 1"),
        (["--batch_size", "0"], "--batch_size must be in [1, 2^31), got 0"),
        (["--num_embeddings", str(2**31)], "--num_embeddings must be in [1, 2^31), got 2147483648"),
        (["--learning_rate", "-1"], "--learning_rate must be a positive float32, got -1.0"),
        (["--learning_rate", "1e39"], "--learning_rate must be a positive float32, got 1e+39"),
        (["--eps", "1e-300"], "--eps must be a positive float32, got 1e-300"),
        (["--learning_rate", "nan"], "learning_rate must be finite, got nan"),
        (["--learning_rate", "inf"], "learning_rate must be finite, got inf"),
        (["--seed", str(2**63)], f"--seed must be below 2^63, got {2**63}"),
        (["--made_rows", "0"], "--made_rows must be positive, got 0"),
        (["--epochs", "x"], "must be an integer, got x"),
        (["--tt_cores", "5"], "tt_cores must be one of [2, 3, 4], got 5"),
        (["--tt_cache", "1.5"], "--tt_cache must be in (0, 1), got 1.5"),
        (["--interaction_type", "x"], "interaction_type must be one of ['original', 'dcn', 'proj"),
        (
            ["--interaction_type", "projection", "--interaction_branch1_layer_sizes", "8"],
            "--interaction_branch1_layer_sizes must end in a multiple of --embedding_dim 16, got",
        ),
        (
            ["--lr_warmup_steps", "9", "--lr_decay_start", "8", "--lr_decay_steps", "1"],
            "--lr_decay_start must be at least --lr_warmup_steps 9, got 8",
        ),
        (["--resume"], "--resume must come with --checkpoint_dir"),
        (["--save_every", "9"], "--save_every must come with --checkpoint_dir"),
        (
            ["--compression", "zip"],
            "compression must be one of ['tt', 'hash', 'qr', 'robe'",
        ),
        (["--compression_bytes", "9"], "must come with --compression hash, qr, robe, got tt"),
        (
            ["--compression", "qr", "--tt_cache", "0.1"],
            "--tt_cache must be left out of --compression qr",
        ),
        (
            ["--compression", "none", "--compare_dense"],
            "--compare_dense must be left out of --compression none",
        ),
        (["--learning", "1"], "must be given flags that there are, got --learning; the nearest is"),
        (["--batchsize=1"], "got --batchsize=1; the nearest is --batch_size"),
        (["rows.tsv"], "must be given flags only, got rows.tsv"),
        (
            ["--config", str(CONFIGS.parent / "kaggle_tables.yaml")],
            "kaggle_tables.yaml has tables: give it to --tables",
        ),
    ],
)
def test_flags_that_cannot_be_exit_with_one_line(capsys, flags, message):
    assert message in refused(flags, capsys)


@pytest.mark.parametrize("name", REFUSED)
def test_what_dlrm_main_has_and_this_has_not_is_refused_with_the_reason(capsys, name):
    line = refused([f"--{name}"], capsys)
    assert f"--{name} must be left out: {REFUSED[name]}" in line


def test_defaults_are_the_papers_kaggle_model_with_adagrad():
    flags = parse_args([])
    assert flags.embedding_dim == 16
    assert flags.dense_arch_layer_sizes == [512, 256, 64, 16]
    assert flags.over_arch_layer_sizes == [512, 256, 1]
    assert (flags.learning_rate, flags.adagrad) == (0.03, True)
    assert (flags.tt_tables, flags.tt_rank, flags.tt_cores) == (7, 32, 3)


def test_num_embeddings_is_of_each_table():
    assert parse_args(["--num_embeddings", "9"]).num_embeddings_per_feature == [9] * 26


def test_a_path_of_npy_files_is_data():
    assert parse_args(["--in_memory_binary_criteo_path", "folder"]).data == "folder"


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("{epochs: 3, adagrad: true, learning_rate: 1, over_arch_layer_sizes: [8, 1]}")
    flags = parse_args(["--config", str(path), "--epochs", "5", "--no-adagrad"])
    expected = {"epochs": 5, "adagrad": False, "learning_rate": 1.0}
    expected |= {"over_arch_layer_sizes": [8, 1]}
    assert flags == dataclasses.replace(parse_args([]), **expected)


def test_a_flag_takes_the_place_of_what_excludes_it_in_the_file(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("{tt_rank: 8, num_embeddings: 9, epochs: 3}")
    flags = parse_args(["--config", str(path), "--tables", "tuned.yaml"])
    assert (flags.tables, flags.tt_rank, flags.num_embeddings, flags.epochs) == (
        *("tuned.yaml", Flags().tt_rank, None, 3),
    )
    path.write_text("{tables: tuned.yaml}")
    assert parse_args(["--config", str(path), "--tt_rank", "8"]).tables is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{epoch: 3}", "got 'epoch'; the nearest is 'epochs'"),
        ("{epochs: 0}", "--epochs must be positive, got 0"),
        ("{epochs: many}", "epochs must be int, got 'many'"),
        ("{mmap_mode: true}", "--mmap_mode must be left out: npy files are always memory-mapped"),
        ("[epochs]", "the file must be a mapping, got ['epochs']"),
        ("{epochs", "must be YAML, got"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_is_named_in_one_line(capsys, tmp_path, text, message):
    path = tmp_path / "flags.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        parse_args(["--config", str(path)])
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_flags(path):
    assert parse_args(["--config", str(path)]).tt_tables == 7


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("accuracy*.yaml")), ids=lambda p: p.stem)
def test_the_accuracy_protocols_commands_are_flags(path):
    sweep = read_yaml(path, SweepFile)
    for settings in sweep.settings():
        command = _command(sweep, settings, Path("run"))
        flags = parse_args(command[command.index(sweep.script) + 1 :])
        assert {"compression", "seed"} <= settings.keys()
        for name in {"compression", "tt_init", "tt_row_strategy", "seed"} & settings.keys():
            assert getattr(flags, name) == settings[name]


def test_a_sweeps_commands_are_flags():
    sweep = SweepFile(output_dir="", cache_load_factors=[0.0, 0.01], compare_dense=True)
    for settings in sweep.settings():
        command = _command(sweep, settings, Path("run"))
        flags = parse_args(command[command.index(sweep.script) + 1 :])
        assert (flags.tt_rank, flags.output_dir) == (settings["tt_rank"], "run")
        assert flags.tt_cache == (settings["cache_load_factor"] or None)
