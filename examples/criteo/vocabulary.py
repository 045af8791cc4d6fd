"""Vocabularies of prepare.py: a column's ids, counted over all segments, and their new numbers.

0 is an id that no vocabulary has, 1 one that occurs too seldom, and the others follow from 2 on, as
in TorchRec's `sparse_to_contiguous`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FIRST_NUMBER = 2
RARE = 1
UNKNOWN = 0

_MERGED_ENTRIES = 1 << 20  # counts merged at once
_SAMPLES = 64  # of each run, to cut the ids into parts
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def build(
    counts: Path,
    run_lengths: Sequence[int],
    *,
    frequency_threshold: int,
    is_by_frequency: bool,
    max_ids: int,
) -> NDArray[np.uint32]:  # [2, V]: ids in ascending order, and their numbers
    """Returns the vocabulary of a column.

    Takes 32 bytes for each of its ids, and 50 MB.

    Args:
        counts: runs of uint64 `id << 32 | count`, each in ascending order.
        run_lengths: of the runs.
        frequency_threshold: ids that occur less often are left out.
        is_by_frequency: number the most frequent id first (equally frequent ones by id; counts
            above 2**32 - 1 are equal); else by id.
        max_ids: more are an error.

    Raises:
        ValueError: for more than `max_ids`.
    """
    parts, num_ids = [np.empty(0, np.uint64)], 0
    for part in _merged(counts, run_lengths):
        kept = part[(part & _LOW) >= frequency_threshold]
        num_ids += len(kept)
        if num_ids > max_ids:
            raise ValueError(f"must have at most {max_ids} ids, got {num_ids} or more")
        parts.append(kept)
    entries = np.concatenate(parts)
    del parts
    ids = entries >> _SHIFT
    numbers = np.arange(len(ids), dtype=np.uint32)
    if is_by_frequency:
        order = np.sort(((_LOW - (entries & _LOW)) << _SHIFT) | ids) & _LOW  # ids by their number
        order <<= _SHIFT
        order |= numbers
        order.sort()
        numbers = (order & _LOW).astype(np.uint32)
    return np.stack([ids.astype(np.uint32), numbers + np.uint32(FIRST_NUMBER)])


def look_up(
    vocabulary: NDArray[np.uint32],  # [2, V], see `build`
    ids: NDArray[np.uint32],  # [N]
) -> NDArray[np.int32]:  # [N]
    """Returns the ids' numbers; RARE for those that the vocabulary does not have."""
    known, numbers = vocabulary
    # Sorted ids walk through the vocabulary once, and equal ones are looked up once.
    keys = (ids.astype(np.uint64) << _SHIFT) | np.arange(len(ids), dtype=np.uint64)
    keys.sort()
    ordered = (keys >> _SHIFT).astype(np.uint32)
    starts = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))
    distinct = ordered[starts]
    found = np.full(len(distinct), RARE, np.int32)
    if len(known):
        places = np.searchsorted(known, distinct).clip(max=len(known) - 1)
        found = np.where(known[places] == distinct, numbers[places], RARE).astype(np.int32)
    out = np.empty(len(ids), np.int32)
    out[keys & _LOW] = np.repeat(found, np.diff(starts, append=len(ids)))
    return out


def _merged(counts: Path, run_lengths: Sequence[int]) -> Iterator[NDArray[np.uint64]]:
    """Yields `id << 32 | count` over all runs in ascending order, counts up to 2**32 - 1."""
    total = sum(run_lengths)
    if not total:
        return
    entries = np.memmap(counts, np.uint64, mode="r", shape=(total,))
    runs = np.split(entries, np.cumsum(run_lengths)[:-1])
    num_parts = -(-total // _MERGED_ENTRIES)
    samples = np.sort(np.concatenate([run[:: max(1, len(run) // _SAMPLES)] for run in runs]))
    cuts = samples[np.arange(1, num_parts) * len(samples) // num_parts] >> _SHIFT << _SHIFT
    bounds = [
        np.concatenate([[0], np.searchsorted(run, cuts), [len(run)]]).astype(np.int64)
        for run in runs
    ]
    for i in range(num_parts):
        part = np.concatenate(
            [run[bound[i] : bound[i + 1]] for run, bound in zip(runs, bounds, strict=True)]
        )
        if not len(part):
            continue
        part.sort()
        ids = part >> _SHIFT
        starts = np.flatnonzero(np.diff(ids, prepend=~ids[:1]))
        sums = np.minimum(np.add.reduceat(part & _LOW, starts), _LOW)
        yield (ids[starts] << _SHIFT) | sums
