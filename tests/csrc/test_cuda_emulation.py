"""The emulation runs kernels as CUDA does, and finds the faults that CUDA lets pass."""

import ctypes

import pytest
import torch

from tests.csrc.emulation import HERE, SCHEDULES, EmulationError, build

pytestmark = pytest.mark.parametrize("seed", SCHEDULES)


@pytest.fixture(scope="module")
def library():
    return build("faulty_kernels", [HERE / "faulty_kernels.cu"])


@pytest.fixture
def call(library, seed):
    library.set_schedule(seed)

    def run(name, *arguments):
        result = getattr(library.calls, name)(
            *(_pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        )
        library.check()
        return result

    return run


def _pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def ints(count):
    return torch.arange(count, dtype=torch.int32)


def test_a_block_talks_through_shared_memory(call):
    out = torch.empty(6 * 96, dtype=torch.int32)
    call("reverse", ints(6 * 96), out, 6, 96, 1)
    assert torch.equal(out, ints(6 * 96).view(6, 96).flip(1).flatten())


@pytest.mark.parametrize("threads", [2, 32, 33, 256])
def test_a_missing_barrier_is_found(call, threads):
    out = torch.empty(threads, dtype=torch.int32)
    with pytest.raises(
        EmulationError,
        match=r"not written|race in shared memory.*faulty_kernels\.cu:1",
    ):
        call("reverse", ints(threads), out, 1, threads, 0)


def test_a_barrier_can_be_switched_off_at_run_time(call, library):
    out = torch.empty(96, dtype=torch.int32)
    call("rounds", ints(96), out, 1)
    assert torch.equal(out, 2 * ints(96).roll(-1) + 1)
    barriers = [b for b in library.barriers() if b.startswith("faulty_kernels.cu:3")]
    assert len(barriers) == 2
    for barrier in barriers:
        with library.without_barrier(barrier), pytest.raises(EmulationError):
            call("rounds", ints(96), out, 1)
    call("rounds", ints(96), out, 1)


def test_a_write_that_overtakes_a_read_is_found(call):
    with pytest.raises(EmulationError, match=r"writes what thread .* read with no barrier|wrote"):
        call("rounds", ints(96), torch.empty(96, dtype=torch.int32), 0)


def test_a_warp_talks_through_shared_memory(call):
    out = torch.empty(64, dtype=torch.int32)
    call("reverse_warp", ints(64), out, 1)
    assert torch.equal(out, ints(64).view(2, 32).flip(1).flatten())


@pytest.mark.parametrize("barrier", [0, 2, 3], ids=["none", "a shuffle", "of half the lanes"])
def test_a_missing_syncwarp_is_found(call, barrier):
    with pytest.raises(EmulationError, match=r"race in shared memory|not written"):
        call("reverse_warp", ints(64), torch.empty(64, dtype=torch.int32), barrier)


@pytest.mark.parametrize("kind", range(6))
def test_a_divergent_barrier_or_collective_is_found(call, kind):
    with pytest.raises(EmulationError, match=r"divergent|collective"):
        call("diverge", torch.zeros(1, dtype=torch.int32), kind)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_read_of_unwritten_shared_memory_is_found(call, kind):
    out = torch.empty(2 * 64, dtype=torch.int32)
    thread = {0: 5, 1: 7}[kind]
    with pytest.raises(EmulationError, match=rf"not written, by thread \({thread}, 0, 0\)"):
        call("read_unwritten", ints(64), out, kind)
    with pytest.raises(EmulationError, match="race in global memory"):  # both blocks write out
        call("read_unwritten", ints(64), out, 2)


def test_atomics_count_and_launches_are_ordered(call):
    out = torch.zeros(2, dtype=torch.int32)
    call("count", out, 0)
    call("count_twice", out)
    assert out.tolist() == [3 * 32 + 2, 0]


@pytest.mark.parametrize("kind", [1, 2])
def test_a_lost_update_is_found(call, kind):
    with pytest.raises(EmulationError, match="race in global memory"):
        call("count", torch.zeros(2, dtype=torch.int32), kind)


def test_a_constant_load_of_what_the_launch_writes_is_found(call):
    with pytest.raises(EmulationError, match="__ldg of what the same launch writes"):
        call("count", torch.zeros(2, dtype=torch.int32), 5)


def test_bytes_of_one_word_are_not_one(call):
    out = torch.empty(64, dtype=torch.uint8)
    call("bytes", out)
    assert torch.equal(out, torch.arange(64, 0, -1, dtype=torch.uint8))


def test_collectives(call):
    out = torch.empty(64, 10, dtype=torch.int32)
    call("collectives", out)
    i = ints(64)
    warp, half = i.view(2, 32).sum(1), i.view(4, 16).sum(1)
    odd = torch.tensor([0xAAAAAAAA - 2**32] * 64)
    up = torch.where(i % 8 == 0, i, i - 1)
    same = torch.tensor([15 << (lane // 4 * 4) for lane in range(32)]).to(torch.int32).repeat(2)
    expected = [
        warp.repeat_interleave(32),
        warp.repeat_interleave(32),
        up,
        half.repeat_interleave(16),
        odd,
        same,
        i < 32,
        i < 32,
        torch.full((64,), 22),
        torch.full((64,), 3),
    ]
    assert torch.equal(out, torch.stack([e.int() for e in expected], 1))


def test_shared_memory_is_limited(call):
    out = torch.empty(64, dtype=torch.uint8)
    call("take_shared", out, 48 << 10)
    with pytest.raises(EmulationError, match=r"49153 bytes of dynamic .* 49152 are allowed"):
        call("take_shared", out, (48 << 10) + 1)
    assert call("take_allowed_shared", out, 98 << 10) == 0
    assert call("take_allowed_shared", out, 100 << 10) == 1  # the device has 99 KiB
    with pytest.raises(EmulationError, match="bytes of shared memory, the device has"):
        call("take_allowed_shared", out, 99 << 10)  # and 64 bytes are static
