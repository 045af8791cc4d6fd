"""Features checked before the input distribution cuts them into blocks.

Afterwards an id is the row of some block, and one that was out of range cannot be told from it.
"""

import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
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

    On CUDA nothing waits for the device: bad ids read row 0 in every mode, and what was wrong is
    raised or said at a later batch.
    """

    def __init__(self, tables: Sequence[tuple[str, int] | None], *, check_mode: CheckMode) -> None:
        self._tables = list(tables)
        self._check_mode = check_mode
        self._has_warned = False
        self._on_device: _DeviceCheck | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features: KeyedJaggedTensor = args[0]
        if features.values().is_cuda:
            return (self._checked_on_device(features), *args[1:])
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

    def _checked_on_device(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if self._on_device is None:
            rows = [None if table is None else table[1] for table in self._tables]
            self._on_device = _DeviceCheck(rows, device=features.values().device)
        found = self._on_device.take_found()
        if found is not None:
            feature, bad_id = found
            table = self._tables[feature]
            assert table is not None
            self._report(table[0], rows=table[1], bad_id=bad_id)
        return _with_values(features, self._on_device.values(features))

    def _report(self, table: str, *, rows: int, bad_id: int) -> None:
        message = f"indices must be in [0, {rows}) for table {table!r}, got {bad_id}"
        if self._check_mode == "fatal":
            raise ValueError(message)
        if self._check_mode == "warning" and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{message}: such ids read row 0 (this is said once)", stacklevel=2)


class _DeviceCheck:
    """Finds ids out of range on the features' device, and tells the host when it comes to know.

    Args:
        rows: per feature, None where it is not checked.
    """

    def __init__(self, rows: Sequence[int | None], *, device: torch.device) -> None:
        unchecked = torch.iinfo(torch.int64)
        self._smallest = torch.tensor([unchecked.min if r is None else 0 for r in rows]).to(device)
        self._ends = torch.tensor([unchecked.max if r is None else r for r in rows]).to(device)
        self._found = torch.zeros(3, dtype=torch.int64, device=device)  # whether, feature, id
        pin_memory = device.type == "cuda"
        self._of_host = torch.zeros(3, dtype=torch.int64, pin_memory=pin_memory)

    def values(self, features: KeyedJaggedTensor) -> Tensor:
        """Returns the ids with 0 for those out of range, and notes the first of these."""
        values = features.values()
        if not values.numel():
            return values
        offsets = features.offsets()
        ends = torch.stack([offsets[end] for end in accumulate(features.stride_per_key())])
        places = torch.arange(values.numel(), device=values.device)
        feature = torch.searchsorted(ends.long(), places, right=True).clamp_(max=len(ends) - 1)
        is_bad = (values < self._smallest[feature]) | (values >= self._ends[feature])
        first = is_bad.int().argmax().view(1)
        now = torch.cat([t.index_select(0, first).long() for t in (is_bad, feature, values)])
        torch.where(self._found[0] > 0, self._found, now, out=self._found)
        self._of_host.copy_(self._found, non_blocking=True)
        return values.masked_fill(is_bad, 0)

    def take_found(self) -> tuple[int, int] | None:
        """Returns the feature and the id that were first out of range, once, if any is known of."""
        is_found, feature, bad_id = self._of_host.tolist()
        if not is_found:
            return None
        self._found.zero_()
        self._of_host.zero_()
        return feature, bad_id


def check_keys(features: KeyedJaggedTensor, *, needed: Iterable[str]) -> None:
    """Raises ValueError where a feature that a table reads is not there."""
    keys = features.keys()
    missing = [name for name in dict.fromkeys(needed) if name not in keys]
    if missing:
        raise ValueError(
            f"features must have a key for every feature of the tables, got {keys} "
            f"without {missing}"
        )


def check_lengths(features: KeyedJaggedTensor) -> None:
    """Raises ValueError for lengths that cannot be, where they are on the CPU.

    TorchRec checks their sum at most, and its CPU operators write where a negative length leads.
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
    total = int(lengths.sum())
    if total != num_ids:
        raise ValueError(f"lengths must add up to {num_ids}, the number of ids, got {total}")


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
