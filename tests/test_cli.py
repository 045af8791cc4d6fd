import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

import torchrec_tt
from torchrec_tt import cli, doctor
from torchrec_tt.distributed.planner.hardware import KNOWN, Hardware
from torchrec_tt.model_file import read_model_file
from torchrec_tt.schema import read_yaml

MODEL = """
batch_size: 64
optimizer: adagrad
cluster: {device: cpu, world_size: 2, memory_gb: 1}
tables:
  - {name: large, num_embeddings: 1000000, embedding_dim: 16, tt_ranks: [8, 8], data_type: bf16}
  - {name: small, num_embeddings: 1000, embedding_dim: 16, pooling_factor: 3.0}
"""


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """The status, and what the command prints with --json."""
    status = cli.main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_u86_doctor_prints_versions_and_that_the_operators_are_ready(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torchrec_tt.__version__ in printed
    assert torch.__version__ in printed
    assert "ready" in printed
    status, content = run(capsys, "doctor")
    assert status == 0
    assert content["problems"] == []
    assert content["versions"]["torch"] == torch.__version__


def test_u86_doctor_says_what_is_wrong_and_what_is_supported(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "found 2.9.1" in printed
    assert "supported: torch 2.11 to 2.15" in printed


# U15
@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"torchrec": "1.5.0", "fbgemm-gpu-cpu": "1.5.0"}, "TorchRec 1.5.0 is not among"),
        ({"torchrec": "1.8.0"}, "TorchRec needs FBGEMM: pip install"),
        ({"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "overwrite each other"),
    ],
)
def test_doctor_names_what_does_not_fit_together(versions, problem, monkeypatch):
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert problem in doctor.diagnose().text()


def test_inspect_counts_what_a_model_file_says(capsys, model_file):
    status, content = run(capsys, "inspect", model_file)
    assert status == 0
    large, small = content["tables"]
    shape = read_model_file(model_file).tables[0].config().tt_shape
    assert large["num_bytes"] == 2 * shape.num_parameters  # bfloat16
    assert large["dense_bytes"] == 1_000_000 * 16 * 4
    assert [list(core) for core in shape.core_shapes] == large["cores"]
    assert (small["kind"], small["num_bytes"]) == ("dense", 64_000)
    assert content["total"]["num_bytes"] == large["num_bytes"] + 64_000
    assert cli.main(["inspect", model_file]) == 0
    assert "large" in capsys.readouterr().out


def state_dict() -> dict[str, torch.Tensor]:
    return {
        "model.ebc.embedding_bags.t.tt_cores.0": torch.zeros(4, 6),
        "model.ebc.embedding_bags.t.tt_cores.1": torch.zeros(5, 12, dtype=torch.float32),
        "model.ebc.embedding_bags.r.weight": torch.zeros(7, 3, dtype=torch.float16),
        "model.over.weight": torch.zeros(2, 2),
    }


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_inspect_reads_the_cores_of_a_checkpoint(kind, capsys, tmp_path):
    path = tmp_path / "checkpoint"
    if kind == "folder":
        dcp.save(state_dict(), checkpoint_id=path)
    else:
        torch.save({"model": state_dict(), "step": 3}, path)
    status, content = run(capsys, "inspect", str(path))
    assert status == 0
    found = {entry["table"]: entry for entry in content["tables"]}
    assert set(found) == {"t", "r"}
    assert found["t"]["cores"] == [[4, 6], [5, 12]]
    assert found["t"]["num_bytes"] == 4 * (24 + 60)
    assert found["r"]["num_bytes"] == 2 * 21


def test_plan_needs_no_ranks_and_reports_every_table(capsys, model_file):
    status, content = run(capsys, "plan", model_file)
    assert status == 0
    assert [entry["table"] for entry in content["tables"]] == ["large", "small"]
    assert content["step_ms"] == pytest.approx(max(content["rank_ms"]) + content["fixed_ms"])
    assert cli.main(["plan", model_file]) == 0
    assert "ms a step" in capsys.readouterr().out


def test_a_cluster_of_gpus_is_planned_without_one(capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(
        MODEL.replace(
            "device: cpu, world_size: 2",
            "device: cuda, world_size: 16, hardware: b200, local_world_size: 8",
        )
    )
    status, content = run(capsys, "plan", str(path))
    assert status == 0
    assert len(content["rank_ms"]) == 16


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("v100", "hardware must be one of .* got 'v100'"),
        ("h100", "hardware must be of .* 'cpu', got 'h100'"),
        ("nowhere.yaml", "No such file or directory: 'nowhere.yaml'"),
    ],
)
@pytest.mark.parametrize("command", [["plan"], ["tune", "--budget", "1MB"]])
def test_errors_of_the_hardware_name_the_model_file(command, hardware, message, capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL.replace("memory_gb: 1", f"hardware: {hardware}"))
    status, content = run(capsys, *command, str(path))
    assert status == 1
    assert re.match(
        f"{re.escape(str(path))}: {message}", content["error"].replace("[Errno 2] ", "")
    )


def test_a_misspelt_sharding_type_is_refused_with_file_and_table(capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL.replace("tt_ranks: [8, 8]", "sharding_types: [row_wse]"))
    status, content = run(capsys, "plan", str(path))
    assert status == 1
    assert f"{path}: tables['large'].sharding_types must be of [" in content["error"]
    assert "got ['row_wse']" in content["error"]


def test_what_does_not_fit_fails_and_says_what_would(capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL.replace("memory_gb: 1", "memory_gb: 0.0001"))
    status, content = run(capsys, "plan", str(path))
    assert status == 1
    assert "table 'large' needs at least" in content["error"]
    assert cli.main(["plan", str(path)]) == 1
    assert "torchrec-tt: error: table 'large'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tt_ranks", "tt_rank", "'tt_rank'; the nearest is 'tt_ranks'"),
        ("adagrad", "lamb", r"optimizer must be one of ['sgd'"),
        ("[8, 8]", "[8]", "large"),
        ("pooling_factor: 3.0", "row_factors: [10, 100]", "row_factors must be left out"),
        ("name: small", "name: large", "tables must have distinct names"),
    ],
)
def test_files_that_cannot_be_are_refused_by_name(old, new, message, capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL.replace(old, new).replace("[8]", "[8, 8, 8, 8, 8]"))
    status, content = run(capsys, "plan", str(path))
    assert status == 1
    assert "model.yaml" in content["error"]
    assert message in content["error"]


def test_a_file_that_is_not_there_fails(capsys, tmp_path):
    for command in (["plan"], ["inspect"], ["sweep"], ["plot"], ["tune", "--budget", "1MB"]):
        status, content = run(capsys, *command, str(tmp_path / "none.yaml"))
        assert status == 1
        assert "none.yaml" in content["error"]


ODD = (None, "", "x", [], {}, {"a": 1}, [None], True, -1, 0, -5.5, 10**30, 1e308, ".nan", [10**8])


def places(content: Any, place: tuple = ()) -> Iterator[tuple]:
    yield place
    entries = content.items() if isinstance(content, dict) else ()
    for key, value in enumerate(content) if isinstance(content, list) else entries:
        yield from places(value, (*place, key))


def replaced(content: Any, place: tuple, value: Any) -> Any:
    if not place:
        return value
    result = copy.deepcopy(content)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return result


def test_no_odd_value_of_a_model_file_ends_in_a_traceback(capsys, tmp_path):
    path = tmp_path / "model.yaml"
    content = yaml.safe_load(MODEL)
    content["tables"][0] |= {"row_factors": [100, 100, 100], "cache_load_factor": 0.01}
    content["tables"][1] |= {"zipf_exponent": 1.0, "sharding_types": ["row_wise"]}
    content["cluster"] |= {"local_world_size": 2, "reserved": 0.1, "hardware": "cpu"}
    num_refused = 0
    for place in places(content):
        for value in ODD:
            path.write_text(yaml.safe_dump(replaced(content, place, value)))
            status = cli.main(["inspect", str(path)])
            error = capsys.readouterr().err
            assert status in (0, 1)
            if status:
                assert error.count("\n") == 1
                assert "model.yaml" in error
                assert " must " in error
                assert ", got " in error
                num_refused += 1
    assert num_refused > 300


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pooling_factor: 3.0", "pooling_factor: .nan", "['small'].pooling_factor must be finite"),
        ("num_embeddings: 1000,", "num_embeddings: -5,", "['small'].num_embeddings must be in"),
        ("memory_gb: 1", "memory_gb: .inf", "cluster.memory_gb must be finite, got inf"),
        ("memory_gb: 1", "local_world_size: 3", "local_world_size must divide world_size=2, got 3"),
        ("[8, 8]", "[100000000, 100000000]", "below 2^31 elements, got (100000000, 100000000)"),
        ("name: small", "name: a.b", "name must be not empty and without dots, got 'a.b'"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_key(old, new, message, capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL.replace(old, new))
    for command in (["plan"], ["inspect"], ["tune", "--budget", "1MB"]):
        status, content = run(capsys, *command, str(path))
        assert status == 1
        assert "model.yaml" in content["error"]
        assert message in content["error"]


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x04K\x01.", b"PK\x03\x04", b"{[", b"\xff"]
)
def test_a_file_of_another_kind_is_refused_by_name(content, capsys, model_file, tmp_path):
    path = str(tmp_path / "other.pt")
    Path(path).write_bytes(content)
    tune = ["tune", model_file, "--budget", "1MB", "--sweep"]
    for command in (["plan"], ["inspect"], ["sweep"], ["plot"], ["tune", "--budget=1MB"], tune):
        status, printed = run(capsys, *command, path)
        assert status == 1
        assert "other.pt must be" in printed["error"] or "other.pt: the" in printed["error"]


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ({0: (4, 6), 2: (5, 12)}, "cores of table 't' must be numbered from 0, 2 to 4 of them"),
        ({0: (4, 6)}, r"got [0]"),
        ({0: (4, 6), 1: ()}, "core 1 of table 't' must be a matrix, got []"),
    ],
)
def test_cores_that_form_no_table_are_refused(cores, message, capsys, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({f"embedding_bags.t.tt_cores.{k}": torch.zeros(s) for k, s in cores.items()}, path)
    status, content = run(capsys, "inspect", str(path))
    assert status == 1
    assert message in content["error"]


def test_a_broken_checkpoint_folder_is_refused_by_name(capsys, tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x04")
    status, content = run(capsys, "inspect", str(tmp_path))
    assert status == 1
    assert f"{tmp_path} must be a folder of torch.distributed.checkpoint" in content["error"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--tt_ranks=0", "tt_ranks must be positive integers, got [0]"),
        ("--tt_ranks=8,-4", "tt_ranks must be positive integers, got [8, -4]"),
        ("--max_error=nan", "max_error must be at least 0, got nan"),
        ("--max_error=-1", "max_error must be at least 0, got -1.0"),
        ("--max_error=1e-9", "max_error must be at least 0."),
        ("--cache_load_factors=nan", "cache_load_factors must be in [0, 1), got [nan]"),
    ],
)
def test_arguments_of_tune_are_refused_for_what_they_are(argument, message, capsys, model_file):
    budget = "300KB"
    status, content = run(capsys, "tune", model_file, "--budget", budget, argument)
    assert status == 1
    assert message in content["error"]


def test_an_output_that_cannot_be_written_is_refused_before_the_work(capsys, model_file, tmp_path):
    for output in (str(tmp_path), str(tmp_path / "none/file.yaml"), ""):
        for command in (["calibrate"], ["tune", model_file, "--budget", "1MB"]):
            with pytest.raises(SystemExit) as error:
                cli.main([*command, "--output", output])
            assert error.value.code == 2
            assert f"must be a file in a folder that exists, got {output!r}" in (
                capsys.readouterr().err
            )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', "results.json must have runs of a sweep, got {'a': 1}"),
        ("[1]", "results.json: run 0 must be a mapping, got 1"),
        ("[]", "must have runs of a sweep, got []"),
        ('[{"tt_rank": 8}]', "run 0 must have the key 'tt_tables'"),
        ('{"results": 3}', "must have runs of a sweep"),
        ("NaN", "must have runs of a sweep, got nan"),
    ],
)
def test_results_of_another_shape_are_refused(text, message, capsys, model_file, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(text)
    tune = ["tune", model_file, "--budget", "1MB", "--sweep"]
    for command in (["plot"], tune):
        status, content = run(capsys, *command, str(path))
        assert status == 1
        assert message in content["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"plans": []}', "plans must be a list with an entry, got []"),
        ('{"plans": [{"step_ms": 1.0}]}', "plans[0] must have the key 'rank_bytes'"),
        (
            '{"plans": [{"rank_bytes": 0, "step_ms": 1.0, "error": 0.0}]}',
            "plans[0].rank_bytes must be in [1, 2^63), got 0",
        ),
    ],
)
def test_plans_of_another_shape_are_refused(text, message, capsys, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    status, content = run(capsys, "plot", str(path))
    assert status == 1
    assert "tuned.json" in content["error"]
    assert message in content["error"]


def test_tune_writes_a_model_file_that_can_be_planned(capsys, model_file, tmp_path):
    output = str(tmp_path / "tuned.yaml")
    status, content = run(
        capsys, "tune", model_file, "--budget", "300KB", "--tt_ranks", "4,8", "--output", output
    )
    assert status == 0
    assert all(plan["rank_bytes"] <= 300_000 for plan in content["plans"])
    least = min(content["plans"], key=lambda plan: plan["error"])
    tuned = read_model_file(output)
    assert [t.tt_ranks for t in tuned.tables] == [t["tt_ranks"] for t in least["model"]["tables"]]
    assert run(capsys, "plan", output)[0] == 0


def test_a_budget_is_a_number_of_bytes(capsys, model_file):
    for budget in ("much", "0", "3XB", "inf", "nan"):
        with pytest.raises(SystemExit) as error:
            cli.main(["tune", model_file, "--budget", budget])
        assert error.value.code == 2
    assert cli._bytes("1.5GiB") == 3 * 2**29
    assert cli._bytes("20MB") == 20_000_000


def test_plot_draws_what_tune_and_sweep_print(capsys, tmp_path):
    tuned, swept = tmp_path / "tuned.json", tmp_path / "results.json"
    tuned.write_text(json.dumps({"plans": [{"rank_bytes": 9, "step_ms": 1.0, "error": 0.1}]}))
    record = {
        "tt_rank": 8,
        "tt_tables": 3,
        "embedding_bytes": 9,
        "logloss": 0.5,
        "samples_per_second": 7,
    }
    swept.write_text(json.dumps([record]))
    for path, stem in ((tuned, "tuned_time"), (swept, "sweep_logloss")):
        status, content = run(capsys, "plot", str(path), "--output", str(tmp_path))
        assert status == 0
        assert str(tmp_path / f"{stem}.png") in content["files"]


def test_calibrate_writes_what_the_planner_reads(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchrec_tt.calibrate.calibrate", lambda ranks, name: KNOWN["cpu"]
    )  # tests/test_calibrate.py measures
    output = tmp_path / "hardware.yaml"
    status, content = run(capsys, "calibrate", "--output", str(output))
    assert status == 0
    assert content["name"] == "cpu"
    assert read_yaml(output, Hardware) == KNOWN["cpu"]
