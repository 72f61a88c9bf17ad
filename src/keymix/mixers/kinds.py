# SPDX-License-Identifier: Apache-2.0
"""What constructors take: their arguments, and whether values are of the kind annotated."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, Union

_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    types.NoneType: "none",
}
_LISTS: tuple[Any, ...] = (tuple, list, Sequence)


def accepted(cls: type) -> dict[str, tuple[inspect.Parameter, Any]]:
    """What a constructor takes by name, with the annotation's value.

    Where it hands the rest on (``**shared: Unpack[MapOptions]``), the constructors above it are
    read too.
    """
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    for each in cls.__mro__:
        if "__init__" not in vars(each):
            continue
        init = vars(each)["__init__"]
        parameters = list(inspect.signature(init).parameters.values())[1:]  # without self
        hints = typing.get_type_hints(init)
        for p in parameters:
            if p.kind is not inspect.Parameter.VAR_KEYWORD:
                found.setdefault(p.name, (p, hints.get(p.name, Any)))
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return found


def leaves(value: Any) -> list[Any]:
    """List what a value holds: the entries of lists and of lists in them, or itself."""
    if not isinstance(value, tuple | list):
        return [value]
    return [leaf for each in value for leaf in leaves(each)]


def of_kind(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind an annotation names, as far as it names one.

    Lists are compared by what they hold, however deep, and not by their length.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(of_kind(value, part) for part in parts)
    if origin is Literal:
        return any(type(v) is type(value) and v == value for v in parts)
    if origin in _LISTS:
        inner = _inside(hint)
        return isinstance(value, tuple | list) and all(
            any(of_kind(leaf, part) for part in inner) for leaf in leaves(value)
        )
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real)
        return number and not isinstance(value, bool) and -math.inf < value < math.inf
    return isinstance(value, hint) if hint in (bool, str, types.NoneType) else True


def _inside(hint: Any) -> list[Any]:
    """The annotations of what a list holds, those of lists in it included."""
    if typing.get_origin(hint) not in _LISTS:
        return [hint]
    return [part for each in typing.get_args(hint) if each is not ... for part in _inside(each)]


def words(hint: Any, which: str = "") -> str:
    """Say what an argument takes: ``a whole number or one of head_dim, dim``.

    ``which`` stands behind every number, such as ``" above 0"``.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        ordered = sorted(parts, key=lambda part: typing.get_origin(part) in _LISTS)
        return " or ".join(dict.fromkeys(words(part, which) for part in ordered))
    if origin is Literal:
        values = [str(value) or "''" for value in parts]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin in _LISTS:
        each = " or ".join(dict.fromkeys(words(part, which) for part in _inside(hint)))
        return f"a list, each {each}"
    return _PLAIN.get(hint, str(hint)) + (which if hint in (int, float) else "")
