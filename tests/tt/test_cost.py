import math
import random

import pytest
import torch

from torchrec_tt.tt.cost import (
    FLOPS_PER_BYTE,
    OPTIMIZERS,
    chunk_sum_bytes,
    core_bytes,
    dense_bytes,
    expected_unique,
    lookup_flops,
    num_chunks,
    optimizer_state_bytes,
    step_cost,
    step_work,
)
from torchrec_tt.tt.shape import TTShape

LARGE = TTShape(
    num_embeddings=10_000_000,
    embedding_dim=64,
    row_factors=(200, 220, 250),
    col_factors=(4, 4, 4),
    tt_ranks=(16, 16),
)


def test_bytes_of_ten_million_rows() -> None:
    assert LARGE.num_parameters == 254_080
    assert core_bytes(LARGE) == 1_016_320
    assert dense_bytes(LARGE) == 2_560_000_000
    assert core_bytes(LARGE, element_size=2) == 508_160
    assert dense_bytes(LARGE, element_size=2) == 1_280_000_000


def test_core_bytes_are_those_of_tensors() -> None:
    cores = [torch.empty(shape) for shape in LARGE.core_shapes]
    assert core_bytes(LARGE) == sum(core.nbytes for core in cores)


# U04
@pytest.mark.parametrize(
    ("optimizer", "num_bytes"),
    [
        ("sgd", 0),
        ("adagrad", 1_016_320),
        ("rowwise_adagrad", (200 + 220 + 250) * 4),
        ("adam", 2 * 1_016_320),
    ],
)
def test_optimizer_state_bytes(optimizer: str, num_bytes: int) -> None:
    assert optimizer_state_bytes(LARGE, optimizer=optimizer) == num_bytes
    assert optimizer in OPTIMIZERS


@pytest.mark.slow  # the first torch.optim of a process imports much
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_optimizer_state_bytes_are_those_torch_keeps(optimizer: str) -> None:
    cores = [torch.zeros(shape, requires_grad=True) for shape in LARGE.core_shapes]
    step = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[optimizer](cores)
    for core in cores:
        core.grad = torch.zeros_like(core)
    step.step()
    kept = sum(
        value.nbytes
        for state in step.state.values()
        for name, value in state.items()
        if name != "step"
    )
    assert optimizer_state_bytes(LARGE, optimizer=optimizer) == kept


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of \('sgd', .*, got 'lamb'"):
        optimizer_state_bytes(LARGE, optimizer="lamb")


def test_two_cores_multiply_rows_only() -> None:
    shape = TTShape(
        num_embeddings=12, embedding_dim=6, row_factors=(3, 4), col_factors=(2, 3), tt_ranks=(5,)
    )
    flops = lookup_flops(shape, num_rows=10, num_prefixes=3)
    assert flops.forward == 10 * 2 * 6 * 5
    assert flops.backward == 2 * 10 * 2 * 6 * 5


def test_three_cores_multiply_prefixes_and_rows() -> None:
    shape = TTShape(
        num_embeddings=24,
        embedding_dim=30,
        row_factors=(2, 3, 4),
        col_factors=(2, 3, 5),
        tt_ranks=(7, 11),
    )
    prefix, row = 3 * (2 * 2 * 7 * 3 * 11), 10 * (2 * 30 * 11)
    flops = lookup_flops(shape, num_rows=10, num_prefixes=3)
    assert flops.forward == prefix + row
    assert flops.backward == 3 * prefix + 2 * row


def test_four_cores_multiply_heads_too() -> None:
    shape = TTShape(
        num_embeddings=120,
        embedding_dim=16,
        row_factors=(2, 3, 4, 5),
        col_factors=(2, 2, 2, 2),
        tt_ranks=(3, 5, 7),
    )
    head, prefix, row = 2 * 2 * 3 * 2 * 5, 2 * 4 * 5 * 2 * 7, 2 * 16 * 7
    flops = lookup_flops(shape, num_rows=30, num_prefixes=20, num_heads=4)
    assert flops.forward == 4 * head + 20 * prefix + 30 * row
    assert flops.backward == 3 * (4 * head + 20 * prefix) + 2 * 30 * row
    assert lookup_flops(shape, num_rows=30, num_prefixes=20).forward == (
        (2 * 3) * head + 20 * prefix + 30 * row
    )


def test_flops_of_the_measured_batch() -> None:
    """16384 scattered ids, dim 64, rank 32: 0.26 GFLOP forward, 1.02 with backward."""
    shape = TTShape(
        num_embeddings=11_000_000,
        embedding_dim=64,
        row_factors=(200, 220, 250),
        col_factors=(4, 4, 4),
        tt_ranks=(32, 32),
    )
    flops = lookup_flops(shape, num_rows=7_700, num_prefixes=7_100)
    assert flops.forward == pytest.approx(0.26e9, rel=0.02)
    assert flops.forward + flops.backward == pytest.approx(1.02e9, rel=0.01)


def test_expected_unique_by_hand() -> None:
    assert expected_unique(0, 5) == 0
    assert expected_unique(1, 5) == pytest.approx(1)
    assert expected_unique(2, 2) == pytest.approx(1.5)
    assert expected_unique(3, 3) == pytest.approx(3 * (1 - (2 / 3) ** 3))
    assert expected_unique(4, 1) == 1
    assert expected_unique(0.25, 1) == 0.25
    assert expected_unique(0.5, 2) == 0.5


def test_expected_unique_is_what_draws_give() -> None:
    generator = random.Random(0)
    counts = [len({generator.randrange(50) for _ in range(60)}) for _ in range(2000)]
    # The deviation of one count is about 2.6, of the mean of 2000 about 0.06.
    assert sum(counts) / len(counts) == pytest.approx(expected_unique(60, 50), abs=0.25)


def test_expected_unique_keeps_its_digits_for_huge_tables() -> None:
    draws, values = 1000, 10**15
    collisions = draws * (draws - 1) / 2 / values
    assert draws - expected_unique(draws, values) == pytest.approx(collisions, rel=1e-2)
    assert expected_unique(10**12, 10**18) <= 10**12
    assert math.isclose(expected_unique(1e12, 1000), 1000)


@pytest.mark.parametrize(
    ("num_draws", "num_values", "message"),
    [(-1, 5, "num_draws must not be negative, got -1"), (3, 0, "num_values must be positive")],
)
def test_expected_unique_refuses_nonsense(num_draws: int, num_values: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_unique(num_draws, num_values)


SMALL = TTShape(  # slices: head [2, 5], mid [5, 3, 7], last [7, 4]
    num_embeddings=24,
    embedding_dim=24,
    row_factors=(2, 3, 4),
    col_factors=(2, 3, 4),
    tt_ranks=(5, 7),
)


def test_chunks_are_of_24_million_flops_and_16_at_most() -> None:
    row, prefix = 2 * 24 * 8, 2 * 6 * 5 * 8  # rank 7 is padded to 8
    assert num_chunks(SMALL, num_rows=10, num_prefixes=5) == 1
    assert num_chunks(SMALL, num_rows=1000, num_prefixes=150_000) == (
        (1000 * row + 150_000 * prefix) // 24_000_000
    )
    assert num_chunks(SMALL, num_rows=10**6, num_prefixes=10**6) == 16
    assert num_chunks(SMALL, num_rows=10**6, num_prefixes=4) == 4


def test_chunk_sums_are_of_heads_and_last_slices() -> None:
    assert chunk_sum_bytes(SMALL) == 4 * (2 * 10 + 4 * 28)
    two = TTShape(
        num_embeddings=12, embedding_dim=6, row_factors=(3, 4), col_factors=(2, 3), tt_ranks=(5,)
    )
    assert chunk_sum_bytes(two) == 4 * (3 * 2 * 5 + 4 * 5 * 3)
    four = TTShape(
        num_embeddings=120,
        embedding_dim=16,
        row_factors=(2, 3, 4, 5),
        col_factors=(2, 2, 2, 2),
        tt_ranks=(3, 5, 7),
    )
    assert chunk_sum_bytes(four) == 4 * ((2 * 3) * (2 * 2) * 5 + 5 * 7 * 2)


def test_step_cost_by_hand() -> None:
    """A batch of so many rows that it has every prefix; all of it fits the cache."""
    head, mid, last = 4 * 10, 4 * 105, 4 * 28
    flops = lookup_flops(SMALL, num_rows=10_000, num_prefixes=6)
    num_bytes = 5 * mid * expected_unique(6, 3) + 3 * last * 4 + 3 * head * expected_unique(6, 2)
    num_bytes += 4 * last * 4 + 3 * last * 4
    assert step_cost(SMALL, num_rows=10_000) == pytest.approx(
        flops.forward + flops.backward + FLOPS_PER_BYTE * num_bytes
    )


def test_step_work_by_hand() -> None:
    """The terms of `step_cost`, and an update of dense gradients."""
    head, mid, last = 4 * 10, 4 * 105, 4 * 28
    work = step_work(SMALL, num_rows=10_000)
    mids, heads = expected_unique(6, 3), expected_unique(6, 2)
    assert work.forward_bytes == pytest.approx(mid * mids + 2 * last * 4)
    assert work.backward_bytes == pytest.approx(
        3 * mid * mids + 2 * last * 4 + 3 * (last * 4 + head * heads)
    )
    assert work.update_bytes == pytest.approx(mid * mids + 3 * last * 4)
    assert step_work(SMALL, num_rows=10_000, is_dense=True).update_bytes == 4 * core_bytes(SMALL)
    assert step_work(SMALL, num_rows=9, num_prefixes=2).forward_flops == (
        lookup_flops(SMALL, num_rows=9, num_prefixes=2).forward
    )
