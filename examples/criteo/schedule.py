"""The learning rate over the steps: a linear warm-up, then a fall as a parabola."""

from dataclasses import dataclass

from torch.optim import Optimizer

_LEAST_RATE = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A rate for each step, counted from 1, as facebookresearch/dlrm's LRPolicyScheduler has it.

    In the warm-up it is `step / warmup_steps` of the base rate. From `decay_start` on it is
    `((decay_steps - (step - decay_start)) / decay_steps) ** 2` of it, never below 1e-7, and after
    `decay_steps` what it was at their last. In between it is the base rate (there: the rate of the
    last step of the warm-up).
    """

    base_rate: float
    warmup_steps: int
    decay_start: int
    decay_steps: int

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        if step < self.warmup_steps:
            return self.base_rate * step / self.warmup_steps
        if not self.decay_steps or step < self.decay_start:
            return self.base_rate
        decayed = min(step - self.decay_start, self.decay_steps - 1)
        left = (self.decay_steps - decayed) / self.decay_steps
        return max(_LEAST_RATE, self.base_rate * left**2)

    def set_rate(self, optimizer: Optimizer, step: int) -> float:
        """Gives every group that is not frozen the rate of a step, and returns it."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            if group["lr"] != 0.0:
                group["lr"] = rate
        return rate
