# SPDX-License-Identifier: Apache-2.0
"""Swin-T, window 4, on CIFAR-10 under the static-key authors' settings.

Paper: Static Key Attention in Vision, Tables 1, 8 and 9. Published top-1, the best epoch on the
test set of one run, Swin-T / SKA / SKA widened / CSKA: CIFAR-10 89.2 / 89.7 / 90.0 / 89.4 %;
CIFAR-100 63.1 / 62.2 / 63.3 / 62.3 %; SVHN 88.3 / - / 88.5 / 88.8 %; Fashion-MNIST 88.1 / - / 88.0
/ 88.2 %.

    keymix train swin_tiny_cifar10 --out swin
    keymix train swin_tiny_cifar10 --model ska_swin_tiny_p2_32_wide --out ska-wide-swin
    keymix train swin_tiny_cifar10 --data cifar100 --schedule.epochs 400 --out swin-cifar100
    keymix compare --recipe swin_tiny_cifar10 --mixers mhsa,ska,cska --seeds 5 --out swin-cmp

Settings and differences: those of ``vit_small_cifar10``, without dropout (Table 9). The authors'
CIFAR-100 script trains Swin for 400 epochs.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import vit_small_cifar10
from keymix.train.recipe import ModelConfig, Recipe


def recipe() -> Recipe:
    """The run of ``vit_small_cifar10`` with Swin."""
    parent = vit_small_cifar10.recipe()
    model = ModelConfig(name="swin_tiny_p2_32")
    return replace(parent, name="swin_tiny_cifar10", model=model)
