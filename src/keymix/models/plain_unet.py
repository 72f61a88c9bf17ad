# SPDX-License-Identifier: Apache-2.0
"""A plain U-Net for masks, to compare models with attention with.

Paper: U-Net, https://arxiv.org/abs/1505.04597, Sec. 2 and Fig. 1. Differs: the way down is
``plain_convnet``, residual blocks behind a convolution of stride 2, so that the map at the image's
size has nothing joined to it; convolutions are padded, so that logits have the image's size.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.models._features import feature_take_indices
from torch import Tensor

from keymix.decoders.segmentation.multi_scale import MultiScaleDecoder
from keymix.errors import UserError
from keymix.mixers.base import Grid
from keymix.models.encoder_decoder import CLASSES, MultiScale
from keymix.models.family import Wanted, register_variants
from keymix.models.plain_convnet import STAGES, PlainConvNet

STEM = 2


class PlainUNet(MultiScale):
    """A U-Net whose way down is a plain convolutional network; it hosts no mixer.

    Maps of w, 2w, 4w and 8w channels at 1/2, 1/4, 1/8 and 1/16 of the image go up through blocks
    of 4w, 2w, w and w / 2 channels. Images of any size go in, padded to whole multiples of 16.

    Args:
        img_size: Side, or height and width, of the images, pixels; nothing learned depends on it.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel; 0 for none.
        width: Channels w of the encoder's first stage, an even number of 4 or more.
        depth: Residual blocks of every stage of the encoder.
        drop_rate: Probability of dropping a channel before the classifier.
        drop_path_rate: Probability of dropping the residual branch of the encoder's last block;
            rises from 0.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.
    Cost: at ``width=12`` and 96x96 pixels 66 M multiply-adds, 0.28 M parameters. A training step
    with batches of 4 takes as long as that of ``setr_micro``: 32.6 and 31.5 ms, medians of 40 in
    turns on one CPU thread (`keymix.analysis.measure.training_quartiles_ms`).

    Raises:
        UserError: If a value is out of its range.
    """

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        width: int = 12,
        depth: int = 1,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        if width < 4 or width % 2:
            raise UserError(f"{width=} must be an even number of 4 or more")
        decoder = MultiScaleDecoder(
            "unet",
            {STEM << stage: width << stage for stage in range(STAGES)},
            4 * width,
            num_classes,
            drop_rate=drop_rate,
            **factory,
        )
        super().__init__(decoder, img_size=img_size, in_chans=in_chans, num_classes=num_classes)
        self.encoder = PlainConvNet(
            img_size=img_size,
            in_chans=in_chans,
            num_classes=0,
            width=width,
            depth=depth,
            stem_stride=STEM,
            drop_path_rate=drop_path_rate,
            **factory,
        )

    def intermediates(self, x: Tensor, wanted: Wanted) -> Any:
        """Return maps of the encoder, of the padded image, and the final features."""
        if wanted.alone:
            return self.encoder.intermediates(self.padded(x), wanted)
        taken, _ = feature_take_indices(1 + STAGES, wanted.indices)
        maps = self._maps(x)
        return self.decoder(maps[1:]), [maps[i] for i in taken]

    def forward_features(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B D h w"]:
        """Return the features before the classifier, at the padded image's size."""
        found: Tensor = self.decoder(self._maps(x)[1:])  # the stem's is as large as the first
        return found

    def _maps(self, x: Tensor) -> list[Tensor]:
        x = self.padded(x)
        maps: list[Tensor] = self.encoder.forward_intermediates(x, intermediates_only=True)
        return maps


VARIANTS: dict[str, dict[str, Any]] = {"plain_unet": {"img_size": 96}}
CFG = {"first_conv": "encoder.conv1.0", "classifier": "decoder.head", "num_classes": CLASSES}

register_variants(__name__, PlainUNet, VARIANTS, cfg=CFG)
