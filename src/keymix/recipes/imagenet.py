# SPDX-License-Identifier: Apache-2.0
"""What recipes of several papers share on ImageNet-1k: images, crops, RandAugment and erasing."""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.train.recipe import DataConfig

AUGMENT = Augment(
    random_resized_crop=(0.08, 1.0),
    flip=True,
    auto_augment="rand-m9-mstd0.5-inc1",
    erasing=0.25,
    erasing_fill="noise",
)


def imagenet(*, batch_size: int, image_size: int = 224) -> DataConfig:
    """ImageNet-1k, complete but for its path."""
    return DataConfig(spec="imagenet:", image_size=image_size, batch_size=batch_size, workers=8)
