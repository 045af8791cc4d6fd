"""The plan on the device, emulated, equals the CPU's bit for bit."""

import ctypes
import random

import pytest
import torch

from tests.csrc.emulation import SCHEDULES, build
from tests.ops.reference import SHAPES, Batch, make_lookup
from tests.ops.test_random_lookups import random_table
from torchrec_tt.ops.embedding_bag import plan
from torchrec_tt.ops.lookup import Lookup, TTTable
from torchrec_tt.tt.shape import TTShape

ALL = list(SHAPES)


@pytest.fixture
def emulated(cuda_operators):
    operators = torch.ops.torchrec_tt_emulated

    def run(indices, offsets, lookup):
        return operators.plan(
            indices,
            offsets,
            lookup.encoded_tables,
            lookup.feature_tables,
            lookup.check_mode,
            [],
        )

    return run


def assert_equals_cpu(run, indices, offsets, lookup):
    actual, expected = run(indices, offsets, lookup), plan(indices, offsets, lookup=lookup)
    for name, a, b in zip(
        ("order", "inverse", "row_keys", "row_starts", "prefix_starts", "counts"),
        actual,
        expected,
        strict=True,
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("name", ALL)
def test_the_plan_of_one_table(name, seed, cuda_operators, emulated):
    cuda_operators.set_schedule(seed)
    lookup = make_lookup(name)
    batch = Batch.draw(lookup, batch_size=150)
    assert_equals_cpu(emulated, batch.indices, batch.offsets, lookup)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offset_type", [torch.int32, torch.int64], ids=str)
def test_the_plan_of_many_tables_and_features(index_type, offset_type, emulated):
    lookup = make_lookup(*ALL, num_features=2)
    batch = Batch.draw(lookup)
    assert_equals_cpu(emulated, batch.indices.to(index_type), batch.offsets.to(offset_type), lookup)


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_of_random_tables(seed, cuda_operators, emulated):
    rng = random.Random(seed)
    cuda_operators.set_schedule(seed % 5)
    lookup = Lookup([random_table(rng, f"t{i}") for i in range(rng.choice((1, 2, 5, 30)))])
    batch = Batch.draw(lookup, batch_size=rng.choice((1, 2, 17, 64)))
    assert_equals_cpu(emulated, batch.indices, batch.offsets, lookup)


def test_more_tables_than_one_launch_uploads(emulated):
    lookup = make_lookup(*(ALL * 80))
    batch = Batch.draw(lookup, batch_size=1)
    assert_equals_cpu(emulated, batch.indices, batch.offsets, lookup)


@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_the_plan_of_no_indices(batch_size, emulated):
    lookup = make_lookup("3 cores", "2 cores")
    offsets = torch.zeros(2 * batch_size + 1, dtype=torch.int64)
    assert_equals_cpu(emulated, torch.empty(0, dtype=torch.int64), offsets, lookup)


def test_keys_beyond_32_bits(emulated):
    shape = TTShape(
        num_embeddings=2**45,
        embedding_dim=2,
        row_factors=(2**15,) * 3,
        col_factors=(1, 1, 2),
        tt_ranks=(1, 1),
    )
    lookup = Lookup([TTTable(name=name, shape=shape) for name in "ab"])
    ids = torch.randint(2**45, (300,))
    ids[::3] = ids[0]
    assert_equals_cpu(emulated, ids, torch.tensor([0, 100, 300]), lookup)


def test_a_row_wise_block(emulated):
    shape = make_lookup("3 cores").tables[0].shape
    lookup = Lookup([TTTable(name="t", shape=shape, row_offset=40, num_rows=10)])
    assert_equals_cpu(emulated, torch.arange(10).flip(0), torch.arange(11), lookup)


@pytest.mark.parametrize("mode", ["warning", "ignore"])
def test_u25_ids_out_of_range_read_row_0_and_are_counted(mode, emulated):
    lookup = make_lookup("2 cores", "3 cores", check_mode=mode)
    ids = torch.tensor([3, -1, 5, 2, 2**40, 57, 58])
    offsets = torch.tensor([0, 3, 7])
    operators = torch.ops.torchrec_tt_emulated
    cpu = torch.ops.torchrec_tt.plan(
        ids, offsets, lookup.encoded_tables, lookup.feature_tables, mode, []
    )
    for a, b in zip(emulated(ids, offsets, lookup), cpu, strict=True):
        assert torch.equal(a, b)
    said = operators.take_warning(0)
    if mode == "warning":
        assert said == (
            "indices must be in [0, 13) for the lookup's table number 0, got -1 at position 1 "
            "(feature 0), in an earlier batch on this device"
        )
    else:
        assert said == ""
    assert operators.take_warning(0) == ""
    operators.check_errors(0)


FAULTS = [
    (
        [3, 13],
        [0, 1, 2, 2, 2],
        r"in \[0, 13\) for the lookup's table number 0, got 13 at position 1 ",
    ),
    (
        [3, 4, -7],
        [0, 1, 2, 3, 3],
        r"in \[0, 58\) for .* number 1, got -7 at position 2 \(feature 1\)",
    ),
    ([0, 1, 2], [0, 3, 2, 3, 3], "offsets must not decrease, got 3 then 2 at position 2"),
    ([0, 1, 2], [0, 1, 2, 4, 4], "offsets must end at the number of indices, 3, got 4"),
    ([0, 1, 2], [0, 1, 2, 2, 2], "offsets must end at the number of indices, 3, got 2"),
    ([0, 1, 2], [1, 2, 3, 3, 3], "offsets must start at 0, got 1"),
    ([0, 1, 99], [9, -2, 77, 4, 4], "offsets must start at 0, got 9"),
]


# U26
@pytest.mark.parametrize("first", ["the next operator", "check_errors"])
@pytest.mark.parametrize(("indices", "offsets", "message"), FAULTS)
def test_u25_u32_a_fault_is_raised_later_and_once(indices, offsets, message, first, emulated):
    lookup = make_lookup("2 cores", "3 cores")
    indices, offsets = torch.tensor(indices), torch.tensor(offsets)
    emulated(indices, offsets, lookup)  # says nothing, and faults nothing
    good = torch.tensor([0]), torch.tensor([0, 0, 1])
    if first == "check_errors":
        with pytest.raises(ValueError, match=message):
            torch.ops.torchrec_tt_emulated.check_errors(0)
    else:
        with pytest.raises(ValueError, match=message):
            emulated(*good, lookup)
    torch.ops.torchrec_tt_emulated.check_errors(0)
    assert_equals_cpu(emulated, *good, lookup)


# 64 faults at once, of two blocks: each says its number in every field.
FAULTY = """
#include "fault.cuh"

using torchrec_tt::cuda::FaultRecord;

__global__ void fail(FaultRecord* into) {
  const int64_t i = 1 + blockIdx.x * blockDim.x + threadIdx.x;
  torchrec_tt::cuda::record({1, i, i, i, i, i}, into);
}

extern "C" void run(FaultRecord* into) { TT_LAUNCH(fail, 2, 32, 0, nullptr, into); }
"""


@pytest.mark.parametrize("seed", SCHEDULES)
def test_faults_that_meet_are_one(seed):
    emulation = build("fault_record", [], text=FAULTY)
    emulation.set_schedule(seed)
    record = torch.zeros(6, dtype=torch.int64)
    for _ in range(2):  # the second finds it taken
        emulation.calls.run(ctypes.c_void_p(record.data_ptr()))
        emulation.check()
        assert record[0] == 1
        assert record[1:].eq(record[1]).all()
    record[0] = -1  # a kernel of another stream has it
    emulation.calls.run(ctypes.c_void_p(record.data_ptr()))
    assert record[0] == -1


def test_a_sort_or_scan_that_fails_raises(cuda_operators, emulated):
    lookup = make_lookup("3 cores")
    batch = Batch.draw(lookup)
    try:
        for number in range(1, 7):  # two sizes, asked for twice, then the sort and the scan
            cuda_operators.fail_cub_call(number)
            with pytest.raises(RuntimeError, match="invalid argument"):
                emulated(batch.indices, batch.offsets, lookup)
    finally:
        cuda_operators.fail_cub_call(0)
    assert_equals_cpu(emulated, batch.indices, batch.offsets, lookup)


def test_more_indices_than_an_int_can_pass_are_refused(tmp_path, cuda_operators):
    lookup = make_lookup("3 cores")
    size = 2**31 - 32
    path = tmp_path / "indices"
    path.touch()
    indices = torch.from_file(str(path), shared=True, size=size, dtype=torch.int32)  # all a hole
    with pytest.raises(ValueError, match=f"at most {size - 1} entries on CUDA, got {size}"):
        torch.ops.torchrec_tt_emulated.plan(
            indices,
            torch.tensor([0, size]),
            lookup.encoded_tables,
            lookup.feature_tables,
            "fatal",
            [],
        )


def test_a_shard_without_rows_has_no_row_0(emulated):
    shape = make_lookup("3 cores, rank 1").tables[0].shape
    empty = TTTable(name="t", shape=shape, row_offset=shape.num_embeddings, num_rows=0)
    lookup = Lookup([empty, TTTable(name="u", shape=shape)], check_mode="ignore")
    made = emulated(torch.tensor([0, 1]), torch.tensor([0, 1, 2]), lookup)
    assert int(made[2].min()) >= 0
    with pytest.raises(ValueError, match=r"indices must be in \[0, 0\) for .* 0, got 0"):
        torch.ops.torchrec_tt_emulated.check_errors(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.tensor([1.0])}, "indices must be int32 or int64, got Float"),
        ({"indices": torch.tensor([[1]])}, "indices must have 1 dimension, got 2"),
        ({"indices": torch.arange(4)[::2]}, "indices must be contiguous"),
        ({"offsets": torch.arange(4)[::2]}, "offsets must be contiguous"),
        ({"offsets": torch.tensor([0, 1, 1, 1])}, "got 4 for 2 features"),
        ({"offsets": torch.zeros(3, device="meta").long()}, "offsets must be on the device of"),
        ({"check_mode": "none"}, "check_mode must be fatal, warning or ignore, got none"),
        ({"cache_ids": [torch.zeros(8).long()]}, "cache_ids must have one tensor per table, 2, or"),
        ({"cache_ids": [torch.zeros(8).int()] * 2}, "cache_ids 0 must be Long, got Int"),
        ({"cache_ids": [torch.zeros(9).long()] * 2}, "a multiple of 8 elements, got 9 in 1 dim"),
        ({"tables": []}, "tables must not be empty"),
    ],
)
def test_bad_arguments_raise(change, message, cuda_operators):
    lookup = make_lookup("2 cores", "3 cores")
    arguments = {
        "indices": torch.tensor([1]),
        "offsets": torch.tensor([0, 1, 1]),
        "tables": lookup.encoded_tables,
        "feature_tables": lookup.feature_tables,
        "check_mode": "fatal",
        "cache_ids": [],
    } | change
    # as the dispatcher calls it where any tensor is on the device
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with pytest.raises(ValueError, match=message):
        torch.ops.torchrec_tt_emulated.plan.default.redispatch(keys, *arguments.values())
