"""What the features of all ranks must agree in, as the collectives on them take for granted.

A rank whose keys come in another order would get other features' rows; one whose tensors are fewer
or of another size would end the others' processes in the backend.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_RULES = {  # of the ranks, by field
    "keys": "keys of features must be the same in the same order on every rank",
    "values": "values of features must have the same dtype on every rank",
    "lengths": "lengths of features must have the same dtype on every rank",
    "weights": "weights of features must be on every rank, of one dtype, or on none",
}


class FeaturesForm(NamedTuple):
    """A batch's keys, and the dtypes of its tensors; None for weights that are not there."""

    keys: list[str]
    values: torch.dtype
    lengths: torch.dtype
    weights: torch.dtype | None


def form_of(features: KeyedJaggedTensor) -> FeaturesForm:
    weights = features.weights_or_none()
    return FeaturesForm(
        keys=list(features.keys()),
        values=features.values().dtype,
        lengths=features.lengths().dtype,
        weights=None if weights is None else weights.dtype,
    )


def check_form_again(form: FeaturesForm, *, first: FeaturesForm) -> None:
    """Raises ValueError for other keys than the first batch had, or for weights where it had none.

    TorchRec notes the keys' places there, and would take one feature for another now. Dtypes may
    change, as long as they do so on all ranks.
    """
    if form.keys != first.keys:
        raise ValueError(
            f"features must have the keys of the first batch in its order, {first.keys}, "
            f"got {form.keys}"
        )
    if (form.weights is None) != (first.weights is None):
        had, has = ("no weights" if w is None else "weights" for w in (first.weights, form.weights))
        raise ValueError(f"features must have {had} as in the first batch, got {has}")


def check_same_form(form: FeaturesForm | ValueError, *, pg: dist.ProcessGroup) -> None:
    """Raises the same ValueError on every rank for features that differ between them.

    Args:
        form: this rank's, or what is wrong with its features.
        pg: the ranks, all of which call this.
    """
    message = str(form) if isinstance(form, ValueError) else None
    of_ranks: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(of_ranks, (message, form if message is None else None), group=pg)
    messages = [of_rank for of_rank, _ in of_ranks]
    if any(messages):
        is_same = len(set(messages)) == 1
        raise ValueError(
            messages[0]
            if is_same
            else "; ".join(f"rank {r}: {said}" for r, said in enumerate(messages) if said)
        )
    for name, rule in _RULES.items():
        fields = [getattr(form_of_rank, name) for _, form_of_rank in of_ranks]
        if any(field != fields[0] for field in fields):
            got = ", ".join(f"{field} on rank {r}" for r, field in enumerate(fields))
            raise ValueError(f"{rule} at the first batch, got {got}")
