# SPDX-License-Identifier: Apache-2.0
"""SETR's progressive upsampling with fewer channels at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keymix.layers.folding import Foldable, fold_norm

Grid = tuple[int, int]

WIDTHS = (512, 256, 128, 64)
"""Channels behind each convolution of the paper's decoder."""


class UpBlock(Foldable):
    """3x3 convolution with bias, BatchNorm and ReLU, then twice the height and width, bilinear.

    Shape: ``[B, in_chans, h, w]`` -> ``[B, out_chans, 2 h, 2 w]``.
    Cost: 9 h w in_chans out_chans multiply-adds; the interpolation is not counted.
    """

    def __init__(
        self, in_chans: int, out_chans: int, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(in_chans, out_chans, 3, padding=1, **factory)
        self.bn = nn.BatchNorm2d(out_chans, **factory)

    def fold(self) -> None:
        """Fold the norm into the convolution."""
        fold_norm(self, "conv", "bn")

    def forward(self, x: Float[Tensor, "B c h w"]) -> Float[Tensor, "B o H W"]:
        """Convolve at the size that is there, then double it."""
        x = F.relu(self.bn(self.conv(x)))
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class PixelDecoder(nn.Module):
    """Ends in ``head``, a 1x1 convolution from ``num_features`` channels to the classes."""

    num_features: int
    drop: nn.Module
    head: nn.Module

    def end(self, num_features: int, num_classes: int, drop_rate: float, **factory: Any) -> None:
        """Make dropout and classifier."""
        self.num_features = num_features
        self.drop = nn.Dropout2d(drop_rate)
        self.head = self.classifier(num_classes, **factory)

    def classifier(self, num_classes: int, **factory: Any) -> nn.Module:
        """Make a 1x1 convolution to the classes, or nothing for none."""
        if num_classes == 0:
            return nn.Identity()
        return nn.Conv2d(self.num_features, num_classes, 1, **factory)


class PUPDecoder(PixelDecoder):
    """Upsamples features step by step and classifies every pixel: the SETR-PUP of the KV paper.

    Papers: SETR, https://arxiv.org/abs/2012.15840, Sec. 3.2 (PUP keeps one width); KV attention in
    SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2 and Fig. 2: the width is halved at
    each step. Which widths the figure does not say: 512, 256, 128, 64 are those with which the
    parameters of all rows of Table 2 come out (the CvT's, of 384 channels, exclude D/2, D/4, ...).
    Logits are brought to the size asked for, bilinearly, where doubling does not reach it.

    Args:
        in_chans: Channels D of the features.
        num_classes: Outputs of a pixel; 0 for the features before the classifier.
        widths: Channels behind each convolution; each is followed by a doubling.
        drop_rate: Probability of dropping a channel before the classifier.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: features ``[B, D, h, w]`` -> logits ``[B, num_classes, H, W]``.
    """

    def __init__(
        self,
        in_chans: int,
        num_classes: int,
        *,
        widths: Sequence[int] = WIDTHS,
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        before = (in_chans, *widths[:-1])
        self.blocks = nn.ModuleList(
            UpBlock(taken, given, **factory) for taken, given in zip(before, widths, strict=True)
        )
        self.end(widths[-1], num_classes, drop_rate, **factory)

    def forward(
        self, x: Float[Tensor, "B D h w"], size: Grid, *, pre_logits: bool = False
    ) -> Float[Tensor, "B K H W"]:
        """Upsample and classify.

        Args:
            x: The encoder's features.
            size: Height and width of the logits, pixels.
            pre_logits: Stop before the classifier, at the size that doubling reaches.
        """
        for block in self.blocks:
            x = block(x)
        x = self.drop(x)
        if pre_logits:
            return x
        x = self.head(x)
        if (x.shape[-2], x.shape[-1]) != size:
            x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        return x
