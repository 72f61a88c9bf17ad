# SPDX-License-Identifier: Apache-2.0
"""From plain dictionaries to frozen dataclasses, with errors that name the dotted key."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from keymix.errors import UserError, unknown

T = TypeVar("T")

_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    type(None): "null",
}
_PLURALS = {int: "whole numbers", float: "finite numbers"}
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


DERIVED = {"derived": True}
"""Metadata of a field that follows from others and is no key of a recipe."""


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def keys(cls: type) -> list[Field[Any]]:
    """The fields of a dataclass that are keys of a recipe."""
    return [item for item in fields(cls) if not item.metadata.get("derived")]


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key of nested dataclasses with its type, in reading order."""
    for item in keys(cls):
        hint = _hints(cls)[item.name]
        if is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hint


def parse(cls: type, path: str, text: str) -> Any:
    """Read a field of nested dataclasses from the text that an option gives it.

    Args:
        cls: The outermost dataclass.
        path: The field's dotted key; what stands below a dictionary's is read as YAML.
        text: As typed: ``1e-3``, ``0.9,0.95``, ``true``.

    Raises:
        UserError: Naming the option, if the text does not fit the field.
    """
    option, hint = f"--{path}", dict(leaves(cls)).get(path)
    if hint is None:
        return _free(text, option)
    return _value(hint, _free(text, option) if typing.get_origin(hint) is dict else text, option)


def _free(text: str, option: str) -> Any:
    """A value of any type, as YAML; 1e-5 is a number, though to YAML 1.1 only 1.0e-5 is one."""
    from keymix.train._plain import read_yaml

    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        return read_yaml(text)
    except UserError:
        raise UserError(f"{option} = {text!r}: this is no value in YAML.") from None


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Make a dataclass from a mapping; nested mappings make nested dataclasses.

    Args:
        cls: A dataclass whose fields are plain values, tuples, dictionaries or dataclasses.
        values: Values by field name.
        prefix: Dotted name of this dataclass in the whole, with a dot at the end, for messages.

    Raises:
        UserError: Naming the dotted key, on unknown or missing keys and unfit values.
    """
    kind = typing.cast(type, cls)
    own: dict[str, Field[Any]] = {item.name: item for item in keys(kind)}
    whole = [prefix + name for name in own]
    if not prefix:
        whole += [path for path, _ in leaves(kind)]
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in own:
            raise unknown("recipe key", f"{prefix}{name}", whole)
        made[name] = _value(_hints(kind)[name], value, prefix + name)
    for name, item in own.items():
        optional = item.default is not MISSING or item.default_factory is not MISSING
        if name not in made and not optional:
            raise UserError(f"the recipe lacks {prefix + name!r}: give it a value.")
    return cls(**made)


def _value(hint: Any, value: Any, path: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"{path} = {value!r}: expected keys such as `{path}.…`.")
        return build(typing.cast(type, hint), value, f"{path}.")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, value, path)
    if origin is tuple:
        return _tuple(arguments, value, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise unknown(path, str(value), map(str, arguments))
        return value
    return _plain(origin or hint, value, path)


def _union(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if type(None) in choices and (value is None or value in ("null", "None", "none")):
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    for choice in rest if len(rest) > 1 else ():
        try:
            return _value(choice, value, path)
        except UserError:
            continue
    if len(rest) == 1:
        return _value(rest[0], value, path)
    raise UserError(f"{path} = {value!r}: expected {' or '.join(map(_name, rest))}.")


def _tuple(items: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    parts = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip("()[]").split(",")]
    if isinstance(parts, list | tuple) and len(parts) == len(items):
        try:
            return tuple(_value(item, part, path) for item, part in zip(items, parts, strict=True))
        except UserError:
            pass
    raise UserError(f"{path} = {value!r}: expected {_name(tuple[items])}.")  # type: ignore[valid-type]


def _plain(kind: Any, value: Any, path: str) -> Any:
    """Fit a value to a plain type; YAML's ``1e-3``, a text to YAML 1.1, counts as a number."""
    if kind is Any:
        return value
    if isinstance(value, bool) and kind is not bool:
        pass
    elif kind is float:
        if (number := _finite(value)) is not None:
            return number
    elif isinstance(value, kind):
        return dict(value) if kind is dict else value
    elif kind is int and (number := _whole(value)) is not None:
        return number
    elif kind is bool and str(value).lower() in _TRUTHS:
        return _TRUTHS[str(value).lower()]
    elif kind is str and isinstance(value, int | float):
        return str(value)
    raise UserError(f"{path} = {value!r}: expected {_name(kind)}.")


def _name(hint: Any) -> str:
    """What a value of a type is, in words."""
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return f"{len(items)} {_PLURALS[items[0]]} with a comma between"
    return _NAMES.get(hint, str(hint))


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        with suppress(ValueError):  # no number, one such as 1e3, or one of thousands of digits
            return int(value)
    number = _finite(value)
    return int(number) if number is not None and number.is_integer() else None
