"""Reads YAML and JSON files into frozen dataclasses whose annotations say what values may be."""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import yaml  # type: ignore[import-untyped]

T = TypeVar("T")
_TOP = "the file"
_MAX_SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field's value must be besides its type, as in `Annotated[int, Rule(...)]`.

    Attributes:
        words: end the sentence "it must be ...".
        holds: whether a value of the type is so.
    """

    words: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("in [1, 2^31)", lambda x: 1 <= x < 2**31)]
Count = Annotated[int, Rule("in [0, 2^31)", lambda x: 0 <= x < 2**31)]
NumBytes = Annotated[int, Rule("in [1, 2^63)", lambda x: 1 <= x < 2**63)]
Positive = Annotated[float, Rule("positive", lambda x: x > 0)]
NonNegative = Annotated[float, Rule("at least 0", lambda x: x >= 0)]
Share = Annotated[float, Rule("in [0, 1)", lambda x: 0 <= x < 1)]


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str | Path, schema: type[T]) -> T:
    """Returns the file's mapping as a `schema`, a dataclass.

    Raises:
        ValueError: for a file that is no YAML mapping, an unknown or missing key, or a value that
            its annotation does not allow; the message has the file and the key.
        OSError: for a file that cannot be read.
    """
    content = load_yaml(path)
    try:
        return parse(content, schema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_yaml(path: str | Path) -> object:
    """Returns what a YAML file has.

    Raises:
        ValueError: for a file that is no YAML; the message has the file.
        OSError: for a file that cannot be read.
    """
    text = _text(path)
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} must be YAML, got {_yaml_problem(error)}") from None


def read_json(path: str | Path) -> Any:
    """Returns what a JSON file has.

    Raises:
        ValueError: for a file that is no JSON; the message has the file.
        OSError: for a file that cannot be read.
    """
    text = _text(path)
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} must be JSON, got {_shown(text)}: {error}") from None


def write_yaml(path: str | Path, value: Any, *, comment: str) -> None:
    """Writes a dataclass as a mapping below `comment`; fields that have their default are not."""
    lines = [f"# {line}" for line in comment.splitlines()]
    body = yaml.safe_dump(_plain(value), sort_keys=False)
    Path(path).write_text("\n".join([*lines, body]))


def parse(content: object, schema: type[T], *, where: str = _TOP, is_open: bool = False) -> T:
    """Returns a mapping, as YAML or JSON has it, as a `schema`.

    Args:
        content: the mapping.
        schema: a dataclass.
        where: what messages call the mapping.
        is_open: whether keys that the schema has not are left out; else they are refused.

    Raises:
        ValueError: as `read_yaml`.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be a mapping, got {_shown(content)}")
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, schema))}
    for key in content:
        if key not in fields and not is_open:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.0)
            raise ValueError(
                f"{where} must have keys of {_shown(sorted(fields))}, got {_shown(key)}; "
                f"the nearest is {near[0]!r}"
            )
    for name, field in fields.items():
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_required and name not in content:
            found = _shown(sorted(map(str, content)))
            raise ValueError(f"{where} must have the key {name!r}, got {found}")
    hints = _hints(typing.cast(Any, schema))
    values = {
        name: _value(content[name], hints[name], where=_within(where, name))
        for name in fields
        if name in content
    }
    try:
        return schema(**values)
    except ValueError as error:  # values that do not fit together
        raise ValueError(str(error) if where == _TOP else f"{where}: {error}") from None


def check_fields(value: Any) -> None:
    """Raises ValueError for a field of a dataclass that its annotation does not allow."""
    for name, hint in _hints(typing.cast(Any, type(value))).items():
        _value(getattr(value, name), hint, where=name)


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema, include_extras=True)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text, got {error.reason}") from None


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        field.name: _plain(found)
        for field in dataclasses.fields(value)
        if (found := getattr(value, field.name)) != field.default
    }


def _value(value: Any, hint: Any, *, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        found = _value(value, args[0], where=where)
        for rule in args[1:]:
            if not rule.holds(found):
                raise ValueError(f"{where} must be {rule.words}, got {_shown(value)}")
        return found
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (hint,) = [arg for arg in args if arg is not type(None)]
        return _value(value, hint, where=where)
    if dataclasses.is_dataclass(hint):
        schema = typing.cast(type, hint)
        return value if isinstance(value, schema) else parse(value, schema, where=where)
    if origin is None:
        return _scalar(value, hint, where=where)
    return _container(value, origin, args, where=where)


def _container(value: Any, origin: Any, args: tuple[Any, ...], *, where: str) -> Any:
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where} must be one of {list(args)}, got {_shown(value)}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a mapping, got {_shown(value)}")
        return {
            _value(key, args[0], where=f"a key of {where}"): _value(
                v, args[1], where=_within(where, key)
            )
            for key, v in value.items()
        }
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, got {_shown(value)}")
    return origin(_value(v, args[0], where=_element(where, i, v)) for i, v in enumerate(value))


def _scalar(value: Any, hint: Any, *, where: str) -> Any:
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 takes 3e7 for a string
    wanted = (int, float) if hint is float else (hint,)
    if not isinstance(value, wanted) or (hint is not bool and isinstance(value, bool)):
        raise ValueError(f"{where} must be {hint.__name__}, got {_shown(value)}")
    if hint is not float:
        return value
    with contextlib.suppress(OverflowError):  # an int beyond the floats
        if math.isfinite(value):
            return float(value)
    raise ValueError(f"{where} must be finite, got {_shown(value)}")


def _within(where: str, key: object) -> str:
    return str(key) if where == _TOP else f"{where}.{key}"


def _element(where: str, number: int, value: object) -> str:
    """An entry of a list, by its name where it has one."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return f"{where}[{name!r}]" if isinstance(name, str) else f"{where}[{number}]"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
