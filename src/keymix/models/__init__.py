# SPDX-License-Identifier: Apache-2.0
"""The papers' models. Importing this room registers them in timm."""

import importlib
import pkgutil

from keymix._lazy import attach

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"keymix.models.{_module.name}")

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Loaded": "keymix.models.weights",
        "create_model": "keymix.models.factory",
        "list_models": "keymix.models.factory",
        "load_weights": "keymix.models.weights",
        "set_image_size": "keymix.models.image_size",
    },
)
