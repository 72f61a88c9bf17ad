# SPDX-License-Identifier: Apache-2.0
"""Functions with a code object of their own, for PyTorch's compiler."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def own_code(function: Callable[..., Any], name: str) -> Any:
    """Copy a function that closes over nothing, under a name that no other copy has.

    PyTorch counts the compilations of a code object and gives up at some; each copy has its own.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name)
