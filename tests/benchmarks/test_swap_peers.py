# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks compare swaps with is what the papers say."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from swap_table import TokenMerging, pruned
from tolerances import close, differs


@pytest.fixture
def vit() -> VisionTransformer:
    torch.manual_seed(0)
    made = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )
    torch.nn.init.normal_(made.head.weight)
    return made.double().eval()


def test_without_merging_it_is_the_model(vit: VisionTransformer) -> None:
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    close(TokenMerging(vit, 0)(images), vit(images))


def test_tokens_that_are_alike_merge_without_loss(vit: VisionTransformer) -> None:
    """Patches of one colour are one token many times over, if positions say nothing."""
    torch.nn.init.zeros_(vit.pos_embed)
    halves = torch.randn(2, 3, 1, 2, dtype=torch.float64).repeat_interleave(8, -1)
    images = halves.expand(2, 3, 16, 16)
    close(TokenMerging(vit, 4)(images), vit(images))
    noise = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert differs(TokenMerging(vit, 4)(noise), vit(noise))


def test_merging_keeps_the_mean_and_the_class_token(vit: VisionTransformer) -> None:
    x, keys = torch.randn(2, 17, 24, dtype=torch.float64), torch.randn(2, 17, 8)
    size = torch.ones(2, 17, 1, dtype=torch.float64)
    merged, sizes = TokenMerging(vit, 5)._merge(x, keys.double(), size)
    assert merged.shape == (2, 12, 24)
    close(merged[:, 0], x[:, 0])
    close((merged * sizes).sum(1), x.sum(1))
    close(sizes.sum(1), size.sum(1))


def test_the_heads_that_are_pruned_are_those_that_do_nothing(vit: VisionTransformer) -> None:
    for block, dead in zip(vit.blocks, (1, 2), strict=True):
        torch.nn.init.zeros_(block.attn.proj.weight[:, 8 * dead : 8 * dead + 8])
    images = torch.randn(6, 3, 16, 16, dtype=torch.float64)
    labels = torch.arange(6) % 5
    fewer = pruned(vit, images, labels, 2)
    assert [block.attn.num_heads for block in fewer.blocks] == [2, 2]
    close(fewer(images), vit(images))
    assert [block.attn.num_heads for block in pruned(vit, images, labels, 9).blocks] == [1, 1]
