"""Optimizers that step TT cores inside backward, as torch.optim would after it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

OptimizerName = Literal["sgd", "adagrad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TTOptimizerConfig:
    """Which optimizer steps the cores in backward, and how; defaults are torch.optim's.

    Args:
        optimizer: "sgd" (`w -= lr * g`) or "adagrad" (`s += g * g; w -= lr * g / (sqrt(s) + eps)`).
        learning_rate: the first one; later ones are read from `param_groups` at every step.
        eps: of adagrad.
        weight_decay: coupled, `g += weight_decay * w` before the step.

    Raises:
        ValueError: for an unknown optimizer or a negative number.
    """

    optimizer: OptimizerName = "sgd"
    learning_rate: float = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            raise ValueError(
                f"optimizer must be one of {get_args(OptimizerName)}, got {self.optimizer!r}"
            )
        for name in ("learning_rate", "eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")


class CoreOptimizer:
    """Steps a set of cores on given gradients.

    Args:
        cores: stepped in place.
        config: which optimizer and its settings.

    Attributes:
        param_groups: one group, `{"params": cores, "lr": float}`; `lr` is read at every step.
        state: per core, `{"sum": Tensor}` (squared gradients, like the core) for adagrad, `{}` for
            sgd.
    """

    def __init__(self, cores: Sequence[Tensor], config: TTOptimizerConfig) -> None:
        self.config = config
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(cores), "lr": config.learning_rate}
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            core: {"sum": torch.zeros_like(core, requires_grad=False)}
            if config.optimizer == "adagrad"
            else {}
            for core in cores
        }

    @property
    def is_fusable(self) -> bool:
        """Whether a step leaves cores without a gradient alone, so a kernel may skip them."""
        return self.config.weight_decay == 0

    @property
    def learning_rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def states(self) -> list[Tensor]:
        """Returns the tensors that the fused kernel steps along with the cores, in their order."""
        return [tensor for state in self.state.values() for tensor in state.values()]

    @torch.no_grad()
    def step(self, cores: Iterable[Tensor], grads: Iterable[Tensor]) -> None:
        """Steps `cores`, all or some of the constructor's, on gradients like them."""
        cores, grads = list(cores), list(grads)
        if self.config.weight_decay:
            grads = torch._foreach_add(grads, cores, alpha=self.config.weight_decay)
        if self.config.optimizer == "sgd":
            torch._foreach_add_(cores, grads, alpha=-self.learning_rate)
            return
        sums = [self.state[core]["sum"] for core in cores]
        torch._foreach_addcmul_(sums, grads, grads)
        deviations = torch._foreach_sqrt(sums)
        torch._foreach_add_(deviations, self.config.eps)
        torch._foreach_addcdiv_(cores, grads, deviations, value=-self.learning_rate)
