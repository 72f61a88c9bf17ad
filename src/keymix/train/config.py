# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses from what a person writes: dotted overrides, YAML and JSON files; their help.

Types come from the dataclasses' annotations, help from their docstrings. Values of another type
and unknown keys are refused in one line that names the dotted key.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import yaml

from keymix.errors import UserError, unknown

T = TypeVar("T")

DERIVED = {"derived": True}
"""Metadata of a field that follows from others and is no key of a recipe."""

_KINDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
}
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


@cache
def hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields that are keys of a recipe, by name, in reading order."""
    types_ = typing.get_type_hints(cls)
    return {item.name: types_[item.name] for item in fields(cls) if item.metadata != DERIVED}


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each dotted key of nested dataclasses with its type, in reading order."""
    for name, hint in hints(cls).items():
        if is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def helps(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What docstrings say of nested dataclasses, each followed by what they say of its keys."""
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(cls) or "", re.M):
        if hint := hints(cls).get(name):
            yield prefix + name, " ".join(text.split())
            if is_dataclass(hint):
                yield from helps(typing.cast(type, hint), f"{prefix}{name}.")


def parse(cls: type, path: str, text: str) -> Any:
    """Read a field of nested dataclasses from the text of its option, such as ``0.9,0.95``.

    What stands below a dictionary's dotted key is of any type, and read as YAML.
    """
    option, hint = f"--{path}", dict(leaves(cls)).get(path, Any)
    free = hint is Any or typing.get_origin(hint) is dict
    return _value(hint, _free(text, option) if free else text, option)


def _free(text: str, option: str) -> Any:
    """A value of any type."""
    try:
        return yaml.load(text, Loader=_Loader)
    except _UNREADABLE:
        raise UserError(f"{option} = {text!r}: this is no value in YAML.") from None


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Make a dataclass from a mapping, and those in its fields from the mappings within.

    A UserError names the dotted key, behind the prefix, that is unknown, missing, or unfit.
    """
    kind = typing.cast(type, cls)
    known = hints(kind)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            paths = [path for path, _ in leaves(kind)] if not prefix else []
            raise unknown("recipe key", prefix + name, [*(prefix + each for each in known), *paths])
        made[name] = _value(known[name], value, prefix + name)
    for item in fields(kind):
        optional = item.default is not MISSING or item.default_factory is not MISSING
        if item.name not in made and not optional:
            raise UserError(f"the recipe lacks {prefix + item.name!r}: give it a value.")
    return cls(**made)


def _value(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"{path} = {value!r}: expected keys such as `{path}.…`.")
        return build(typing.cast(type, hint), value, f"{path}.")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union(inner, value, path)
    if origin is typing.Literal:
        if value not in inner:
            raise unknown(path, str(value), map(str, inner))
        return value
    fit = _tuple(inner, value, path) if origin is tuple else _plain(origin or hint, value)
    if fit is None:
        raise _unfit(path, value, hint)
    return fit


def _unfit(path: str, value: Any, *taken: Any) -> UserError:
    return UserError(f"{path} = {value!r}: expected {' or '.join(map(_kind, taken))}.")


def _kind(hint: Any) -> str:
    """What a value of a type is, in words."""
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return f"{len(items)} {_KINDS[items[0]].removeprefix('a ')}s with a comma between"
    return _KINDS.get(typing.get_origin(hint) or hint, str(hint))


def _union(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if type(None) in choices and value in (None, "null", "None", "none"):
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    if len(rest) == 1:
        return _value(rest[0], value, path)
    for choice in rest:
        with suppress(UserError):
            return _value(choice, value, path)
    raise _unfit(path, value, *rest)


def _tuple(items: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...] | None:
    if isinstance(value, str):
        value = [part.strip() for part in re.split("[,x]", value.strip("()[]"))]
    if not isinstance(value, list | tuple) or len(value) != len(items):
        return None
    with suppress(UserError):
        return tuple(_value(item, part, path) for item, part in zip(items, value, strict=True))
    return None


def _plain(kind: Any, value: Any) -> Any:
    """Fit a value to a plain type; a text that is a number counts as one. None if it does not."""
    if kind is bool:
        return value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
    if isinstance(value, bool):
        return None
    if kind is int:
        return _whole(value)
    if kind is float:
        return _finite(value)
    if kind is str and isinstance(value, int | float):
        return str(value)
    return copy(value) if isinstance(value, kind) else None


def _finite(value: Any) -> float | None:
    with suppress(OverflowError, TypeError, ValueError):
        if math.isfinite(number := float(value)):
            return number
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, int | str):
        with suppress(ValueError):  # no number, one such as 1e3, or one of thousands of digits
            return int(value)
    number = _finite(value)
    return int(number) if number is not None and number.is_integer() else None


class _Loader(yaml.SafeLoader):
    """Reads YAML without a key that is given twice; 1e-5 is a number, as in YAML 1.2."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping whose keys differ."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen = Counter(key.value for key in keys if key.tag != "tag:yaml.org,2002:merge")
        for key in keys:
            if seen[key.value] > 1:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$"), [*"+-0123456789"]
)
_UNREADABLE = (OSError, RecursionError, ValueError, yaml.YAMLError)  # of ours, too


def read_file(path: Path) -> dict[str, Any]:
    """Read a mapping of plain values from a file of YAML or, by its name, of JSON.

    A UserError names the file: it cannot be read, or `check_plain` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader)
        if not isinstance(values, dict):
            raise UserError("it holds no recipe: expected keys such as `optim:`.")
        check_plain(values)
    except _UNREADABLE as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"cannot read the recipe {str(path)!r}: {why}") from None
    return values


def check_plain(value: Any, path: str = "") -> None:
    """Refuse a key that is no text, and a value of another type than JSON's."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                where = f" of {path}" if path else ""
                raise UserError(f"the key {key!r}{where} is no text: put quotes around it.")
            check_plain(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for each in value:
            check_plain(each, path)
    elif value is not None and not isinstance(value, str | Real):
        kind = type(value).__name__
        raise UserError(f"{path} = {value!r} ({kind}) is no number, text, list or mapping.")
