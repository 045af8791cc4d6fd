import math

import pytest
import torch

from torchrec_tt.tt.traffic import Traffic, expected_prefixes, histogram_of

UNIFORM = Traffic(zipf_exponent=0)


def test_uniform_traffic_by_hand() -> None:
    assert UNIFORM.expected_unique(2, num_values=2) == pytest.approx(1.5)
    assert UNIFORM.expected_unique(3, num_values=3) == pytest.approx(3 * (1 - (2 / 3) ** 3))
    assert UNIFORM.expected_unique(0, num_values=5) == 0
    assert UNIFORM.hit_ratio(25, num_values=100) == pytest.approx(0.25)
    assert UNIFORM.hit_ratio(0, num_values=100) == pytest.approx(0)
    assert UNIFORM.hit_ratio(200, num_values=100) == 1


def test_a_histogram_by_hand() -> None:
    """One id gets half of the lookups, two get the rest."""
    traffic = Traffic(histogram=((1, 0.5), (2, 0.5)))
    assert traffic.expected_unique(3, num_values=1000) == pytest.approx(
        (1 - 0.5**3) + 2 * (1 - 0.75**3)
    )
    assert traffic.hit_ratio(1, num_values=1000) == 0.5
    assert traffic.hit_ratio(2, num_values=1000) == 0.75
    assert traffic.expected_unique_misses(3, num_values=1000, num_cached=1) == pytest.approx(
        2 * (1 - 0.75**3)
    )


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.05, 1.5])
def test_groups_of_ids_give_what_every_id_by_itself_gives(exponent: float) -> None:
    num_values = 50_000
    popularity = torch.arange(1, num_values + 1, dtype=torch.float64) ** -exponent
    popularity /= popularity.sum()
    traffic = Traffic(zipf_exponent=exponent)
    for draws in (10, 1000, 100_000):
        exact = float((1 - (1 - popularity) ** draws).sum())
        assert traffic.expected_unique(draws, num_values=num_values) == pytest.approx(
            exact, rel=2e-3
        )
        exact = float((1 - (1 - popularity[700:]) ** draws).sum())
        misses = traffic.expected_unique_misses(draws, num_values=num_values, num_cached=700)
        assert misses == pytest.approx(exact, rel=5e-3)
    exact = float(popularity[:700].sum())
    assert traffic.hit_ratio(700, num_values=num_values) == pytest.approx(exact, rel=5e-3)


def test_a_measured_histogram_gives_what_its_traffic_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    popularity = torch.arange(1, 1001, dtype=torch.float64) ** -1.05
    ids = torch.multinomial(popularity, 200_000, replacement=True, generator=generator)
    measured = Traffic(histogram=histogram_of(ids.bincount(minlength=1000).tolist()))
    expected = Traffic(zipf_exponent=1.05)
    for draws in (100, 2000):
        assert measured.expected_unique(draws, num_values=1000) == pytest.approx(
            expected.expected_unique(draws, num_values=1000), rel=0.03
        )
    assert measured.hit_ratio(50, num_values=1000) == pytest.approx(
        expected.hit_ratio(50, num_values=1000), rel=0.03
    )
    assert histogram_of([3, 0, 1]) == ((1, 0.75), (1, 0.25))


def test_prefixes_by_hand() -> None:
    assert expected_prefixes(5, num_values=10, num_prefixes=5) == pytest.approx(5 * (1 - 0.5**2))
    assert expected_prefixes(10, num_values=10, num_prefixes=5) == 5
    assert expected_prefixes(7, num_values=10, num_prefixes=10) == 7


def test_huge_tables_keep_their_digits() -> None:
    collisions = 1000 * 999 / 2 / 10**15
    unique = UNIFORM.expected_unique(1000, num_values=10**15)
    assert 1000 - unique == pytest.approx(collisions, abs=1e-6)
    assert math.isfinite(Traffic().expected_unique(1e9, num_values=10**10))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"zipf_exponent": -0.1}, "zipf_exponent must not be negative, got -0.1"),
        ({"zipf_exponent": "1"}, "zipf_exponent must not be negative, got '1'"),
        ({"histogram": ()}, "histogram must have positive"),
        ({"histogram": ((float("nan"), 1.0),)}, "histogram must have positive"),
        ({"histogram": [(1, 1.0)]}, "histogram must be a tuple of pairs"),
        ({"histogram": (1, 1.0)}, "histogram must be a tuple of pairs"),
        ({"histogram": ((1, 0.5), (2, 0.4))}, "shares that add up to 1, got 0.9"),
        ({"histogram": ((2, 0.4), (1, 0.6))}, "most popular ids first"),
    ],
)
def test_traffic_that_cannot_be_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Traffic(**kwargs)


def test_counts_without_a_lookup_are_refused() -> None:
    with pytest.raises(ValueError, match="counts must have a positive entry"):
        histogram_of([0, 0])
