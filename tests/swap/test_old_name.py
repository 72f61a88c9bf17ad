# SPDX-License-Identifier: Apache-2.0
"""`keymix.surgery` leads to `keymix.swap` for one release, and says so; the room can be called."""

from __future__ import annotations

import importlib
import types

import pytest

import keymix
import keymix.swap
from keymix.swap import swap


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("keymix.surgery", "swap", "keymix.swap"),
        ("keymix.surgery", "gather", "keymix.swap"),
        ("keymix.surgery.operation", "swap", "keymix.swap.run"),
        ("keymix.surgery.files", "load_swapped", "keymix.swap.save"),
        ("keymix.surgery.search", "search", "keymix.swap.search"),
        ("keymix.surgery.report", "SwapReport", "keymix.swap.report"),
    ],
)
def test_the_old_name_warns_and_leads_to_the_new(old: str, name: str, new: str) -> None:
    module = importlib.import_module(old)
    with pytest.warns(DeprecationWarning, match=rf"import {name} from {new}$"):
        value = getattr(module, name)
    assert value is getattr(importlib.import_module(new), name)


def test_unknown_names_are_none_of_the_old_modules() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("keymix.surgery.nothing")
    with pytest.raises(AttributeError):
        _ = importlib.import_module("keymix.surgery.operation").nothing


def test_the_room_is_the_function() -> None:
    assert isinstance(keymix.swap, types.ModuleType)
    with pytest.raises(TypeError, match="mixer"):
        keymix.swap()
    assert keymix.swap.swap is swap
