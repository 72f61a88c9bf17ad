# SPDX-License-Identifier: Apache-2.0
"""CaiT-S on CIFAR-10 under the static-key authors' settings.

Paper: Static Key Attention in Vision, Tables 1, 8 and 9. Published top-1, the best epoch on the
test set of one run, CaiT-S / SKA / SKA widened / CSKA: CIFAR-10 82.8 / 83.5 / 84.0 / 87.9 %;
CIFAR-100 57.3 / 57.4 / 57.8 / 60.6 %; SVHN 86.4 / - / 86.8 / 89.2 %; Fashion-MNIST 82.8 / - / 83.3
/ 85.9 %.

    keymix train cait_small_cifar10 --out cait
    keymix train cait_small_cifar10 --model ska_cait_small_p4_32_wide --out ska-wide-cait
    keymix train cait_small_cifar10 --data cifar100 --schedule.epochs 400 --out cait-cifar100
    keymix compare --recipe cait_small_cifar10 --mixers mhsa,ska,cska --seeds 5 --out cait-cmp

Settings and differences: those of ``vit_small_cifar10``; dropout 0.1 and stochastic depth 0.05 (the
paper prints "0.05 - 0.1"; the code behind the baseline drops whole layers for a batch, we for each
image). The authors' CIFAR-100 script trains CaiT for 400 epochs.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import vit_small_cifar10
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``vit_small_cifar10`` with CaiT."""
    parent = vit_small_cifar10.recipe()
    model = replace(parent.model, name="cait_small_p4_32", drop_path=0.05)
    return replace(parent, name="cait_small_cifar10", model=model)
