# SPDX-License-Identifier: Apache-2.0
"""Lazy public names (PEP 562), so that importing a room costs nothing until it is used."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

Attached = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def attach(module_name: str, where: Mapping[str, str]) -> Attached:
    """Make a module's ``__getattr__``, ``__dir__`` and ``__all__`` from names and their modules."""
    public = sorted(where)

    def getattr_(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(where[name]), name)
        setattr(sys.modules[module_name], name, value)
        return value

    def dir_() -> list[str]:
        return public

    return getattr_, dir_, public


def make_callable(module_name: str, function: str, home: str) -> None:
    """Let a room be called like its main function: ``keymix.train(...)``, ``keymix.train.engine``.

    The public API and rooms of the house share names, such as ``train``; whichever
    is imported first, calling the name must work.
    """

    class CallableRoom(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(home), function)(*args, **kwargs)

    sys.modules[module_name].__class__ = CallableRoom
