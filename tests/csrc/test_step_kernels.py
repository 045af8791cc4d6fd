"""The CUDA kernels of the optimizers' steps, emulated, against the CPU's."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.csrc.emulation import SCHEDULES
from tests.csrc.lookup_calls import OPTIMIZERS, EmulationError, Kernels, build_kernels
from torchrec_tt.ops.step_cores import step_cores
from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig

SEEDS = [11, -5, 1 << 60]
SHAPES = [(5, 12), (7, 300), (1, 3)]  # slices below and above a block's threads


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(build_kernels())


def draw(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def states_of(optimizer: CoreOptimizer) -> list[list[Tensor]]:
    return [list(state.values()) for state in optimizer.state.values()]


def settings_of(config: TTOptimizerConfig) -> dict:
    assert config.eps is not None
    return {
        "optimizer": config.optimizer,
        "settings": [config.learning_rate, config.eps, *config.betas, config.weight_decay],
        "decoupled_weight_decay": config.decoupled_weight_decay,
    }


@pytest.mark.parametrize(
    ("optimizer", "dtype", "decay"),
    itertools.product(
        OPTIMIZERS,
        [torch.float32, torch.bfloat16, torch.float16],
        [(0.0, False), (0.1, False), (0.1, True)],
    ),
)
def test_steps_are_the_cpus(kernels, optimizer, dtype, decay):
    config = TTOptimizerConfig(
        optimizer=optimizer,
        learning_rate=0.05,
        weight_decay=decay[0],
        decoupled_weight_decay=decay[1],
        stochastic_rounding=dtype == torch.float16,
    )
    ours, of_cpu = draw(dtype), draw(dtype)
    optimizers = [CoreOptimizer(cores, config, rounding_seeds=SEEDS) for cores in (ours, of_cpu)]
    generator = torch.Generator().manual_seed(5)
    for schedule in SCHEDULES:
        kernels.emulation.set_schedule(schedule)
        grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
        kernels.step(
            ours,
            grads,
            states_of(optimizers[0]),
            rounding_seeds=optimizers[0].rounding_seeds(),
            **settings_of(config),
        )
        optimizers[1].step(of_cpu, grads)
    # a 16-bit element may fall to its other neighbour where the float32 values differ in a bit
    spacing = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for core, expected in zip(ours, of_cpu, strict=True):
        torch.testing.assert_close(core, expected, rtol=spacing, atol=1e-6)
        if dtype != torch.float32:
            assert (core != expected).float().mean() < 0.02
    for state, expected in zip(*map(states_of, optimizers), strict=True):
        for moment, of_other in zip(state, expected, strict=True):
            torch.testing.assert_close(moment, of_other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_rounding_is_the_cpus_bit_for_bit(kernels, dtype, is_stochastic):
    kernels.emulation.set_schedule(0)
    special = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 65536.0, 3.3e38, 1e-40])
    special = torch.cat([special, torch.tensor([float("inf"), -float("inf"), float("nan")])])
    exponents = torch.arange(-150.0, 128.0).exp2()  # subnormal to near infinity
    generator = torch.Generator().manual_seed(6)
    values = (1 + torch.rand(37, 1, generator=generator)) * exponents
    halves = torch.arange(1.0, 64.0) * 2.0**-25  # ties of subnormal float16
    grads = [torch.cat([special, values.flatten(), -halves])[None]]
    cores = [torch.zeros(grads[0].shape, dtype=dtype) for _ in range(2)]
    seeds = [12345] if is_stochastic else []
    steps = [torch.full((1,), 41) for _ in range(2)]
    states = [[step] if is_stochastic else [] for step in steps]
    kernels.step(
        cores[:1],
        grads,
        states[:1],
        optimizer="sgd",
        settings=[-1.0, 0.0, 0.0, 0.0, 0.0],  # w = g
        decoupled_weight_decay=False,
        rounding_seeds=seeds,
    )
    step_cores(
        cores[1:],
        grads,
        states[1],
        optimizer="sgd",
        learning_rate=-1.0,
        eps=0.0,
        betas=(0.0, 0.0),
        weight_decay=0.0,
        decoupled_weight_decay=False,
        rounding_seeds=seeds,
    )
    assert torch.equal(cores[0].view(torch.int16), cores[1].view(torch.int16))
    assert not is_stochastic or int(steps[0]) == int(steps[1]) == 42


def test_slices_without_a_gradient_stay(kernels):
    for schedule in SCHEDULES:
        kernels.emulation.set_schedule(schedule)
        cores, touched = draw(torch.float32), [torch.zeros(m, dtype=torch.int32) for m, _ in SHAPES]
        touched[0][2] = touched[1][0] = 1
        kernels.step(
            cores,
            [torch.ones(shape) for shape in SHAPES],
            [[torch.zeros(m)] for m, _ in SHAPES],
            optimizer="rowwise_adagrad",
            settings=[0.5, 0.0, 0.0, 0.0, 0.0],
            decoupled_weight_decay=False,
            rounding_seeds=[],
            touched=touched,
        )
        for core, before, flags in zip(cores, draw(torch.float32), touched, strict=True):
            torch.testing.assert_close(core, before - 0.5 * flags[:, None])


def test_no_barrier_can_be_left_out(kernels):
    def step() -> None:
        test_steps_are_the_cpus(kernels, "rowwise_adagrad", torch.float32, (0.0, False))

    step()
    barriers = [b for b in kernels.emulation.barriers() if "step.cu" in b]
    assert len(barriers) == 2
    for barrier in barriers:
        with (
            kernels.emulation.without_barrier(barrier),
            pytest.raises((EmulationError, AssertionError)),
        ):
            step()
