import pytest
import torch

from torchrec_tt.optim import CoreOptimizer, TTOptimizerConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "lamb"}, r"optimizer must be one of \('sgd', 'adagrad'\), got 'lamb'"),
        ({"learning_rate": -1.0}, "learning_rate must not be negative, got -1.0"),
        ({"eps": float("nan")}, "eps must not be negative, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
    ],
)
def test_settings_that_do_not_fit_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        TTOptimizerConfig(**arguments)


def test_sgd_has_no_state_and_adagrad_a_sum_like_each_core():
    cores = [torch.ones(2, 3, requires_grad=True), torch.ones(4, 5, requires_grad=True)]
    assert CoreOptimizer(cores, TTOptimizerConfig()).states() == []
    states = CoreOptimizer(cores, TTOptimizerConfig(optimizer="adagrad")).states()
    assert [state.shape for state in states] == [core.shape for core in cores]
    assert not any(state.requires_grad for state in states)


def test_one_adagrad_step_by_hand():
    core = torch.tensor([1.0, 2.0])
    config = TTOptimizerConfig(optimizer="adagrad", learning_rate=0.5, eps=1.0, weight_decay=1.0)
    optimizer = CoreOptimizer([core], config)
    optimizer.step([core], [torch.tensor([2.0, -2.0])])
    # g = (2 + 1, -2 + 2) = (3, 0); s = (9, 0); w -= 0.5 * g / (sqrt(s) + 1)
    assert core.tolist() == [1.0 - 0.5 * 3 / 4, 2.0]
    assert optimizer.states()[0].tolist() == [9.0, 0.0]
