# SPDX-License-Identifier: Apache-2.0
"""Decoders that join maps of several resolutions, segmentation-models-pytorch's, by name.

Papers: U-Net, https://arxiv.org/abs/1505.04597, Fig. 1; FPN, https://arxiv.org/abs/1612.03144, with
the branch for pixels of Panoptic FPN, https://arxiv.org/abs/1901.02446, Sec. 3.1; UPerNet,
https://arxiv.org/abs/1807.10221, Sec. 3.1; DeepLabV3+, https://arxiv.org/abs/1802.02611, Sec. 3.1;
Segformer, https://arxiv.org/abs/2105.15203, Sec. 3.2.

How the library differs from them: U-Net upsamples by nearest neighbours in place of transposed
convolutions, and its convolutions are padded and normalised, so that maps meet without cropping;
UPerNet normalises every map by a LayerNorm first; Segformer reads the map at 1/2 too where there is
one. Here DeepLabV3+ has the paper's rates of dilation, 6, 12 and 18 at 1/16 and twice these at 1/8,
the U-Net's last convolution is the paper's 1x1, and what drops features stands before the last
convolution alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxtyping import Float
from segmentation_models_pytorch.base.initialization import initialize_decoder
from segmentation_models_pytorch.decoders.deeplabv3.decoder import (
    DeepLabV3PlusDecoder,
    SeparableConv2d,
)
from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
from segmentation_models_pytorch.decoders.segformer.decoder import SegformerDecoder
from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoder
from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
from torch import Tensor, nn

from keymix.decoders.segmentation.pup import PixelDecoder
from keymix.errors import UserError
from keymix.layers.folding import Foldable, fold_norm

Built = tuple[nn.Module, int]
"""What joins the maps, and the channels that it gives."""


@dataclass(frozen=True)
class Kind:
    """How a decoder is built, of the channels at 1, 1/2, 1/4 … (0 for no map) and a width."""

    build: Callable[[list[int], int], Built]
    deepest: int = 32  # reduction of the smallest map that it takes
    least: int = 2  # maps


def _unet(chans: list[int], width: int) -> Built:
    widths = [width >> step for step in range(len(chans) - 1)]
    _check_width("unet", width, 1 << (len(widths) - 1))
    return UnetDecoder(chans, widths, n_blocks=len(widths)), widths[-1]


def _fpn(chans: list[int], width: int) -> Built:
    _check_width("fpn", width, 64)  # its GroupNorms have 32 groups of half as many channels
    return FPNDecoder(chans, len(chans) - 1, width, width // 2, dropout=0.0), width // 2


def _upernet(chans: list[int], width: int) -> Built:
    return UPerNetDecoder(chans, len(chans) - 1, width), width


def _deeplabv3plus(chans: list[int], width: int) -> Built:
    depth = len(chans) - 1
    rate = 96 >> depth  # 6 at 1/16
    join = DeepLabV3PlusDecoder(
        encoder_channels=chans,
        encoder_depth=depth,
        out_channels=width,
        atrous_rates=(rate, 2 * rate, 3 * rate),
        output_stride=1 << depth,
        aspp_separable=True,
        aspp_dropout=0.0,
    )
    return join, width


def _segformer(chans: list[int], width: int) -> Built:
    return SegformerDecoder(chans, len(chans) - 1, width), width


KINDS: dict[str, Kind] = {
    "unet": Kind(_unet),
    "fpn": Kind(_fpn, least=4),
    "upernet": Kind(_upernet),
    "deeplabv3plus": Kind(_deeplabv3plus, deepest=16),
    "segformer": Kind(_segformer),
}


def _check_width(kind: str, width: int, multiple: int) -> None:
    if width % multiple:
        raise UserError(f"decoder_width={width} of {kind} must be a multiple of {multiple}")


class MultiScaleDecoder(PixelDecoder, Foldable):
    """From the maps of an encoder to features of pixels, and a 1x1 convolution to their classes.

    Weights start as the library's: He uniform, biases 0.

    Args:
        kind: Name of the decoder, of `KINDS`.
        channels: Channels of each map by its reduction: 2 or 4 and its doubles, without a gap.
        width: Channels of its convolutions: of the U-Net those of the first block, halved with
            each further one; of the FPN those of the pyramid, halved before the classifier.
        num_classes: Outputs of a pixel; 0 for the features before the classifier.
        drop_rate: Probability of dropping a channel before the classifier.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: maps ``[B, channels[r], H / r, W / r]`` -> ``[B, num_features, H / s, W / s]``; s is 1 of
        the U-Net, the reduction of the finest of the last four maps of the FPN, 4 of the others.

    Raises:
        UserError: If the width is no multiple of what the decoder divides it by.
    """

    def __init__(
        self,
        kind: str,
        channels: Mapping[int, int],
        width: int,
        num_classes: int,
        *,
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.deepest = max(channels)
        steps = range(self.deepest.bit_length())
        join, given = KINDS[kind].build([channels.get(1 << step, 0) for step in steps], width)
        initialize_decoder(join)  # with PyTorch's own start a U-Net hardly learns small sets
        self.join = join.to(**factory)
        self.end(given, num_classes, drop_rate, **factory)

    def fold(self) -> None:
        """Fold the norms behind separable convolutions and behind that of pooled features too."""
        for owner in [*self.join.modules()]:
            if isinstance(owner, nn.Sequential):
                for (name, layer), (norm, _) in pairwise([*owner.named_children()]):
                    last = f"{name}.1" if isinstance(layer, SeparableConv2d) else name
                    fold_norm(owner, last, norm)

    def forward(self, maps: Sequence[Float[Tensor, "B _ _ _"]]) -> Float[Tensor, "B D H W"]:
        """Return the features before the classifier.

        Args:
            maps: The encoder's, the deepest last.
        """
        features = [*maps]
        while len(features) < self.deepest.bit_length():  # empty ones, up to the image's size
            features.insert(0, features[0][:, :0].repeat_interleave(2, -1).repeat_interleave(2, -2))
        out: Tensor = self.join(features)
        return out
