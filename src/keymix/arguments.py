# SPDX-License-Identifier: Apache-2.0
"""Arguments of functions and constructors: whether they are of the kind annotated, and models.

A public function begins with `checked`, and with `opened` and `module_of` where it takes a model.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    runtime_checkable,
)

from keymix.errors import UserError

if TYPE_CHECKING:
    from torch import nn

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "NoneType": "none",
    "Path": "a path",
    "Callable": "a function",
    "Image": "an image of Pillow's",
    "ndarray": "an array",
    "Mapping": "a mapping from names",
    "Iterable": "batches one after another",
}
_LISTS: tuple[Any, ...] = (tuple, list, Sequence)
_PARALLEL = ("DataParallel", "DistributedDataParallel", "_FabricModule", "AveragedModel")
"""Classes that training puts around a model, which is their ``module``."""


@runtime_checkable
class Trained(Protocol):
    """What `keymix.load` returns."""

    @property
    def model(self) -> Any:
        """The model itself."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse arguments of another kind than annotated, in one line by name."""
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hints:  # what annotations name may be defined below the function
            hints.update(typing.get_type_hints(function))
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says the same, with its name
        for name, value in given.items():
            if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                check_kind(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call


def check_kind(name: str, value: object, hint: Any) -> None:
    """Refuse a value of another kind than an annotation names."""
    if not of_kind(value, hint):
        wanted = [part for part in typing.get_args(hint) if part is not types.NoneType]
        optional = types.NoneType in typing.get_args(hint) and value is not None
        said = words(Union[tuple(wanted)] if optional else hint)  # noqa: UP007 # made here
        raise UserError(f"{name}={described(value)} must be {said}")


def described(value: object) -> str:
    """Write a value that was given: itself if it is short, else its kind and shape."""
    plain = value is None or isinstance(value, str | Path | Real | tuple | list | dict)
    text = repr(value) if plain else ""
    if text and len(text) <= 80 and "\n" not in text:
        return text
    shape = getattr(value, "shape", None)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    of = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"<{type(value).__name__}{of}>"


def opened(model: object) -> object:
    """Load the trained model of a run's folder, or of a `Run`; what is neither stays as it is."""
    if isinstance(model, str) and not (model and Path(model).exists()):
        raise UserError(
            f"model={model!r}: there is no such folder of a run; of a name, "
            "keymix.create_model makes the model"
        )
    if isinstance(model, str | Path) or hasattr(model, "model_and_data"):
        return importlib.import_module("keymix.train.predict").load(model)
    return model


def module_of(model: object) -> nn.Module:
    """Return the model itself of what `opened` returns, without what wraps it."""
    from torch import nn  # late: names and numbers are checked without

    found = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(found, nn.Module):
        raise UserError(
            f"model={described(model)} must be a model (torch.nn.Module), what keymix.load "
            "returns, or the folder of a run"
        )
    return unwrapped(found)  # type: ignore[no-any-return] # a model's wrapper holds one


def unwrapped(model: Any) -> Any:
    """Return what ``torch.compile``, parallel training or Fabric wrapped, or the model itself."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__name__ in _PARALLEL:
            model = model.module
        else:
            return model


def whole_size(name: str, value: object) -> tuple[int, int]:
    """Return height and width from one side or both, or refuse the argument of this name."""
    sides = (value, value) if isinstance(value, int) else value
    sides = tuple(sides) if isinstance(sides, Sequence) else ()
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not whole or min(sides) < 1:
        raise UserError(f"{name}={value!r} must be a side, or (height, width), in whole pixels")
    return sides[0], sides[1]


def accepted(cls: type) -> dict[str, tuple[inspect.Parameter, Any]]:
    """What a constructor takes by name, with the annotation's value.

    Where it hands the rest on (``**shared: Unpack[MapOptions]``), the constructors above it are
    read too, as far as the type lists their arguments.
    """
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    listed: set[str] | None = None  # None is all
    for each in cls.__mro__:
        if "__init__" not in vars(each):
            continue
        init = vars(each)["__init__"]
        parameters = list(inspect.signature(init).parameters.values())[1:]  # without self
        hints = typing.get_type_hints(init)
        for p in parameters:
            if p.kind is not inspect.Parameter.VAR_KEYWORD and (not listed or p.name in listed):
                found.setdefault(p.name, (p, hints.get(p.name, Any)))
        rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        if not rest:
            break
        (handed,) = typing.get_args(hints.get(rest[0])) or (None,)
        if typing.is_typeddict(handed):
            listed = {"site", *typing.get_type_hints(handed)}
    return found


def leaves(value: Any) -> list[Any]:
    """List what a value holds: the entries of lists and of lists in them, or itself."""
    if not isinstance(value, tuple | list | range):
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
        value = value.tolist() if hasattr(value, "tolist") else value  # of an array
        return isinstance(value, tuple | list | range) and all(
            any(of_kind(leaf, part) for part in inner) for leaf in leaves(value)
        )
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real)
        return number and not isinstance(value, bool) and -math.inf < value < math.inf
    if origin is Mapping:
        return isinstance(value, Mapping) and all(of_kind(key, parts[0]) for key in value)
    hint = origin or hint
    plain = isinstance(hint, type) and hint.__module__ not in ("typing", "jaxtyping")
    return not plain or getattr(hint, "_is_protocol", False) or isinstance(value, hint)


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
        shown = [part for part in parts if not (part is str and Path in parts)]  # a path is text
        ordered = sorted(shown, key=lambda part: typing.get_origin(part) in _LISTS)
        said = " or ".join(dict.fromkeys(words(part, which) for part in ordered))
        one, several, each = said.partition(" or a list, each ")
        return f"{one} or a list of these" if several and each == one else said
    if origin is Literal:
        values = [str(value) or "''" for value in parts]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin in _LISTS:
        each = " or ".join(dict.fromkeys(words(part, which) for part in _inside(hint)))
        return f"a list, each {each}"
    name = getattr(origin or hint, "__name__", str(hint))
    named = _WORDS.get(name) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"
    return named + (which if hint in (int, float) else "")
