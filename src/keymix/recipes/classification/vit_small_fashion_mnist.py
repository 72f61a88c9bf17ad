# SPDX-License-Identifier: Apache-2.0
"""ViT-S with shifted patches on Fashion-MNIST under the static-key authors' settings.

Paper: Static Key Attention in Vision, Table 8. Published top-1: ViT-S 83.2 %, SKA 83.6 % (widened,
9.5 M parameters), CSKA 84.1 %.

    keymix train vit_small_fashion_mnist --out vit-s
    keymix compare --recipe vit_small_fashion_mnist --mixers mhsa,ska,cska --seeds 5 --out vit-s-cmp

Settings as in ``vit_small_cifar10``: the paper names no others for its further data sets. Grey
images of 28x28 are resized to 32x32 and repeated to three channels.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import vit_small_cifar10
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``vit_small_cifar10`` on other images."""
    parent = vit_small_cifar10.recipe()
    return replace(
        parent, name="vit_small_fashion_mnist", data=replace(parent.data, spec="fashion_mnist")
    )
