# SPDX-License-Identifier: Apache-2.0
r"""Heads (groups) of convolutional static keys against accuracy and speed, ImageNet-1k.

Paper: Static Key Attention in Vision, Fig. 3, Sec. 6.2, 160 epochs: more heads are more accurate
and a little slower; the figure prints no numbers.

    keymix train ska_ablation_heads --data imagenet:PATH --out four-heads
    keymix compare --recipe ska_ablation_heads --data imagenet:PATH --no-controls --out heads \
        --mixers "sep_conv/cska(num_heads=1,head_dim=128)/softmax/softmax,\
    sep_conv/cska(num_heads=2,head_dim=64)/softmax/softmax,\
    sep_conv/cska(num_heads=4,head_dim=32)/softmax/softmax,\
    sep_conv/cska(num_heads=8,head_dim=16)/softmax/softmax,\
    sep_conv/cska(num_heads=16,head_dim=8)/softmax/softmax"

The comparison's report shows accuracy against measured latency and images a second. ``head_dim``
keeps the stage's width of 128, so that the number of heads alone changes: 4 heads of 32 are
CAFormer's, 8 of 16 the authors' code. Settings: those of ``ska_ablation_placement``.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import ska_ablation_placement
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``ska_ablation_placement`` with the number of heads laid open."""
    parent = ska_ablation_placement.recipe()
    model = replace(parent.model, mixer="sep_conv/cska(num_heads=4,head_dim=32)/softmax/softmax")
    return replace(parent, name="ska_ablation_heads", model=model)
