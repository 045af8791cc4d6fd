"""Which ids lookups ask for: distinct ones in a batch and hits of a cache, by arithmetic."""

import functools
import itertools
import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CRITEO_EXPONENT = 1.05  # of Zipf's law: near what the large Criteo columns follow
_EXACT_IDS = 64  # of the most popular ones, each a group of its own
_GROUP_GROWTH = 1.15  # every further group of ids is so much longer than the one before


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """How often each id of a table is asked for.

    The id of the `k`-th rank of popularity is drawn with a probability proportional to
    `k ** -zipf_exponent`, or as a measured histogram says. Popular ids are scattered over the rows,
    as hashed ids are. The formulas take the ids in groups of equal probability: the first 64 by
    themselves, then groups that grow by 15 %.

    Attributes:
        zipf_exponent: 0 is uniform. Not read where there is a histogram.
        histogram: pairs of a number of ids and the share of the lookups that goes to them, the
            most popular ids first. Ids of the table beyond those listed are never asked for.

    Raises:
        ValueError: for a negative exponent, or a histogram that is none: counts must be positive,
            shares add up to 1 and fall per id.

    Example:
        >>> Traffic(zipf_exponent=0).hit_ratio(10, num_values=100)
        0.1
    """

    zipf_exponent: float = CRITEO_EXPONENT
    histogram: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        if (
            not isinstance(self.zipf_exponent, numbers.Real)
            or not 0 <= self.zipf_exponent < math.inf
        ):
            raise ValueError(f"zipf_exponent must not be negative, got {self.zipf_exponent!r}")
        if self.histogram is not None:
            _check_histogram(self.histogram)

    def of_shard(self, num_shards: int) -> "Traffic":
        """Returns the traffic of one of `num_shards` blocks of the rows, popular ids scattered."""
        if self.histogram is None or num_shards == 1:
            return self
        return Traffic(histogram=tuple((n / num_shards, share) for n, share in self.histogram))

    def expected_unique(self, num_draws: float, *, num_values: int) -> float:
        """Returns the expected number of distinct ids among `num_draws` of `num_values` ids.

        An id of a group of `n` ids that gets the share `s` is missed by all `k` draws with
        probability `(1 - s/n)^k`, so a group contributes `n (1 - (1 - s/n)^k)`.
        """
        seen = 0.0
        for n, share in self._groups(num_values):
            missed = -math.inf if share >= n else math.log1p(-share / n)
            seen -= n * math.expm1(num_draws * missed) if num_draws else 0.0
        return min(seen, num_draws)

    def expected_unique_misses(
        self, num_draws: float, *, num_values: int, num_cached: float
    ) -> float:
        """Returns the expected number of distinct ids beyond the `num_cached` most popular ones."""
        seen = 0.0
        for n, share in _beyond(self._groups(num_values), num_cached):
            missed = -math.inf if share >= n else math.log1p(-share / n)
            seen -= n * math.expm1(num_draws * missed) if num_draws else 0.0
        return min(seen, num_draws)

    def hit_ratio(self, num_cached: float, *, num_values: int) -> float:
        """Returns the share of the lookups that the `num_cached` most popular ids get."""
        return 1.0 - sum(share for _, share in _beyond(self._groups(num_values), num_cached))

    def effective_ids(self, num_values: int) -> float:
        """Returns how many equally popular ids would have the entropy of these."""
        entropy = -sum(
            share * math.log(share / n) for n, share in self._groups(num_values) if share > 0
        )
        return math.exp(entropy)

    def _groups(self, num_values: int) -> tuple[tuple[float, float], ...]:
        if num_values < 1:
            raise ValueError(f"num_values must be positive, got {num_values}")
        if self.histogram is not None:
            return self.histogram
        return _zipf_groups(self.zipf_exponent, num_values)


def expected_prefixes(num_rows: float, *, num_values: int, num_prefixes: int) -> float:
    """Returns the expected distinct prefixes of `num_rows` distinct rows that lie scattered.

    A prefix has `m = num_values / num_prefixes` rows and is missed if all of them are, so
    `num_prefixes * (1 - (1 - num_rows / num_values)^m)`.
    """
    if num_rows >= num_values:
        return float(min(num_prefixes, num_values))
    rows_of_prefix = num_values / num_prefixes
    if rows_of_prefix <= 1:
        return num_rows
    return -num_prefixes * math.expm1(rows_of_prefix * math.log1p(-num_rows / num_values))


def histogram_of(counts: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Returns the histogram of measured lookups per id, in any order; zeros are left out.

    Raises:
        ValueError: if no count is positive.
    """
    ordered = sorted((count for count in counts if count > 0), reverse=True)
    if not ordered:
        raise ValueError("counts must have a positive entry, got none")
    total = sum(ordered)
    return tuple(
        (last - first + 1, sum(ordered[first - 1 : last]) / total)
        for first, last in _bounds(len(ordered))
    )


def _bounds(num_values: int) -> Iterator[tuple[int, int]]:
    """First and last rank of popularity of each group."""
    first = 1
    while first <= num_values:
        last = first if first <= _EXACT_IDS else min(num_values, int(first * _GROUP_GROWTH))
        yield first, last
        first = last + 1


@functools.lru_cache(maxsize=4096)
def _zipf_groups(exponent: float, num_values: int) -> tuple[tuple[float, float], ...]:
    groups = [
        (float(last - first + 1), _zipf_mass(exponent, first, last))
        for first, last in _bounds(num_values)
    ]
    total = sum(mass for _, mass in groups)
    return tuple((n, mass / total) for n, mass in groups)


def _zipf_mass(exponent: float, first: int, last: int) -> float:
    """Sum of `k ** -exponent`, as the integral from half before the first to half past the last."""
    if first == last:
        return first**-exponent
    low, high = first - 0.5, last + 0.5
    if exponent == 1:
        return math.log(high / low)
    return (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)


def _beyond(groups: Sequence[tuple[float, float]], num_cached: float) -> list[tuple[float, float]]:
    """The groups without the `num_cached` most popular ids; the one that is cut shares evenly."""
    left = []
    for n, share in groups:
        cached = min(n, max(0.0, num_cached))
        num_cached -= n
        if cached < n:
            left.append((n - cached, share * (1 - cached / n)))
    return left


def _check_histogram(histogram: tuple[tuple[float, float], ...]) -> None:
    is_tuple = isinstance(histogram, tuple)  # it is hashed
    if not is_tuple or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in histogram):
        raise ValueError(f"histogram must be a tuple of pairs in tuples, got {histogram!r:.80}")
    if not histogram or not all(0 < n < math.inf and share > 0 for n, share in histogram):
        raise ValueError(
            f"histogram must have positive numbers of ids and shares, got {histogram[:8]}"
        )
    if not math.isclose(sum(share for _, share in histogram), 1.0, rel_tol=1e-6):
        total = sum(share for _, share in histogram)
        raise ValueError(f"histogram must have shares that add up to 1, got {total}")
    per_id = [share / n for n, share in histogram]
    if any(b > a * (1 + 1e-9) for a, b in itertools.pairwise(per_id)):
        raise ValueError("histogram must have the most popular ids first, got a rising share")
