# SPDX-License-Identifier: Apache-2.0
"""Mixers into trained models: transfer, calibration, drift, search. ``keymix.swap(…)`` swaps."""

from keymix._lazy import attach, make_callable

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "LayerDrift": "keymix.swap.report",
        "LayerRow": "keymix.swap.report",
        "OutputDrift": "keymix.swap.report",
        "Statistics": "keymix.swap.calibration",
        "SwapReport": "keymix.swap.report",
        "gather": "keymix.swap.calibration",
        "load_swapped": "keymix.models.swapped",
        "save_swapped": "keymix.models.swapped",
        "swap": "keymix.swap.run",
    },
)
make_callable(__name__, "swap", "keymix.swap.run")
