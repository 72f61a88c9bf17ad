# SPDX-License-Identifier: Apache-2.0
"""The way up of a U-Net: twice the size at each step, next to the encoder's map of that size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import ConvNormAct
from torch import Tensor, nn

from keymix.decoders.segmentation.pup import UpBlock


class UNetBlock(nn.Module):
    """Twice the height and width, the encoder's map of that size next to it, 3x3 convolutions.

    ``up`` is a 3x3 convolution that is doubled bilinearly, where the paper's up-convolution is 2x2;
    each of ``convs`` is followed by BatchNorm and ReLU.

    Shape: x ``[B, in_chans, h, w]`` and skip ``[B, skip_chans, 2h, 2w]``, or None where
    ``skip_chans`` is 0, -> ``[B, out_chans, 2h, 2w]``.
    Cost: 9 h w in_chans out_chans + 36 h w out_chans (2 out_chans + skip_chans) multiply-adds with
    a skip, in which case there are two convolutions, and 36 h w out_chans^2 for the one without.
    """

    def __init__(
        self,
        in_chans: int,
        skip_chans: int,
        out_chans: int,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.up = UpBlock(in_chans, out_chans, **factory)
        joined = [out_chans + skip_chans, out_chans] if skip_chans else [out_chans]
        self.convs = nn.Sequential(*(ConvNormAct(n, out_chans, 3, **factory) for n in joined))

    def forward(
        self, x: Float[Tensor, "B c h w"], skip: Float[Tensor, "B s H W"] | None
    ) -> Float[Tensor, "B o H W"]:
        """Double, join and convolve."""
        x = self.up(x)
        out: Tensor = self.convs(x if skip is None else torch.cat((skip, x), 1))
        return out


class UNetDecoder(nn.Module):
    """From the deepest map of an encoder to features at the image's size.

    Paper: U-Net, https://arxiv.org/abs/1505.04597, Sec. 2 and Fig. 1. Differs: convolutions are
    padded and normalised, so maps meet without cropping.

    Args:
        chans: Channels of the encoder's maps, the deepest last; each is half as large as the one
            before it.
        widths: Channels of every block, the deepest first; one more than there are maps to join,
            if the first map is half as large as the image.
        num_classes: Outputs of a pixel; 0 for the features before the classifier.
        drop_rate: Probability of dropping a channel before the classifier.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: maps ``[B, chans[i], H / 2^(i+1), W / 2^(i+1)]`` -> ``[B, widths[-1], H, W]``.
    """

    def __init__(
        self,
        chans: Sequence[int],
        widths: Sequence[int],
        num_classes: int,
        *,
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        skips = [*chans[-2::-1], 0]
        before = [chans[-1], *widths[:-1]]
        self.blocks = nn.ModuleList(
            UNetBlock(taken, skip, given, **factory)
            for taken, skip, given in zip(before, skips, widths, strict=True)
        )
        self.num_features = widths[-1]
        self.drop = nn.Dropout2d(drop_rate)
        self.head = self.classifier(num_classes, **factory)

    def classifier(self, num_classes: int, **factory: Any) -> nn.Module:
        """Make a 1x1 convolution to the classes, or nothing for none."""
        if num_classes == 0:
            return nn.Identity()
        return nn.Conv2d(self.num_features, num_classes, 1, **factory)

    def forward(self, maps: Sequence[Float[Tensor, "B _ _ _"]]) -> Float[Tensor, "B D H W"]:
        """Return the features before the classifier.

        Args:
            maps: The encoder's, the deepest last.
        """
        x = maps[-1]
        for block, skip in zip(self.blocks, [*maps[-2::-1], None], strict=True):
            x = block(x, skip)
        return x
