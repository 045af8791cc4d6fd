"""Steps the cached rows of a batch on their gradients: the operator, its wrapper and its fake."""

from collections.abc import Sequence

from torch import Tensor

from torchrec_tt.ops.library import operators, register_fake
from torchrec_tt.ops.lookup import Lookup


def step_cached_rows(
    grad_output: Tensor,  # [B, sum over features of D]
    plan: list[Tensor],  # made with cache_ids
    *,
    cache_ids: Sequence[Tensor],  # of every table in turn, [C]
    cached_rows: Sequence[Tensor],  # of every table in turn, [C, D], stepped; [0]: none of them
    states: Sequence[Tensor],  # of every stepped table in turn, stepped
    offsets: Tensor,  # [F * B + 1]
    lookup: Lookup,
    optimizer: str,
    learning_rate: float,
    eps: float,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled_weight_decay: bool,
    rounding_seeds: Sequence[int] = (),  # one per stepped table, or none
    per_sample_weights: Tensor | None = None,  # [N]
) -> None:
    """Takes one step of the optimizer on the cached rows that the batch asked for.

    A row without an index stays as it is, its moments too: adam is lazy, and weight decay reaches
    only the rows of the batch. A table's states are its moments (adagrad: sum [C, D];
    rowwise_adagrad: sum [C]; adam: exp_avg and exp_avg_sq [C, D]), and then, for adam and with
    seeds, `step`, int64 [1], which is counted up. With seeds, rows of 16 bits are rounded
    stochastically, keyed by seed, step, row id and column; without, to nearest.

    Raises:
        ValueError: for an unknown optimizer, or tensors that do not fit each other.

    Reference:
        FBGEMM's SplitTableBatchedEmbeddingBags, which steps the rows of a batch alike: one count
        of steps for the bias correction of all rows of a table.
    """
    operators().step_cached_rows(
        grad_output.contiguous(),
        plan,
        cache_ids,
        cached_rows,
        states,
        offsets,
        per_sample_weights,
        lookup.encoded_tables,
        lookup.feature_tables,
        lookup.pooling,
        optimizer,
        learning_rate,
        eps,
        *betas,
        weight_decay,
        decoupled_weight_decay,
        rounding_seeds,
    )


def advise_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Asks the system to hold tensors on the CPU in huge pages (Linux); their values stay.

    Cached rows lie anywhere in their memory: at 16384 lookups of 100,000 rows of 256 bytes, a
    training step is 5 % shorter with pages of 2 MiB. Smaller tensors, and those elsewhere, stay as
    they are, and so do all where the system declines.
    """
    if on_cpu := [tensor for tensor in tensors if tensor.is_cpu]:
        operators().advise_huge_pages(on_cpu)


@register_fake("step_cached_rows")
def _fake_step_cached_rows(*arguments: object) -> None:
    """Returns nothing: the operator only writes."""


@register_fake("advise_huge_pages")
def _fake_advise_huge_pages(tensors: list[Tensor]) -> None:
    """Returns nothing: what has no values lies nowhere."""
