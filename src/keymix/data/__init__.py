# SPDX-License-Identifier: Apache-2.0
"""Samples as rows: sources, splits that never leak, decoding, augmentation and loaders.

A data spec such as ``digits`` or ``folder:PATH`` names a source, a function that lists rows
(`keymix.data.sample`); `load` turns it into train, validation and test splits, and `Loader` serves
them in batches.
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
    from keymix.data.sample import Faults as Faults
    from keymix.data.sample import Row as Row
    from keymix.data.sample import Source as Source

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Augment": "keymix.data.augment",
        "Batch": "keymix.data.loaders",
        "Faults": "keymix.data.sample",
        "ImageData": "keymix.data.dataset",
        "Loader": "keymix.data.loaders",
        "Row": "keymix.data.sample",
        "Source": "keymix.data.sample",
        "Split": "keymix.data.dataset",
        "load": "keymix.data.loading",
        "read_image": "keymix.data.decode",
    },
)
