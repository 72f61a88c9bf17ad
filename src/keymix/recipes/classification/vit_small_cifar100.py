# SPDX-License-Identifier: Apache-2.0
"""ViT-S with shifted patches on CIFAR-100 under the static-key authors' settings.

Paper: Static Key Attention in Vision, Table 1. Published top-1, the best epoch on the test set of
one run: ViT-S 63.5 %, SKA 61.8 % (8.1 M parameters) and 62.0 % (9.5 M), CSKA 64.5 %: here the
paper's static keys lose to the baseline.

    keymix train vit_small_cifar100 --out vit-s
    keymix compare --recipe vit_small_cifar100 --mixers mhsa,ska,cska --seeds 5 --out vit-s-cmp

Settings and differences as in ``vit_small_cifar10``; the authors' CIFAR-100 script, too, trains ViT
for 200 epochs (Swin and CaiT for 400).

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import vit_small_cifar10
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``vit_small_cifar10`` on other images."""
    parent = vit_small_cifar10.recipe()
    return replace(parent, name="vit_small_cifar100", data=replace(parent.data, spec="cifar100"))
