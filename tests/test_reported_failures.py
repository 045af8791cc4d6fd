"""The table of reported failures names tests that exist, and every number that a test cites."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
TABLE = (ROOT / "tests/reported_failures.md").read_text()
ROWS = [line.split("|")[1:5] for line in TABLE.splitlines() if line.startswith("| U")]


def test_every_row_names_tests_that_exist():
    for number, *_, tests in ROWS:
        found = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert found, number
        assert len(found) == tests.count("::"), number
        for path, name in found:
            body = ast.parse((ROOT / path).read_text()).body
            names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
            assert name in names, f"{number}: {path} has no {name}"


def test_every_number_that_a_test_cites_has_one_row():
    numbers = [number.strip() for number, *_ in ROWS]
    assert numbers == sorted(set(numbers))
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    cited = set(re.findall(r"\bU\d\d\b", text)) | {
        f"U{digits}" for digits in re.findall(r"_u(\d\d)(?=_)", text)
    }
    assert cited == set(numbers)
