from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from torchrec_tt.schema import Rule, check_fields, parse, read_json, read_yaml, write_yaml


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
    parts: list[Annotated[float, Rule("in (0, 1)", lambda x: 0 < x < 1)]] | None = None


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
        ("{", "must be YAML, got .* in line 1"),
        ("", "must be a mapping, got None"),
        ("kind: a\nkind: b\ninner: {size: 1}", "must be YAML, got the key 'kind' twice in line 1"),
        ("kind: a\ninner: {size: 1, speed: .nan}", r"inner\.speed must be finite, got nan"),
        ("kind: a\ninner: {size: 1, speed: 1e999}", r"inner\.speed must be finite, got inf"),
        ("kind: a\ninner: {size: 1}\nparts: [0.5, 1]", r"parts\[1\] must be in \(0, 1\), got 1"),
        ("kind: a\ninner: {size: 1}\ncosts: {1: 2.0}", "a key of costs must be str, got 1"),
        ("kind: a\ninner: {size: 1}\nmany: [{size: x, name: n}]", r"many\['n'\] must have keys"),
        ("[" * 3000, "must be YAML"),
    ],
)
def test_files_that_break_the_schema_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_yaml(tmp_path / "f.yaml", Outer)
    assert "f.yaml" in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"kind: \xff")
    for read in (lambda path: read_yaml(path, Outer), read_json):
        with pytest.raises(ValueError, match=r"f\.yaml must be UTF-8 text"):
            read(tmp_path / "f.yaml")
    (tmp_path / "f.json").write_text("{")
    with pytest.raises(ValueError, match=r"f\.json must be JSON, got '{'"):
        read_json(tmp_path / "f.json")


def test_values_made_in_python_are_held_to_the_annotations_too() -> None:
    check_fields(FULL)
    with pytest.raises(ValueError, match=r"parts\[0\] must be in \(0, 1\), got 2"):
        check_fields(Outer(kind="a", inner=Inner(size=1), parts=[2.0]))


def test_an_open_mapping_may_have_more_keys() -> None:
    assert parse({"size": 3, "more": 1}, Inner, is_open=True) == Inner(size=3)


def test_nested_keys_say_where_they_are() -> None:
    content = {"kind": "a", "inner": {"size": 1}, "many": [{"size": 1}, {"size": "x"}]}
    with pytest.raises(ValueError, match=r"^many\[1\]\.size must be int, got 'x'"):
        parse(content, Outer)
