"""Optimizers that step TT cores inside backward, as torch.optim would after it."""

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrec_tt.ops.step_cores import step_cores

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
_MOMENTS = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
_HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class TTOptimizerConfig:
    """Which optimizer steps the cores in backward, and how; defaults are those of the oracles.

    The oracles are torch.optim's SGD, Adagrad and Adam, and torchrec.optim's RowWiseAdagrad, whose
    row is the slice of a core that one digit selects:

    - sgd: `w -= lr * g`
    - adagrad: `s += g^2; w -= lr * g / (sqrt(s) + eps)`
    - rowwise_adagrad: the same with `s += mean(g^2)` over the slice, one number per slice
    - adam: dense, as torch.optim's: the moments of slices without a gradient decay too

    Args:
        optimizer: "sgd", "adagrad", "rowwise_adagrad" or "adam".
        learning_rate: the first one; later ones are read from `param_groups` at every step.
        eps: added to the root; None: 1e-8 for adam and 1e-10 for the two Adagrads, as the oracles
            have it (FBGEMM's default is 1e-8 for all).
        betas: of adam, the decay of its two moments.
        weight_decay: coupled, `g += weight_decay * w` before the step; it reaches every slice.
        decoupled_weight_decay: `w *= 1 - lr * weight_decay` instead (with adam: AdamW).
        stochastic_rounding: for bfloat16 and float16 cores: a stepped element is rounded up or
            down by chance, so that its expectation is exact and small steps are not lost. The
            chance depends on table, core, element and step, and on nothing else. False rounds to
            nearest.
        max_gradient: the gradient of a lookup's output is clamped to this size, element by
            element, before its backward (FBGEMM's `gradient_clipping`); None: it is not.
            `CoreOptimizer.step` takes the gradients of cores as they are.

    Raises:
        ValueError: for an unknown optimizer or a number out of range.
    """

    optimizer: OptimizerName = "sgd"
    learning_rate: float = 0.01
    eps: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    stochastic_rounding: bool = True
    max_gradient: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(OptimizerName):
            raise ValueError(
                f"optimizer must be one of {get_args(OptimizerName)}, got {self.optimizer!r}"
            )
        if self.eps is None:
            object.__setattr__(self, "eps", 1e-8 if self.optimizer == "adam" else 1e-10)
        for name in ("learning_rate", "eps", "weight_decay", "max_gradient"):
            value = getattr(self, name)
            if value is None and name == "max_gradient":
                continue
            if not isinstance(value, numbers.Real) or not float(value) >= 0:
                raise ValueError(f"{name} must be a number and not negative, got {value!r}")
        betas = self.betas if isinstance(self.betas, Sequence) else ()
        if len(betas) != 2 or not all(
            isinstance(b, numbers.Real) and 0 <= float(b) < 1 for b in betas
        ):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}")


class CoreOptimizer:
    """Steps a set of cores on given gradients.

    Args:
        cores: core k `[m_k, r_k * n_k * r_{k+1}]`, of one dtype; stepped in place.
        config: which optimizer and its settings.
        rounding_seeds: one per core, from its table and place, for the stochastic rounding of
            16-bit cores; None: their positions.

    Attributes:
        param_groups: one group, `{"params": cores, "lr": float}`; `lr` is read at every step.
        state: per core its moments in float32 (float64 for float64 cores): `sum` like the core for
            adagrad, `sum [m_k]` for rowwise_adagrad, `exp_avg` and `exp_avg_sq` like the core for
            adam. And `step`, int64 [1], for adam and where rounding is stochastic.
    """

    def __init__(
        self,
        cores: Sequence[Tensor],
        config: TTOptimizerConfig,
        *,
        rounding_seeds: Sequence[int] | None = None,
    ) -> None:
        if rounding_seeds is not None and len(rounding_seeds) != len(cores):
            raise ValueError(
                f"rounding_seeds must have one entry per core, {len(cores)}, got {rounding_seeds}"
            )
        self.config = config
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(cores), "lr": config.learning_rate}
        ]
        is_rounded = config.stochastic_rounding and cores[0].dtype in _HALF_DTYPES
        self._has_step = is_rounded or config.optimizer == "adam"
        seeds = range(len(cores)) if rounding_seeds is None else rounding_seeds
        self._rounding_seeds = dict(zip(cores, seeds, strict=True)) if is_rounded else {}
        self.state: dict[Tensor, dict[str, Tensor]] = {
            core: self._initial_state(core) for core in cores
        }

    def _initial_state(self, core: Tensor) -> dict[str, Tensor]:
        dtype = torch.float64 if core.dtype == torch.float64 else torch.float32
        size = core.shape[:1] if self.config.optimizer == "rowwise_adagrad" else core.shape
        state = {
            name: torch.zeros(size, dtype=dtype, device=core.device)
            for name in _MOMENTS[self.config.optimizer]
        }
        if self._has_step:
            state["step"] = torch.zeros(1, dtype=torch.int64, device=core.device)
        return state

    @property
    def is_fusable(self) -> bool:
        """Whether a step leaves cores without a gradient alone, so a kernel may skip them."""
        return self.config.weight_decay == 0 and self.config.optimizer != "adam"

    @property
    def learning_rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def states(self) -> list[Tensor]:
        """Returns the tensors that the kernels step along with the cores, in their order."""
        if not _MOMENTS[self.config.optimizer] and not self._has_step:
            return []  # asking every core is seen in the time of a small step
        return [tensor for state in self.state.values() for tensor in state.values()]

    def rounding_seeds(self) -> list[int]:
        """Returns the seeds of all cores, none where nothing is rounded by chance."""
        return list(self._rounding_seeds.values())

    @torch.no_grad()
    def step(self, cores: Iterable[Tensor], grads: Iterable[Tensor]) -> None:
        """Steps `cores`, all or some of the constructor's, on gradients of their sizes.

        The gradients are float32, float64 for float64 cores.
        """
        cores, config = list(cores), self.config
        assert config.eps is not None
        step_cores(
            cores,
            list(grads),
            [tensor for core in cores for tensor in self.state[core].values()],
            optimizer=config.optimizer,
            learning_rate=self.learning_rate,
            eps=config.eps,
            betas=config.betas,
            weight_decay=config.weight_decay,
            decoupled_weight_decay=config.decoupled_weight_decay,
            rounding_seeds=[self._rounding_seeds[core] for core in cores]
            if self._rounding_seeds
            else [],
        )
