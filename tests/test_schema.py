from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from torchrec_tt.schema import parse, read_yaml, write_yaml


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner
    many: list[Inner] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    is_on: bool = False


FULL = Outer(
    kind="b", inner=Inner(size=3), many=[Inner(size=1, speed=3e7)], costs={"x": 2.0}, note="n"
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_yaml(tmp_path / "f.yaml", FULL, comment="two\nlines")
    assert (tmp_path / "f.yaml").read_text().startswith("# two\n# lines\nkind: b\n")
    assert read_yaml(tmp_path / "f.yaml", Outer) == FULL


def test_exponents_without_a_point_are_numbers_here(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("kind: a\ninner: {size: 1, speed: 3e7}\n")
    assert read_yaml(tmp_path / "f.yaml", Outer).inner.speed == 3e7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: a\ninner: {size: 1}\nkosts: {}", "got 'kosts'; the nearest is 'costs'"),
        ("kind: a\ninner: {sise: 1}", "inner must have keys .* got 'sise'; the nearest is 'size'"),
        ("kind: a", "must have the key 'inner'"),
        ("kind: c\ninner: {size: 1}", r"kind must be one of \['a', 'b'\], got 'c'"),
        ("kind: a\ninner: {size: 1.5}", "size must be int, got 1.5"),
        ("kind: a\ninner: {size: true}", "size must be int, got True"),
        ("kind: a\ninner: {size: 1}\nis_on: 1", "is_on must be bool, got 1"),
        ("kind: a\ninner: {size: 1}\nmany: 3", "many must be a list, got 3"),
        ("kind: a\ninner: {size: 1}\ncosts: {x: y}", r"costs\.x must be float, got 'y'"),
        ("- 1", "must be a mapping"),
        ("{", "must be YAML"),
    ],
)
def test_files_that_break_the_schema_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_yaml(tmp_path / "f.yaml", Outer)
    assert "f.yaml" in str(error.value)


def test_nested_keys_say_where_they_are() -> None:
    content = {"kind": "a", "inner": {"size": 1}, "many": [{"size": 1}, {"size": "x"}]}
    with pytest.raises(ValueError, match="size must be int, got 'x'"):
        parse(content, Outer)
