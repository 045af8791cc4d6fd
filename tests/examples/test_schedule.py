import pytest
import torch
from schedule import Schedule


def rates(steps, **kwargs):
    schedule = Schedule(base_rate=2.0, **kwargs)
    return [schedule.rate(step) for step in steps]


def test_rate_rises_in_a_line_stays_and_falls_as_a_parabola():
    found = rates(range(1, 12), warmup_steps=4, decay_start=6, decay_steps=4)
    half = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 9 / 16, 4 / 16, 1 / 16, 1 / 16, 1 / 16]
    assert found == pytest.approx([2 * value for value in half])


def test_rate_without_a_schedule_stays():
    assert rates([1, 2, 99], warmup_steps=0, decay_start=0, decay_steps=0) == [2.0] * 3


def test_rate_does_not_fall_to_nothing():
    assert rates([10**6], warmup_steps=0, decay_start=0, decay_steps=10**5) == [1e-7]


def test_groups_of_rate_0_are_frozen():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.0}, {"params": [b]}], lr=2.0)
    schedule = Schedule(base_rate=2.0, warmup_steps=4, decay_start=0, decay_steps=0)
    assert schedule.set_rate(optimizer, 1) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.5]
