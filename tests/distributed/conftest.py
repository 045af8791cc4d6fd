from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Ranks]:
    """Two nodes of two ranks each."""
    ranks = Ranks(4, local_world_size=2)
    yield ranks
    ranks.stop()
