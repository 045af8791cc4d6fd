import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers in every run, whichever tests are chosen."""
    torch.manual_seed(0)
