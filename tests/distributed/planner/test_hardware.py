import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from torchrec.distributed.planner.types import CollectiveType

from torchrec_tt.distributed.planner.hardware import KNOWN, Hardware, HardwareBandwidths
from torchrec_tt.distributed.planner.hardware import find_hardware as find
from torchrec_tt.schema import write_yaml


def test_gpus_are_estimates_and_the_cpu_was_measured() -> None:
    assert {name for name, hardware in KNOWN.items() if hardware.is_estimate} == {
        "a100",
        "h100",
        "h200",
        "b200",
    }


def test_a_newer_gpu_is_no_slower() -> None:
    gpus = [KNOWN[name] for name in ("a100", "h100", "h200", "b200")]
    for old, new in itertools.pairwise(gpus):
        for field in dataclasses.fields(Hardware):
            if field.name.endswith("_per_ms"):
                assert getattr(new, field.name) >= getattr(old, field.name)


def test_a_file_is_read_and_none_is_the_default_of_the_device(tmp_path: Path) -> None:
    own = dataclasses.replace(KNOWN["cpu"], name="own", flops_per_ms=1e6)
    write_yaml(tmp_path / "own.yaml", own, comment="mine")
    assert find(str(tmp_path / "own.yaml"), device="cpu") == own
    assert find(own, device="cpu") is own
    assert find("b200", device="cuda") is KNOWN["b200"]
    assert find(None, device="cpu") is KNOWN["cpu"]
    assert find(None, device="cuda") is KNOWN["h100"]


def test_an_unknown_key_of_a_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    write_yaml(tmp_path / "own.yaml", KNOWN["cpu"], comment="mine")
    text = (tmp_path / "own.yaml").read_text().replace("flops_per_ms", "flop_per_ms")
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match="'flop_per_ms'; the nearest is 'flops_per_ms'"):
        find(tmp_path / "own.yaml", device="cpu")


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("v100", r"hardware must be one of .*'h100'.* got 'v100'"),
        ("h100", "of the topology's compute device 'cpu', got 'h100' of 'cuda'"),
    ],
)
def test_unknown_or_other_hardware_is_refused(hardware: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(hardware, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_ms": 0.0}, "flops_per_ms must be positive, .* got 0.0"),
        (
            {"row_bytes_per_ms": 1e30},
            r"row_bytes_per_ms must be positive, in \[1, 10\^15\], got 1e",
        ),
        (
            {"row_bytes_per_ms": 1e-9},
            r"row_bytes_per_ms must be positive, in \[1, 10\^15\], got 1e",
        ),
        ({"all_reduce_bytes_per_ms": math.inf}, "all_reduce_bytes_per_ms must be .* got inf"),
        ({"pool_bytes_per_ms": math.nan}, "pool_bytes_per_ms must be .* got nan"),
        ({"step_ms": 1e30}, r"step_ms must not be negative, in \[0, 10\^6\], got 1e\+30"),
        ({"memory_bytes": -1}, "memory_bytes must be positive, .* got -1"),
        ({"table_ms": -1.0}, "table_ms must not be negative, .* got -1.0"),
        ({"sharding_ms": {"row_wise": -2.0}}, "sharding_ms.row_wise must not be negative"),
    ],
)
def test_coefficients_that_cannot_be_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(KNOWN["cpu"], **change)


def test_an_all_reduce_over_nodes_uses_the_links_of_all_ranks_of_a_node() -> None:
    h100 = KNOWN["h100"]
    speeds = HardwareBandwidths(h100)
    assert speeds.get_bw(8, 8, CollectiveType.ALL_REDUCE) == h100.all_reduce_bytes_per_ms
    assert speeds.get_bw(8, 16, CollectiveType.ALL_REDUCE) == 8 * h100.inter_node_bytes_per_ms
    assert speeds.get_bw(8, 16, CollectiveType.ALL_TO_ALL) == h100.inter_node_bytes_per_ms
