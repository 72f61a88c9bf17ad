# SPDX-License-Identifier: Apache-2.0
"""CvT-13 on CIFAR-10 under the static-key authors' settings.

Paper: Static Key Attention in Vision, Tables 1, 8 and 9. Published top-1, the best epoch on the
test set of one run, CvT-13 / SKA / SKA widened / CSKA: CIFAR-10 81.0 / 81.3 / 81.4 / 81.3 %;
CIFAR-100 49.8 / 49.8 / 50.5 / 51.1 %; SVHN 86.8 / - / 87.0 / 87.0 %; Fashion-MNIST 83.0 / - / 84.4
/ 85.7 %.

    keymix train cvt_13_cifar10 --out cvt
    keymix train cvt_13_cifar10 --model ska_cvt_13_32_wide --out ska-wide-cvt
    keymix train cvt_13_cifar10 --data cifar100 --out cvt-cifar100
    keymix compare --recipe cvt_13_cifar10 --mixers mhsa,ska,cska --seeds 5 --out cvt-cmp

Settings and differences: those of ``vit_small_cifar10``, without dropout (Table 9).

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import vit_small_cifar10
from keymix.train.recipe import ModelConfig, Recipe


def recipe() -> Recipe:
    """The run of ``vit_small_cifar10`` with CvT."""
    parent = vit_small_cifar10.recipe()
    model = ModelConfig(name="cvt_13_32")
    return replace(parent, name="cvt_13_cifar10", model=model)
