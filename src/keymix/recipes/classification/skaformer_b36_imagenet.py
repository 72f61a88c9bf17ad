# SPDX-License-Identifier: Apache-2.0
"""SKAFormer-B36 on ImageNet-1k: the large CAFormer with static keys in its second stage.

Paper: Static Key Attention in Vision, Table 2. Published top-1 at 224 pixels: SKAFormer-B36 83.9 %
(printed 97M, 45.6G), 1.6 below CAFormer-B36. Counted here: 100,074,550 parameters, 52.2 GFLOPs; the
printed 97M fits no placement (docs/papers.md).

    keymix train skaformer_b36_imagenet --data imagenet:PATH --out skaformer-b36

Settings and differences: those of ``cskaformer_b36_imagenet``.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import cskaformer_b36_imagenet
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``cskaformer_b36_imagenet`` with static keys."""
    parent = cskaformer_b36_imagenet.recipe()
    model = replace(parent.model, name="skaformer_b36")
    return replace(parent, name="skaformer_b36_imagenet", model=model)
