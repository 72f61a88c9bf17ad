# SPDX-License-Identifier: Apache-2.0
"""CSKAFormer-B36 on ImageNet-1k: the large CAFormer with convolutional static keys in stage two.

Paper: Static Key Attention in Vision, Table 2. Published top-1 at 224 pixels: CSKAFormer-B36 85.7 %
(printed 119M, 48.4G), CAFormer-B36 85.5 % (99M, 46.4G). Counted here: 119,417,398 parameters, 82.4
GFLOPs, of which 34.0 are the grouped convolution that the paper left out.

    keymix train cskaformer_b36_imagenet --data imagenet:PATH --out cskaformer-b36
    keymix train cskaformer_b36_imagenet --data imagenet:PATH --model caformer_b36 --out caformer

Settings and differences: those of ``cskaformer_s18_imagenet``, but for what CAFormer's authors give
its B36: drop path 0.6, dropout before the classifier 0.5; 64 images a step, 64 steps an update.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import cskaformer_s18_imagenet
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``cskaformer_s18_imagenet`` with the larger model and its stronger dropping."""
    parent = cskaformer_s18_imagenet.recipe()
    return replace(
        parent,
        name="cskaformer_b36_imagenet",
        data=replace(parent.data, batch_size=64),
        model=replace(parent.model, name="cskaformer_b36", drop_path=0.6, drop_rate=0.5),
        optim=replace(parent.optim, accumulate=64),
    )
