# SPDX-License-Identifier: Apache-2.0
"""ViT-S with shifted patches on SVHN under the static-key authors' settings.

Paper: Static Key Attention in Vision, Table 8. Published top-1: ViT-S 87.1 %, SKA 87.4 % (widened,
9.5 M parameters), CSKA 88.9 %.

    keymix train vit_small_svhn --out vit-s
    keymix compare --recipe vit_small_svhn --mixers mhsa,ska,cska --seeds 5 --out vit-s-cmp

Settings as in ``vit_small_cifar10``: the paper names no others for its further data sets. So the
flip, which turns a 2 into no digit at all, is taken over too; ``--augment.flip false`` leaves it
out. Train (73,257) and test (26,032) images; the extra set is not used, as in the paper.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import vit_small_cifar10
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``vit_small_cifar10`` on other images."""
    parent = vit_small_cifar10.recipe()
    return replace(parent, name="vit_small_svhn", data=replace(parent.data, spec="svhn"))
