# SPDX-License-Identifier: Apache-2.0
"""SKAFormer-S18 on ImageNet-1k: CAFormer with static keys in its second stage.

Paper: Static Key Attention in Vision, Table 2. Published top-1 at 224 pixels: SKAFormer-S18 82.3 %
(printed 26M, 8.0G), 1.0 below CAFormer-S18. Counted here: 26,555,922 parameters, 9.0 GFLOPs. The
text places the static keys in stage 2; the printed figures fit no placement (docs/papers.md).

    keymix train skaformer_s18_imagenet --data imagenet:PATH --out skaformer-s18

Settings and differences: those of ``cskaformer_s18_imagenet``.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import cskaformer_s18_imagenet
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``cskaformer_s18_imagenet`` with static keys."""
    parent = cskaformer_s18_imagenet.recipe()
    model = replace(parent.model, name="skaformer_s18")
    return replace(parent, name="skaformer_s18_imagenet", model=model)
