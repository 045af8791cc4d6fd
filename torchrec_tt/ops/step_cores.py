"""Steps TT cores on dense gradients: the operator, its wrapper and its fake."""

from collections.abc import Sequence

from torch import Tensor

from torchrec_tt.ops.library import operators, register_fake


def step_cores(
    cores: Sequence[Tensor],  # core k [m_k, r_k * n_k * r_{k+1}], stepped in place
    grads: Sequence[Tensor],  # like the cores; float32, float64 for float64 cores
    states: Sequence[Tensor],  # of every core in turn, stepped in place
    *,
    optimizer: str,
    learning_rate: float,
    eps: float,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled_weight_decay: bool,
    rounding_seeds: Sequence[int] = (),
) -> None:
    """Takes one step of the optimizer on every slice of the cores (`TTOptimizerConfig`).

    A core's states are its moments (adagrad: sum like the core; rowwise_adagrad: sum [m_k]; adam:
    exp_avg and exp_avg_sq like the core), and then, for adam and with seeds, `step`, int64 [1],
    which is counted up. With one seed per core, 16-bit cores are rounded stochastically, keyed by
    seed, step and element; without, to nearest.

    Raises:
        ValueError: for an unknown optimizer, or tensors that do not fit each other.
    """
    operators().step_cores(
        cores,
        grads,
        states,
        optimizer,
        learning_rate,
        eps,
        *betas,
        weight_decay,
        decoupled_weight_decay,
        rounding_seeds,
    )


@register_fake("step_cores")
def _fake_step_cores(*arguments: object) -> None:
    """Returns nothing: the operator only writes."""
