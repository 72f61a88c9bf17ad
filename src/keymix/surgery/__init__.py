# SPDX-License-Identifier: Apache-2.0
"""Putting mixers into trained models: what is copied, what is estimated, how far it drifts."""

from keymix._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "LayerDrift": "keymix.surgery.report",
        "LayerRow": "keymix.surgery.report",
        "OutputDrift": "keymix.surgery.report",
        "Statistics": "keymix.surgery.statistics",
        "SwapReport": "keymix.surgery.report",
        "gather": "keymix.surgery.statistics",
        "load_swapped": "keymix.surgery.files",
        "save_swapped": "keymix.surgery.files",
        "swap": "keymix.surgery.operation",
    },
)
