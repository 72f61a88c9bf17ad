# SPDX-License-Identifier: Apache-2.0
"""One codec between frozen dataclasses and JSON, for every record that keymix keeps in a file.

A field is a key of the same name. All fields are written but those that a record's own method
``omitted()`` names; a key that is missing takes the field's default, and one that no field has is
passed over. A record with a field ``format`` is read only if the file has its default. The keys of
a mapping that `spread` marks are written among those of the record, behind a prefix; an empty one
takes all keys that are left.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable

from keymix.errors import UserError

T = TypeVar("T")

_PREFIX = "prefix"

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def spread(prefix: str = "") -> Mapping[str, str]:
    """Return the metadata of a field, a mapping whose keys stand among those of its record.

    They begin with the prefix there. An empty one takes every key that no field has, so that such a
    record has no unknown keys: their values must fit, too. Where two fields have one prefix, each
    takes every key whose value fits it.
    """
    return {_PREFIX: prefix}


@dataclass(frozen=True)
class Own:
    """A part of a record whose kind only the task knows, as plain values until it is asked for.

    A field of this type is marked with `spread`: its keys stand among those of the record.
    """

    values: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, record: object) -> Own:
        """Take a record, or nothing where there is none."""
        return cls({} if record is None else to_json(record))

    def read(self, cls: type[T], *, where: str = "the record") -> T:
        """Return the record that it holds; see `from_json`."""
        return from_json(cls, self.values, where=where)


@runtime_checkable
class Omitting(Protocol):
    """A record of which some fields are not written."""

    def omitted(self) -> Collection[str]:
        """Names of fields that say nothing now and equal their defaults."""


class FormatError(UserError):
    """A record is of another format than the one that this keymix reads."""


def check_format(values: Any, known: int, *, where: str) -> None:
    """Refuse a record of another format with a `FormatError` that names both."""
    found = values.get("format") if isinstance(values, Mapping) else None
    if found != known:
        raise FormatError(
            f"{where} has {'no format' if found is None else f'format {found!r}'}, and this "
            f"keymix reads format {known}: make it again with --overwrite"
        )


def to_json(value: Any) -> Any:
    """Return a record as JSON takes it: mappings, lists, texts, numbers, truth values and null.

    Args:
        value: A dataclass, or whatever its fields hold: mappings with texts or whole numbers as
            keys, sequences and plain values.

    Raises:
        TypeError: On a value of another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Own):
        return to_json(value.values)
    if is_dataclass(value) and not isinstance(value, type):
        omitted = value.omitted() if isinstance(value, Omitting) else ()
        made: dict[str, Any] = {}
        for item in (each for each in fields(value) if each.name not in omitted):
            plain = to_json(getattr(value, item.name))
            if (prefix := item.metadata.get(_PREFIX)) is None:
                made[item.name] = plain
            else:
                made |= {f"{prefix}{key}": each for key, each in plain.items()}
        return made
    if isinstance(value, Mapping):
        return {_key(key): to_json(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [to_json(each) for each in value]
    raise TypeError(f"a record holds no {type(value).__name__}: {value!r}")


def finite(plain: Any) -> Any:
    """Put None in place of every NaN of plain data, which JSON has no word for."""
    if isinstance(plain, dict):
        return {key: finite(each) for key, each in plain.items()}
    if isinstance(plain, list):
        return [finite(each) for each in plain]
    return or_none(plain) if isinstance(plain, float) else plain


def or_none(value: float) -> float | None:
    """Return a number, and None for NaN."""
    return None if math.isnan(value) else value


def from_json(cls: type[T], values: Any, *, where: str) -> T:
    """Return the record that JSON holds, with the type of every field checked.

    Args:
        cls: A dataclass whose fields are plain values, ``Literal``, ``Any``, tuples, mappings,
            other such dataclasses, or unions of these; of several dataclasses in a union those
            whose ``Literal`` fields fit are tried, in order.
        values: What `json.loads` gave.
        where: What is read, for the message, such as ``"'run/summary.json'"``.

    Raises:
        FormatError: If the record has a field ``format``, and the file another one.
        UserError: Naming `where` and the dotted key, on a key that is missing and has no default
            and on a value of another type.
    """
    known = getattr(cls, "format", None)  # the default of such a field
    if isinstance(known, int):
        check_format(values, known, where=where)
    try:
        made: T = _value(cls, values, "")
    except _Unfit as unfit:
        raise UserError(f"{where} is damaged: {unfit}") from None
    return made


def differences(there: Any, here: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where plain values of JSON differ: the dotted key, and both values."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in {**there, **here}:
            yield from differences(
                there.get(name), here.get(name), f"{key}.{name}" if key else str(name)
            )
    elif there != here:
        yield key, there, here


class _Unfit(ValueError):
    """A value is not what its field takes; names the dotted key."""


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _key(key: object) -> str:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise TypeError(f"the key {key!r} of a record is neither text nor a whole number")
    return str(key)


def _value(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _record(typing.cast(type, hint), value, path)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    for kind, read in _GENERIC:
        if origin is kind or (
            isinstance(origin, type) and isinstance(kind, type) and issubclass(origin, kind)
        ):
            return read(inner, value, path)
    return _plain(hint, value, path)


def _record(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise _unfit(path, values, "a mapping")
    made = {}
    own = tuple(item.name for item in fields(cls))
    prefixes = tuple(item.metadata[_PREFIX] for item in fields(cls) if _PREFIX in item.metadata)
    for item in fields(cls):
        if not item.init:
            continue
        if (prefix := item.metadata.get(_PREFIX)) is not None:
            hint = _hints(cls)[item.name]
            inner = Any if hint is Own else typing.get_args(hint)[1]
            others = tuple(other for other in prefixes if other and other != prefix)
            found = {}
            for key, each in values.items():
                if not key.startswith(prefix) or key.startswith(others) or key in own:
                    continue
                try:
                    fit = _value(inner, each, f"{path}.{key}" if path else key)
                except _Unfit:
                    if prefixes.count(prefix) == 1:
                        raise
                else:
                    found[key.removeprefix(prefix)] = fit
            made[item.name] = Own(found) if hint is Own else found
            continue
        below = f"{path}.{item.name}" if path else item.name
        if item.name in values:
            made[item.name] = _value(_hints(cls)[item.name], values[item.name], below)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise _Unfit(f"it lacks {below!r}")
    try:
        return cls(**made)
    except UserError as error:  # of what the record itself checks
        raise _Unfit(f"{path}: {error}" if path else str(error)) from None


def _union(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in choices:
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    rest = [choice for choice in rest if _tagged(choice, value)] or rest
    for choice in rest[:-1]:
        try:
            return _value(choice, value, path)
        except _Unfit:
            continue
    return _value(rest[-1], value, path)


def _tagged(choice: Any, value: Any) -> bool:
    """Whether a value has what the ``Literal`` fields of a record take; they tag its kind.

    So that the error is about the field that is wrong, and not about another record's.
    """
    if not is_dataclass(choice) or not isinstance(value, Mapping):
        return True
    hints = _hints(typing.cast(type, choice)).items()
    tags = {name: typing.get_args(hint) for name, hint in hints if _is_literal(hint)}
    return all(value[name] in taken for name, taken in tags.items() if name in value)


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Literal


def _literal(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if not any(value == each and type(value) is type(each) for each in choices):
        raise _unfit(path, value, f"one of {', '.join(map(repr, choices))}")
    return value


def _tuple(inner: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _unfit(path, value, "a list")
    hints = [inner[0]] * len(value) if inner[1:] == (...,) else list(inner)
    if len(hints) != len(value):
        raise _unfit(path, value, f"a list of {len(hints)}")
    pairs = zip(hints, value, strict=True)
    return tuple(_value(hint, each, f"{path}[{i}]") for i, (hint, each) in enumerate(pairs))


def _mapping(inner: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _unfit(path, value, "a mapping")
    made: dict[Any, Any] = {}
    for key, each in value.items():
        below = f"{path}.{key}" if path else str(key)
        if inner[0] is int and isinstance(key, str):
            try:
                made[int(key)] = _value(inner[1], each, below)
            except ValueError as error:
                raise (
                    error
                    if isinstance(error, _Unfit)
                    else _Unfit(f"the key {below!r} is no whole number")
                ) from None
        else:
            made[key] = _value(inner[1], each, below)
    return made


def _plain(kind: Any, value: Any, path: str) -> Any:
    """Fit a value to a plain type; a whole number is a number, and true is none."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number
    if type(value) is kind:
        return value
    raise _unfit(path, value, _PLAIN.get(kind, str(kind)))


def _unfit(path: str, value: Any, wanted: str) -> _Unfit:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:59] + "…"
    return _Unfit(f"{path or 'it'} = {shown}: expected {wanted}")


_GENERIC: tuple[tuple[Any, Callable[[tuple[Any, ...], Any, str], Any]], ...] = (
    (types.UnionType, _union),
    (typing.Union, _union),
    (typing.Literal, _literal),
    (tuple, _tuple),
    (Mapping, _mapping),
    (Sequence, lambda inner, value, path: list(_tuple((inner[0], ...), value, path))),
)
