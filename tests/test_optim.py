import math

import pytest
import torch
from torchrec.optim import RowWiseAdagrad

from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "lamb"}, r"optimizer must be one of \('sgd', .*'adam'\), got 'lamb'"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": "ab"}, r"betas must be two numbers in \[0, 1\), got 'ab'"),
        ({"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
        ({"learning_rate": -1.0}, "learning_rate must be a number and not negative, got -1.0"),
        ({"learning_rate": "0.1"}, "learning_rate must be a number and not negative, got '0.1'"),
        ({"eps": float("nan")}, "eps must be a number and not negative, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be a number and not negative, got -0.1"),
        ({"weight_decay": None}, "weight_decay must be a number and not negative, got None"),
    ],
)
def test_settings_that_do_not_fit_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        TTOptimizerConfig(**arguments)


def test_another_number_of_seeds_than_cores_raises():
    cores = [torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(5, 2, dtype=torch.bfloat16)]
    with pytest.raises(
        ValueError, match=r"rounding_seeds must have one entry per core, 2, got \[1"
    ):
        CoreOptimizer(cores, TTOptimizerConfig(), rounding_seeds=[1])


def test_sgd_has_no_state_and_adagrad_a_sum_like_each_core():
    cores = [torch.ones(2, 3, requires_grad=True), torch.ones(4, 5, requires_grad=True)]
    assert CoreOptimizer(cores, TTOptimizerConfig()).states() == []
    states = CoreOptimizer(cores, TTOptimizerConfig(optimizer="adagrad")).states()
    assert [state.shape for state in states] == [core.shape for core in cores]
    assert not any(state.requires_grad for state in states)


def test_one_adagrad_step_by_hand():
    core = torch.tensor([[1.0, 2.0]])
    config = TTOptimizerConfig(optimizer="adagrad", learning_rate=0.5, eps=1.0, weight_decay=1.0)
    optimizer = CoreOptimizer([core], config)
    optimizer.step([core], [torch.tensor([[2.0, -2.0]])])
    # g = (2 + 1, -2 + 2) = (3, 0); s = (9, 0); w -= 0.5 * g / (sqrt(s) + 1)
    assert core.tolist() == [[1.0 - 0.5 * 3 / 4, 2.0]]
    assert optimizer.states()[0].tolist() == [[9.0, 0.0]]


def test_empty_cores_raise():
    core = torch.ones(3, 0)
    with pytest.raises(ValueError, match=r"cores must be .* not empty, core 0 is not"):
        CoreOptimizer([core], TTOptimizerConfig()).step([core], [core])


def oracle(cores, config: TTOptimizerConfig) -> torch.optim.Optimizer:
    settings = {"lr": config.learning_rate, "eps": config.eps, "weight_decay": config.weight_decay}
    if config.optimizer == "adam":
        kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
        return kind(cores, betas=config.betas, **settings)
    if config.optimizer == "rowwise_adagrad":
        return RowWiseAdagrad(cores, **settings)
    if config.optimizer == "adagrad":
        return torch.optim.Adagrad(cores, **settings)
    del settings["eps"]
    return torch.optim.SGD(cores, **settings)


# U38
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_steps_equal_the_oracle(optimizer, weight_decay, eps, dtype):
    config = TTOptimizerConfig(
        optimizer="adam" if optimizer == "adamw" else optimizer,
        learning_rate=0.1,
        eps=eps,
        betas=(0.8, 0.95),
        weight_decay=weight_decay,
        decoupled_weight_decay=optimizer == "adamw",
    )
    generator = torch.Generator().manual_seed(0)
    cores = [torch.randn(size, generator=generator, dtype=dtype) for size in ((7, 300), (3, 5))]
    expected = [core.clone().requires_grad_() for core in cores]
    ours, theirs = CoreOptimizer(cores, config), oracle(expected, config)
    for lr in (0.1,) * 5 + (0.03,) * 5:
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = lr
        for core in expected:
            core.grad = torch.randn(core.shape, generator=generator, dtype=dtype)
        ours.step(cores, [core.grad for core in expected])
        theirs.step()
    for core, other in zip(cores, expected, strict=True):
        torch.testing.assert_close(core, other.detach())
        for name in set(ours.state[core]) - {"step"}:
            wanted = theirs.state[other][name].reshape(ours.state[core][name].shape)
            torch.testing.assert_close(ours.state[core][name], wanted)


def steps(core, *, count: int, size: float, **kwargs) -> torch.Tensor:
    config = TTOptimizerConfig(learning_rate=1.0, **kwargs)
    optimizer = CoreOptimizer([core], config, rounding_seeds=[5])
    for _ in range(count):
        optimizer.step([core], [torch.full(core.shape, -size)])
    return core


# U38: at gradients of 1e-9, eps of 1e-8 or 1e-10 make steps that differ by a factor of ten.
@pytest.mark.parametrize("settings", [{}, {"eps": 1e-8}, {"eps": 1e-10}])
@pytest.mark.parametrize(
    ("name", "oracle_type"), [("adagrad", torch.optim.Adagrad), ("rowwise_adagrad", RowWiseAdagrad)]
)
def test_eps_counts_as_in_torch_and_is_torchs_by_default(name, oracle_type, settings):
    core, expected = torch.zeros(5, 8), torch.zeros(5, 8, requires_grad=True)
    expected.grad = torch.randn(5, 8) * 1e-9
    config = TTOptimizerConfig(optimizer=name, learning_rate=0.1, **settings)
    CoreOptimizer([core], config).step([core], [expected.grad])
    oracle_type([expected], lr=0.1, **settings).step()
    torch.testing.assert_close(core, expected.detach(), rtol=1e-5, atol=1e-6)


# U37
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_add_up_only_with_stochastic_rounding(dtype):
    core = steps(torch.ones(40, 25, dtype=dtype), count=1000, size=1e-4)
    # Each of the 1000 elements climbs by chance: a step of the dtype's spacing s at 1 (s = 2^-7 or
    # 2^-10) with probability 1e-4 / s, so the mean's deviation is below sqrt(1000 s 1e-4 / 1000).
    spacing = torch.finfo(dtype).eps
    deviation = math.sqrt(1e-4 * spacing)
    assert abs(core.double().mean().item() - 1.1) < 4 * deviation
    assert core.unique().numel() > 3
    nearest = torch.ones(40, 25, dtype=dtype)
    steps(nearest, count=1000, size=1e-4, stochastic_rounding=False)
    assert torch.equal(nearest, torch.ones(40, 25, dtype=dtype))


# U37
def test_stochastic_rounding_depends_on_seed_step_and_element_alone():
    first, second = (
        steps(torch.ones(40, 25, dtype=torch.bfloat16), count=10, size=1e-3) for _ in range(2)
    )
    assert torch.equal(first, second)
    config = TTOptimizerConfig(learning_rate=1.0)
    other = torch.ones(40, 25, dtype=torch.bfloat16)
    optimizer = CoreOptimizer([other], config, rounding_seeds=[6])
    for _ in range(10):
        optimizer.step([other], [torch.full(other.shape, -1e-3)])
    assert not torch.equal(first, other)
    assert optimizer.state[other]["step"].tolist() == [10]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_every_16_bit_value_survives_a_step_of_zero(dtype, is_stochastic):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(256, 256)
    core = values.clone()
    config = TTOptimizerConfig(stochastic_rounding=is_stochastic)
    CoreOptimizer([core], config).step([core], [torch.zeros(256, 256)])
    assert torch.equal(core.isnan(), values.isnan())
    same = core.view(torch.int16) == values.view(torch.int16)
    assert torch.all(same | values.isnan() | (values == 0))  # -0 + 0 = 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_nearest_is_that_of_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    size = torch.empty(64, 1024).uniform_(-26, 17, generator=generator).exp2()
    wanted = torch.randn(64, 1024, generator=generator) * size
    core = torch.zeros(64, 1024, dtype=dtype)
    config = TTOptimizerConfig(learning_rate=1.0, stochastic_rounding=False)
    CoreOptimizer([core], config).step([core], [-wanted])
    assert torch.equal(core, wanted.to(dtype))


def test_stochastic_rounding_takes_one_of_the_two_neighbours_in_proportion():
    # 2^-24 is the smallest float16: a quarter of it becomes 0 or 2^-24; 1 + 2^-12 lies a quarter
    # of the way from 1 to its next.
    for start, step, up in ((0.0, 2.0**-26, 2.0**-24), (1.0, 2.0**-12, 1 + 2.0**-10)):
        core = torch.full((100, 1000), start, dtype=torch.float16)
        steps(core, count=1, size=step)
        assert set(core.unique().tolist()) == {start, up}
        assert abs((core == up).double().mean().item() - 0.25) < 0.006  # 4 deviations
