# SPDX-License-Identifier: Apache-2.0
"""The old name of :mod:`keymix.swap`, for one release; its modules' old names lead there too."""

import importlib
import sys
import types
import warnings
from typing import Any

_MOVED = {
    "": "keymix.swap",
    ".attention_cost": "keymix.swap.search",
    ".choose": "keymix.swap.plans",
    ".files": "keymix.swap.save",
    ".held_out": "keymix.swap.search",
    ".images": "keymix.swap.images",
    ".keys": "keymix.swap.calibration",
    ".operation": "keymix.swap.run",
    ".plans": "keymix.swap.plans",
    ".report": "keymix.swap.report",
    ".saving": "keymix.swap.save",
    ".search": "keymix.swap.search",
    ".search_record": "keymix.swap.record",
    ".statistics": "keymix.swap.calibration",
    ".swap_record": "keymix.swap.record",
    ".transfer": "keymix.swap.transfer",
}


class _Moved(types.ModuleType):
    """A module that warns and looks its names up where they are now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        new = _MOVED[self.__name__.removeprefix(__name__)]
        value = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"{self.__name__} will go with the next release: import {name} from {new}",
            DeprecationWarning,
            stacklevel=2,
        )
        return value


sys.modules[__name__].__class__ = _Moved
for _name in filter(None, _MOVED):
    sys.modules[__name__ + _name] = _Moved(__name__ + _name)
