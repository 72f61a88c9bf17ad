# SPDX-License-Identifier: Apache-2.0
"""The way up of a U-Net, segmentation-models-pytorch's, with a classifier of pixels behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from segmentation_models_pytorch.base.initialization import initialize_decoder
from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoder
from torch import Tensor

from keymix.decoders.segmentation.pup import PixelDecoder


class UNetDecoder(PixelDecoder):
    """From the maps of an encoder to features at the image's size.

    Paper: U-Net, https://arxiv.org/abs/1505.04597, Sec. 2 and Fig. 1. Differs as the library does:
    nearest-neighbour upsampling in place of transposed convolutions; convolutions are padded and
    normalised, so that maps meet without cropping.

    Args:
        chans: Channels of the encoder's maps, the deepest last; each is half as large as the one
            before it, the first half as large as the image.
        widths: Channels of every block, the deepest first, one per map.
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
        blocks = UnetDecoder((0, *chans), tuple(widths), n_blocks=len(widths))
        initialize_decoder(blocks)  # with PyTorch's own start it hardly learns small sets
        self.up = blocks.to(**factory)
        self.end(widths[-1], num_classes, drop_rate, **factory)

    def forward(self, maps: Sequence[Float[Tensor, "B _ _ _"]]) -> Float[Tensor, "B D H W"]:
        """Return the features before the classifier.

        Args:
            maps: The encoder's, the deepest last.
        """
        image = maps[0].repeat_interleave(2, -1).repeat_interleave(2, -2)[:, :0]
        out: Tensor = self.up([image, *maps])
        return out
