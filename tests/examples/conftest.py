"""Lets the tests import the Criteo example's modules as its own script does."""

import resource
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "criteo"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def limit_files():
    """Sets how many bytes a file may have, here and in what is started, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
