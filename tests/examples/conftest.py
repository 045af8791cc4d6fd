"""Lets the tests import the Criteo example's modules as its own script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "criteo"))
sys.path.insert(0, str(Path(__file__).parent))
