"""Features checked before the input distribution cuts them into blocks.

Afterwards an id is the row of some block, and one that was out of range cannot be told from it.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_tt.ops.lookup import CheckMode


class RowWiseBoundsCheck:
    """A forward pre-hook of a row-wise input distribution.

    Args:
        tables: per feature of the distribution the name and the rows of its table, None where
            it is a regular one, which TorchRec's kernels check.
        check_mode: "fatal" raises on the rank that holds the id, before any collective;
            "warning" (said once) and "ignore" read row 0.
    """

    def __init__(self, tables: Sequence[tuple[str, int] | None], *, check_mode: CheckMode) -> None:
        self._tables = list(tables)
        self._check_mode = check_mode
        self._has_warned = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features: KeyedJaggedTensor = args[0]
        values = features.values()
        ends = features.offset_per_key()
        for table, begin, end in zip(self._tables, ends[:-1], ends[1:], strict=True):
            if table is None or begin == end:
                continue
            ids = values[begin:end]
            name, rows = table
            smallest, largest = ids.aminmax()
            if smallest >= 0 and largest < rows:
                continue
            is_bad = (ids < 0) | (ids >= rows)
            self._report(name, rows=rows, bad_id=int(ids[is_bad][0]))
            if values is features.values():
                values = values.clone()
            values[begin:end].masked_fill_(is_bad, 0)
        if values is features.values():
            return args
        return (_with_values(features, values), *args[1:])

    def _report(self, table: str, *, rows: int, bad_id: int) -> None:
        message = f"indices must be in [0, {rows}) for table {table!r}, got {bad_id}"
        if self._check_mode == "fatal":
            raise ValueError(message)
        if self._check_mode == "warning" and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{message}: such ids read row 0 (this is said once)", stacklevel=2)


def check_keys(features: KeyedJaggedTensor, *, needed: Iterable[str]) -> None:
    """Raises ValueError where a feature that a table reads is not there."""
    keys = features.keys()
    missing = [name for name in needed if name not in keys]
    if missing:
        raise ValueError(
            f"features must have a key for every feature of the tables, got {keys} "
            f"without {missing}"
        )


def check_keys_again(features: KeyedJaggedTensor, *, first: Sequence[str]) -> None:
    """Raises ValueError for other keys than the first batch had.

    TorchRec notes their places there, and would take one feature for another now.
    """
    if features.keys() != first:
        raise ValueError(
            f"features must have the keys of the first batch in its order, {list(first)}, "
            f"got {features.keys()}"
        )


def check_lengths(features: KeyedJaggedTensor) -> None:
    """Raises ValueError for lengths that cannot be, where they are on the CPU.

    TorchRec checks their sum alone, and its CPU operators write where a negative length leads them.
    """
    lengths = features.lengths()
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    smallest, largest = lengths.aminmax()
    num_ids = features.values().numel()
    if smallest < 0 or largest > num_ids:
        raise ValueError(
            f"lengths must be in [0, {num_ids}], the number of ids, got {int(smallest)} to "
            f"{int(largest)}"
        )


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns features that FBGEMM's kernels, asked or not, cannot weight."""
    if features.weights_or_none() is None:
        return features
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        offsets=features.offsets_or_none(),
        stride=features.stride(),
    )


def _with_values(features: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        offsets=features.offsets_or_none(),
        stride=features.stride(),
    )
