"""Reads YAML files into frozen dataclasses: a key that none has is an error naming the nearest."""

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml  # type: ignore[import-untyped]

T = TypeVar("T")


def read_yaml(path: str | Path, schema: type[T]) -> T:
    """Returns the file's mapping as a `schema`, a dataclass.

    Raises:
        ValueError: for a file that is no YAML mapping, an unknown or missing key, or a value of
            another type; the message has the file and the key.
        OSError: for a file that cannot be read.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML, got {error}") from None
    try:
        return parse(content, schema)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_yaml(path: str | Path, value: Any, *, comment: str) -> None:
    """Writes a dataclass as a mapping below `comment`; fields that have their default are not."""
    lines = [f"# {line}" for line in comment.splitlines()]
    body = yaml.safe_dump(_plain(value), sort_keys=False)
    Path(path).write_text("\n".join([*lines, body]))


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


def parse(content: object, schema: type[T], *, where: str = "the file") -> T:
    """Returns a mapping, as YAML has it, as a `schema`.

    Raises:
        ValueError: as `read_yaml`.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be a mapping, got {content!r}")
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, schema))}
    hints = typing.get_type_hints(schema)
    for key in content:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.0)
            raise ValueError(
                f"{where} must have keys of {sorted(fields)}, got {key!r}; "
                f"the nearest is {near[0]!r}"
            )
    for name, field in fields.items():
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_required and name not in content:
            raise ValueError(f"{where} must have the key {name!r}, got {sorted(map(str, content))}")
    values = {key: _value(value, hints[key], where=str(key)) for key, value in content.items()}
    return schema(**values)


def _value(value: Any, hint: Any, *, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (hint,) = [arg for arg in args if arg is not type(None)]
        return _value(value, hint, where=where)
    if dataclasses.is_dataclass(hint):
        return parse(value, typing.cast(type, hint), where=where)
    if origin is None:
        return _scalar(value, hint, where=where)
    return _container(value, origin, args, where=where)


def _container(value: Any, origin: Any, args: tuple[Any, ...], *, where: str) -> Any:
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where} must be one of {list(args)}, got {value!r}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a mapping, got {value!r}")
        return {key: _value(v, args[1], where=f"{where}.{key}") for key, v in value.items()}
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, got {value!r}")
    return origin(_value(v, args[0], where=f"{where}[{i}]") for i, v in enumerate(value))


def _scalar(value: Any, hint: Any, *, where: str) -> Any:
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 takes 3e7 for a string
    wanted = (int, float) if hint is float else (hint,)
    if not isinstance(value, wanted) or (hint is not bool and isinstance(value, bool)):
        raise ValueError(f"{where} must be {hint.__name__}, got {value!r}")
    return float(value) if hint is float else value
