# SPDX-License-Identifier: Apache-2.0
r"""Accuracy against depth on ImageNet-1k, 12 to 32 blocks, with and without re-attention.

Paper: DeepViT, https://arxiv.org/abs/2103.11886, Fig. 1: the plain ViT stops to gain after 24
blocks, the one with re-attention does not. Published top-1 at 16, 24, 32 blocks (Table 4): ViT
78.9, 79.4, 79.3 %, DeepViT 79.1, 80.1, 80.9 %; ViT at 12 blocks 77.86 % (Table 1). Blocks whose
maps are like their neighbour's: 5, 11, 16 in ViT, none in DeepViT.

    keymix train deepvit_depth --data imagenet:PATH --out curve/vit-12
    for depth in 16 24 32; do
        keymix train deepvit_depth --data imagenet:PATH --model vit_${depth}b --out curve/vit-$depth
    done
    for depth in 12 16 24 32; do
        keymix train deepvit_depth --data imagenet:PATH --model deepvit_${depth}b \
            --out curve/deepvit-$depth
    done

In small, on CIFAR images and two cores, a comparison a depth, which also tells how alike the maps
of neighbouring blocks are:

    for depth in 4 8 16 24; do
        keymix compare --recipe small_images_vit --data parquet:PATH --model deepvit_micro_p4_32 \
            --model.options.depth $depth --mixers mhsa,re_attention --seeds 3 \
            --out curve/depth-$depth
    done

Settings and differences: those of ``deepvit_imagenet``.

Measured: not measured yet.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.classification import deepvit_imagenet
from keymix.train.recipe import Recipe


def recipe() -> Recipe:
    """The run of ``deepvit_imagenet`` at the curve's first point."""
    parent = deepvit_imagenet.recipe()
    return replace(parent, name="deepvit_depth", model=replace(parent.model, name="vit_12b"))
