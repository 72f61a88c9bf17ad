# SPDX-License-Identifier: Apache-2.0
r"""What turns logits of convolutional static keys into weights: activation and scale, ImageNet-1k.

Paper: Static Key Attention in Vision, Table 4, Sec. 6.1, on CSKAFormer-S18. Published top-1:
softmax 83.4 %, GELU 81.5 %, ReLU 81.1 %, StarReLU 81.3 %, softmax without scaling 83.3 %.

    keymix train ska_ablation_activation --data imagenet:PATH --out gelu
    keymix compare --recipe ska_ablation_activation --data imagenet:PATH --no-controls --out acts \
        --baseline sep_conv/cska/softmax/softmax --mixers "sep_conv/cska/softmax/softmax,\
    sep_conv/cska(activation=gelu)/softmax/softmax,sep_conv/cska(activation=relu)/softmax/softmax,\
    sep_conv/cska(activation=star_relu)/softmax/softmax,sep_conv/cska(scale=false)/softmax/softmax"

Settings: those of ``cskaformer_s18_imagenet``, 310 epochs, as the paper's baseline of 83.4 % says.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import cskaformer_s18_imagenet
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``cskaformer_s18_imagenet`` with GELU in place of the softmax."""
    parent = cskaformer_s18_imagenet.recipe()
    model = replace(parent.model, mixer="sep_conv/cska(activation=gelu)/softmax/softmax")
    return replace(parent, name="ska_ablation_activation", model=model)
