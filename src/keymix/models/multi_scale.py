# SPDX-License-Identifier: Apache-2.0
"""Segmentation models that join maps of several resolutions, over any hierarchical backbone.

U-Net, FPN, UPerNet, DeepLabV3+ and Segformer, by the decoders of segmentation-models-pytorch; their
papers stand in `keymix.decoders.segmentation.multi_scale`. A plain ViT, whose maps have one size,
goes into ``setr`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from timm.layers import to_2tuple
from timm.models._features import FeatureGetterNet
from torch import Tensor

from keymix.decoders.segmentation.multi_scale import KINDS, MultiScaleDecoder
from keymix.errors import UserError
from keymix.hosts.base import MixerNames, MixerOptions
from keymix.mixers.base import Grid
from keymix.models.backbone import (
    OnBackbone,
    checked_options,
    draw_first_bias,
    in_a_row,
    shapes_of,
    with_maps,
)
from keymix.models.encoder_decoder import CLASSES, MultiScale
from keymix.models.family import register_variants

LEVELS = (2, 4, 8, 16, 32)
"""Reductions of the maps that are joined."""


class MultiScaleSegmentation(OnBackbone, MultiScale):
    """The maps of a hierarchical backbone, joined by a decoder.

    Decoded are the last map at each of 1/2 (if there is one), 1/4, 1/8, 1/16 and 1/32; those of
    transformers begin at 1/4. DeepLabV3+ (https://arxiv.org/abs/1802.02611, Sec. 3.1) reads the one
    at 1/4 and the deepest of at most 1/16. The paper dilates a convolutional backbone for that:
    ``backbone_options={"output_stride": 16}``, or 8. Without it, and in transformers, which cannot
    be dilated, the stage at 1/32 is left out.

    Images are padded with zeros at the bottom and the right to whole multiples of the deepest
    reduction; the backbone is built for that size. Mixers sit where the backbone has attention, if
    its family has an adapter, at ``encoder.model.…``. The decoder's weights are drawn first, then
    the backbone's and the mixers', so at one seed all but the mixers are equal.

    UPerNet and DeepLabV3+ normalise a map of one pixel by the statistics of the batch: they train
    on two images or more at a time.

    Args:
        decoder: ``"unet"``, ``"fpn"``, ``"upernet"``, ``"deeplabv3plus"`` or ``"segformer"``; the
            model's name says it.
        decoder_width: Channels of the decoder's convolutions: of the U-Net those of the first
            block, halved with each further one; of the FPN those of the pyramid.
        backbone: Name of the backbone, timm's or keymix's.
        backbone_options: Its further arguments; ``pretrained=True`` for the model is
            ``{"pretrained": True}`` here.
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel.
        drop_rate: Probability of dropping a channel before the classifier.
        drop_path_rate: Stochastic depth of the backbone, probability; above 0 for those that have
            it.
        mixer: One name, put where the backbone attends, or one per stage, or one per block; None
            for the backbone's own attention.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.

    Raises:
        UserError: If there is no such backbone, its maps do not suit the decoder, the decoder
            cannot have that width, or a mixer cannot sit in the backbone.
    """

    def __init__(
        self,
        *,
        decoder: Literal["unet", "fpn", "upernet", "deeplabv3plus", "segformer"] = "unet",
        decoder_width: int = 256,
        backbone: str = "resnet18",
        backbone_options: Mapping[str, Any] | None = None,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames | None = None,
        mixer_options: MixerOptions = None,
    ) -> None:
        options = checked_options(backbone, backbone_options, drop_path_rate, in_chans)
        size = tuple(side + -side % LEVELS[-1] for side in to_2tuple(img_size))
        body, reductions = shapes_of(backbone, {**options, "img_size": size})
        taken = _taken(decoder, backbone, reductions)
        chans = FeatureGetterNet(body, out_indices=taken).feature_info.channels()
        found = [reductions[index] for index in taken]
        super().__init__(
            MultiScaleDecoder(
                decoder,
                dict(zip(found, chans, strict=True)),
                decoder_width,
                num_classes,
                drop_rate=drop_rate,
            ),
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
        )
        options["img_size"] = self.padded_size(self.img_size)
        self.encoder = FeatureGetterNet(with_maps(backbone, options)[0], out_indices=taken)
        draw_first_bias(self.encoder, in_chans)
        self.take_mixers(backbone, mixer, mixer_options)

    padded_size = MultiScale.padded_size

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the backbone's maps of the padded images."""
        return super().maps(self.padded(x))

    def read(self, maps: list[Tensor]) -> Any:
        """Return the joined features."""
        return self.decoder(maps)


def _taken(decoder: str, backbone: str, reductions: list[int]) -> tuple[int, ...]:
    """Return the numbers of the maps that a decoder joins."""
    if len(set(reductions)) == 1:
        raise UserError(
            f"backbone={backbone!r} gives maps of one size, 1/{reductions[0]} of the image, and "
            f"{decoder} joins maps of several: the model for it is setr"
        )
    kind = KINDS[decoder]
    levels = [level for level in LEVELS if level <= kind.deepest]
    taken = in_a_row(reductions, levels)
    found = [reductions[index] for index in taken]
    if len(taken) < kind.least or found[0] > 4 or found[-1] < 8:
        raise UserError(
            f"backbone={backbone!r} gives maps reduced by {', '.join(map(str, reductions))}: "
            f"{decoder} joins {kind.least} or more of {', '.join(map(str, levels))} without a gap, "
            "from 2 or 4 to 8 at least; take another, such as 'resnet18'"
        )
    return tuple(taken)


VARIANTS: dict[str, dict[str, Any]] = {name: {"decoder": name} for name in KINDS}


register_variants(
    __name__,
    MultiScaleSegmentation,
    VARIANTS,
    cfg={"first_conv": None, "classifier": "decoder.head", "num_classes": CLASSES},
)
