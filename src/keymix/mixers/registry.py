# SPDX-License-Identifier: Apache-2.0
"""Names of mixers. Registering a class is all it takes to enter every list, test and command."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from keymix.arguments import accepted, checked, of_kind, words
from keymix.errors import Attempt, UserError, unknown
from keymix.mixers.base import Grid, Site, TokenMixer, checked_device
from keymix.mixers.site import as_grid
from keymix.mixers.user_mixers import PAGE, check_first, from_outside

_MIXERS: dict[str, type[TokenMixer]] = {}
_ALIASES: dict[str, str] = {}
_OF_FILES: dict[Path, set[str]] = {}
_NOT_OPTIONS = ("site", "device", "dtype")

M = TypeVar("M", bound=type[TokenMixer])


@checked
def register_mixer(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[M], M]:
    """Class decorator that gives a mixer its name.

    Args:
        name: The canonical name.
        aliases: Short names that mean the same.

    Raises:
        UserError: If a name is taken by another class, or the class breaks the seam's rules.
    """

    def register(cls: M) -> M:
        if not (inspect.isclass(cls) and issubclass(cls, TokenMixer)):
            raise UserError(f"@register_mixer({name!r}) decorates {cls!r}, not a TokenMixer class")
        if next(iter(accepted(cls)), None) != "site":
            raise UserError(
                f"mixer {name!r}: __init__ must take the site first, "
                f"__init__(self, site, *, …); see {PAGE}"
            )
        for parameter in _parameters(cls):
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                raise UserError(
                    f"mixer {name!r}: option {parameter.name!r} must be a named keyword-only "
                    "argument, so that an option nobody reads cannot be passed"
                )
        if from_outside(cls):
            _discover()  # so that its names are compared with those there are
        for each in (name, *aliases):
            taken = _MIXERS.get(_ALIASES.get(each, each))
            same = taken is not None and (taken.__module__, taken.__qualname__) == (
                cls.__module__,
                cls.__qualname__,
            )
            if taken is not None and not same:
                raise UserError(
                    f"mixer name {each!r} is taken by {taken.__module__}.{taken.__qualname__}"
                )
        cls.mixer_name = name
        _MIXERS[name] = cls
        _ALIASES.update(dict.fromkeys(aliases, name))
        return cls

    return register


@cache
def _discover() -> None:
    """Import every file of this folder, so that each mechanism registers itself."""
    package = importlib.import_module("keymix.mixers")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"keymix.mixers.{module.name}")


def _parameters(cls: type[TokenMixer]) -> list[inspect.Parameter]:
    return [p for name, (p, _) in accepted(cls).items() if name not in _NOT_OPTIONS]


def resolve(name: str) -> str:
    """Return the canonical name of a mixer or alias; refuse others, naming the nearest."""
    _discover()
    canonical = _ALIASES.get(name, name)
    if canonical not in _MIXERS:
        if "/" in name:
            several = name.split("/")
            raise UserError(f"{name!r} names {len(several)} mixers: give a list, {several!r}")
        raise unknown("mixer", name, [*_MIXERS, *_ALIASES])
    return canonical


def get_mixer_class(name: str) -> type[TokenMixer]:
    """Return the class behind a mixer's name or alias."""
    return _MIXERS[resolve(name)]


@checked
def list_mixers(
    pattern: str = "*", *, domain: Literal["dense", "spiking"] | None = None
) -> list[str]:
    """List the canonical names of all registered mixers.

    Args:
        pattern: Shell-style pattern on the name.
        domain: ``"dense"`` or ``"spiking"`` to keep only those that can sit among such tokens.

    Raises:
        UserError: If an argument is none of these.
    """
    _discover()
    return sorted(
        name
        for name, cls in _MIXERS.items()
        if fnmatch.fnmatch(name, pattern)
        and (domain is None or cls.traits.domain in (domain, "any"))
    )


def aliases_of(name: str) -> tuple[str, ...]:
    """List the short names of a mixer."""
    canonical = resolve(name)
    return tuple(sorted(a for a, n in _ALIASES.items() if n == canonical))


def mixer_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a mixer with annotations and defaults, apart from its site."""
    return {p.name: p for p in _parameters(get_mixer_class(name))}


def option_hints(name: str) -> dict[str, Any]:
    """Return the annotations of a mixer's options, resolved."""
    taken = accepted(get_mixer_class(name))
    return {option: hint for option, (_, hint) in taken.items() if option not in _NOT_OPTIONS}


def _check_kinds(cls: type[TokenMixer], options: dict[str, Any]) -> None:
    """Refuse values of another kind than annotated, such as the text "no" for False."""
    taken = accepted(cls)
    for option, value in options.items():
        hint = taken[option][1]
        if not of_kind(value, hint):
            raise UserError(f"mixer {cls.mixer_name!r}: {option}={value!r} is not {words(hint)}")


def build(
    name: str, site: Site, options: dict[str, Any] | None = None, **factory: Any
) -> TokenMixer:
    """Make a mixer for a site from its name; ``num_heads`` in options replaces the site's."""
    cls = get_mixer_class(name)
    options = dict(options or {})
    if "num_heads" in options:
        site = replace(site, num_heads=options.pop("num_heads"))
    known = {p.name for p in _parameters(cls)}
    for option in options:
        if option not in known:
            raise unknown(f"option of mixer {cls.mixer_name!r}:", option, {*known, "num_heads"})
    _check_kinds(cls, options)
    taken = accepted(cls)
    factory = {k: v for k, v in factory.items() if v is not None and k in taken}
    check_first(cls, site, options)
    made = cls(site, **options, **factory)
    made.built_with = options
    return made


@checked
def create_mixer(
    name: str,
    site: Site | None = None,
    *,
    dim: int | None = None,
    num_heads: int = 1,
    grid: Grid | None = None,
    num_prefix_tokens: int = 0,
    key_grid: Sequence[int] | str | None = None,
    windows: int = 1,
    window_grid: Grid | None = None,
    project: Callable[[str], nn.Module] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> TokenMixer:
    """Make a mixer by name, from a :class:`Site` or from the site's arguments.

    Args:
        name: Canonical name or alias, e.g. ``"static_key"`` or ``"ska"``.
        site: Where the mixer sits; if given, the site's arguments below are not.
        dim: Width of the tokens.
        num_heads: Heads.
        grid: Token grid (H, W).
        num_prefix_tokens: Prefix tokens.
        key_grid: Grid of the keys where it differs: that on which ``project`` puts them, or else
            the mixer's option.
        windows: Windows with keys of their own.
        window_grid: How the windows lie (rows, columns).
        project: Makes a role's projection.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
        options: The mixer's own options.

    Example:
        >>> mixer = create_mixer("static_key", dim=64, num_heads=4, grid=(8, 8))
        >>> mixer(torch.randn(2, 64, 64)).shape
        torch.Size([2, 64, 64])

    Raises:
        UserError: If a name or option is unknown, a value is bad, or the mixer cannot serve here.
    """
    device = None if device is None else checked_device(device)
    if key_grid is not None and project is None:
        options["key_grid"], key_grid = key_grid, None
    if site is None:
        if dim is None:
            raise UserError(f"create_mixer({name!r}) needs dim=, the width of the tokens")
        site = Site(
            dim=dim,
            num_heads=num_heads,
            grid=grid,
            num_prefix_tokens=num_prefix_tokens,
            key_grid=None if key_grid is None else as_grid("key_grid", key_grid),
            windows=windows,
            window_grid=window_grid,
            project=project,
        )
    elif dim is not None or grid is not None:
        raise UserError(
            "create_mixer takes either site= or its arguments (dim=, grid=, …), not both"
        )
    return build(name, site, options, device=device, dtype=dtype)


def names_in(path: str | Path) -> list[str]:
    """List the mixers that a file run by :func:`import_file` registers, itself or by an import."""
    return sorted(_OF_FILES.get(Path(path).resolve(), set()) & _MIXERS.keys())


def _module_name(path: Path) -> str:
    return f"keymix_user_{path.stem}"


def import_file(path: str | Path) -> None:
    """Run a user's Python file, so that the mixers, tasks or data sources it registers exist.

    Args:
        path: The file. It keeps its own module name, ``keymix_user_<stem>``. It is run once.

    Raises:
        UserError: If there is no such file, or running it fails.
    """
    path = Path(path)
    if not path.is_file():
        what = "not a regular file" if path.exists() else "no such file"
        raise UserError(f"--import {path}: {what}; name a Python file")
    name = _module_name(path)
    if getattr(sys.modules.get(name), "__file__", None) == str(path.resolve()):
        return
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"--import {path}: not a Python file (its name should end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _discover()  # so that what is new below is the file's
    before = dict(_MIXERS)
    attempt = Attempt()
    try:
        with attempt:
            spec.loader.exec_module(module)
    finally:
        if attempt.error is not None:
            sys.modules.pop(name, None)
    if attempt.error is not None:
        raise _failed(f"--import {path}", attempt.error) from attempt.error
    _OF_FILES[path.resolve()] = {
        each for each, cls in _MIXERS.items() if before.get(each) is not cls
    }


def _failed(message: str, error: BaseException) -> UserError:
    """Make the error of a file that raised one while it was imported."""
    said, what = str(error), type(error).__name__
    if isinstance(error, SystemExit):
        what = "it ends the program (sys.exit) instead of registering mixers, tasks or data sources"
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    if first is not error:  # of a library whose parts load late, the fault of another one
        said = f"{said} ({type(first).__name__}: {first})"
    return UserError(f"{message}: {what}{f': {said}' if said else ''}")
