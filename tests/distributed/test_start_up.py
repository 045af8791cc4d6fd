"""What it takes to plan and shard large tables and many of them."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started() -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.start_up"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_table_of_a_billion_rows_starts_in_seconds_and_little_memory(
    started: dict[str, Any],
) -> None:
    took = started["a_billion_rows"]
    assert took["seconds"] < 5
    assert took["bytes"] < 200e6


def test_a_hundred_tables_shard_over_16_ranks(started: dict[str, Any]) -> None:
    tables = started["a_hundred_tables"]
    assert tables["tables"] == tables["expected"]
    assert 10 <= len(tables["tables"]) < 20  # some are elsewhere
