"""Measures, in a process of its own, what a call allocates, against `workspace_bytes`."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from torchrec_tt.ops.embedding_bag import (
    cpu_isa,
    embedding_bag_backward_dense,
    embedding_bag_forward,
    plan,
)
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.tt.shape import TTShape
from torchrec_tt.tt.workspace import workspace_bytes

VECTOR_BYTES = {"generic": 16, "avx2": 32, "avx512": 64}
# row_factors, col_factors, tt_ranks, bags, pooling factor, pooling, dtype of the cores
CASES = {
    "2 cores": ((300, 500), (8, 8), (32,), 2000, 300, "sum", "float32"),
    "3 cores": ((40, 50, 60), (4, 4, 4), (32, 32), 2000, 300, "sum", "float32"),
    "one id a bag": ((40, 50, 60), (4, 4, 4), (16, 32), 200_000, 1, "mean", "float32"),
    "long last factor": ((20, 8, 2000), (4, 4, 4), (32, 32), 1000, 600, "mean", "float32"),
    "large slices": ((20, 30, 40), (4, 8, 8), (64, 64), 1000, 400, "sum", "float32"),
    "16 bits": ((40, 50, 60), (4, 4, 4), (30, 30), 2000, 300, "sum", "bfloat16"),
    "4 cores": ((20, 30, 20, 60), (2, 2, 4, 4), (16, 32, 16), 2000, 150, "mean", "float32"),
}


SMALL = TTShape(  # slices: head [2, 5], mid [5, 3, 7], last [7, 4]
    num_embeddings=24,
    embedding_dim=24,
    row_factors=(2, 3, 4),
    col_factors=(2, 3, 4),
    tt_ranks=(5, 7),
)


def test_workspace_by_hand() -> None:
    """One chunk, two threads: ranks 5 and 7 are padded to 8; 64 // 2 prefixes are taken at once."""
    mid, last, product = 5 * 3 * 8, 4 * 8, 6 * 8
    workspace = workspace_bytes(
        SMALL, num_indices=100, num_rows=20, num_prefixes=6, num_bags=50, num_threads=2
    )
    call = 8 * 51 + 4 * 4 * last
    assert workspace.kept == 24 * 100 + 40
    assert workspace.plan == 100 * (2 * 4 + 4) + 2 * 8 * 2048
    scratch = 32 * (10 + product) + mid + last
    assert workspace.forward == call + 4 * 20 * 24 + 4 * scratch
    sums = 4 * (2 * 10 + 4 * last + 2 * mid) + 2 + 4
    scratch += 32 * (product + 2 * 8) + mid + 3 * 8 * 8 + 16 * (24 + last) + 24
    assert workspace.backward == call + 8 * 100 + sums + 4 * scratch


def _bytes_of(status: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(status):
            return 1024 * int(line.split()[1])
    raise AssertionError(status)


class Peak:
    """The most bytes of memory that the process had within the block, beyond those at its start."""

    def __enter__(self) -> "Peak":
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        self.before = _bytes_of("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.num_bytes = _bytes_of("VmHWM") - self.before


def _case(name: str) -> tuple[TTShape, int, int, str, torch.dtype]:
    row_factors, col_factors, tt_ranks, bags, pooling_factor, pooling, dtype = CASES[name]
    num_embeddings, embedding_dim = 1, 1
    for m, n in zip(row_factors, col_factors, strict=True):
        num_embeddings, embedding_dim = num_embeddings * m, embedding_dim * n
    shape = TTShape(
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        row_factors=row_factors,
        col_factors=col_factors,
        tt_ranks=tt_ranks,
    )
    return shape, bags, pooling_factor, pooling, getattr(torch, dtype)


def measure(name: str) -> dict[str, int]:
    """Returns the peaks of the three operators and what the formula says."""
    shape, bags, pooling_factor, pooling, dtype = _case(name)
    torch.set_num_threads(2)
    torch.manual_seed(0)
    lookup = Lookup([TTTable(name="t", shape=shape)], pooling=pooling)
    cores = [torch.randn(size).to(dtype) for size in shape.core_shapes]

    def run(num_bags: int) -> dict[str, int]:
        indices = torch.randint(shape.num_embeddings, (num_bags * pooling_factor,))
        offsets = torch.arange(num_bags + 1) * pooling_factor
        grad_output = torch.randn(num_bags, shape.embedding_dim)
        with Peak() as planned:
            batch_plan = plan(indices, offsets, lookup=lookup)
        with Peak() as forward:
            output = embedding_bag_forward(batch_plan, cores, offsets=offsets, lookup=lookup)
        with Peak() as backward:
            grads, _ = embedding_bag_backward_dense(
                grad_output, batch_plan, cores, offsets=offsets, lookup=lookup
            )
        num_rows, _, num_prefixes, _ = batch_plan[-1].tolist()
        heads = (indices // shape.row_factors[-1] // shape.row_factors[-2]).unique()
        formula = workspace_bytes(
            shape,
            num_indices=len(indices),
            num_rows=num_rows,
            num_prefixes=num_prefixes,
            num_bags=num_bags,
            num_heads=len(heads),
            num_threads=2,
            is_scaled=pooling == "mean",
            core_element_size=cores[0].element_size(),
            vector_bytes=VECTOR_BYTES[cpu_isa()],
        )
        kept = sum(tensor.nbytes for tensor in batch_plan)
        return {
            "kept": kept,
            "kept formula": formula.kept,
            "plan": planned.num_bytes - kept,
            "plan formula": formula.plan,
            "forward": forward.num_bytes - output.nbytes,
            "forward formula": formula.forward,
            "backward": backward.num_bytes - sum(grad.nbytes for grad in grads),
            "backward formula": formula.backward,
        }

    run(2)  # code pages and threads
    return run(bags)


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("needs Linux's /proc")
    # Every allocation of some size is a mapping of its own, which returns to the system when freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.tt.test_workspace"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("name", CASES)
def test_a_call_allocates_what_the_formula_says(name: str, measured: dict) -> None:
    sizes = measured[name]
    assert sizes["kept"] == sizes["kept formula"]
    for part in ("plan", "forward", "backward"):
        ratio = sizes[part] / sizes[f"{part} formula"]
        assert 0.85 <= ratio <= 1.1, (part, sizes)


def test_the_workspace_does_not_hold_a_matrix_of_rank_squared_per_index() -> None:
    shape, bags, pooling_factor, _, _ = _case("3 cores")
    num_indices = bags * pooling_factor
    few, many = (
        workspace_bytes(shape, num_indices=n, num_rows=120_000, num_prefixes=2000, num_bags=bags)
        for n in (num_indices, 2 * num_indices)
    )
    for part in ("kept", "plan", "forward", "backward"):
        per_index = (getattr(many, part) - getattr(few, part)) / num_indices
        assert per_index <= 24 < 4 * 32 * 32


if __name__ == "__main__":
    print(json.dumps({name: measure(name) for name in CASES}))
