# SPDX-License-Identifier: Apache-2.0
"""Labelled images: sources, splits that never leak, decoding, augmentation and loaders.

A data spec such as ``digits`` or ``folder:PATH`` names a source (`keymix.data.specs`); `load` turns
it into train, validation and test splits, and `Loader` serves them in batches.
"""

from typing import TYPE_CHECKING

from keymix._lazy import attach

if TYPE_CHECKING:
    from keymix.data.augment import Augment as Augment
    from keymix.data.dataset import ImageData as ImageData
    from keymix.data.dataset import Split as Split
    from keymix.data.decode import read_image as read_image
    from keymix.data.loaders import Batch as Batch
    from keymix.data.loaders import Loader as Loader
    from keymix.data.loading import load as load

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Augment": "keymix.data.augment",
        "Batch": "keymix.data.loaders",
        "ImageData": "keymix.data.dataset",
        "Loader": "keymix.data.loaders",
        "Split": "keymix.data.dataset",
        "load": "keymix.data.loading",
        "read_image": "keymix.data.decode",
    },
)
