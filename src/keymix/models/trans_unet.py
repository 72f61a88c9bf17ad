# SPDX-License-Identifier: Apache-2.0
"""A U-Net whose deepest map passes through transformer blocks, with a mixer in each.

Paper: TransUNet, https://arxiv.org/abs/2102.04306, Sec. 3.2 and Fig. 1: a ViT on the pixels of a
convolutional network's map at 1/16 of the image, then a U-Net's way up. Differs: convolutions are
those of ``plain_unet``; blocks are as wide as the map; and what they make of it is added to it,
little at first, so that training starts near the plain U-Net.
"""

from __future__ import annotations

from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.hosts.base import MixerNames, MixerOptions
from keymix.mixers.base import Grid, to_image
from keymix.models.encoder_decoder import CLASSES, within
from keymix.models.family import Wanted, register_variants
from keymix.models.plain_convnet import STAGES
from keymix.models.plain_unet import CFG, PlainUNet
from keymix.models.vit import MixerVisionTransformer


class TransUNet(PlainUNet):
    """``plain_unet`` with a transformer between the way down and the way up.

    Mixers sit at ``transformer.blocks.<i>.attn.mixer``, on the pixels of the map at 1/16. All other
    weights are drawn before theirs, so at one seed they are equal whatever the mixer, and those of
    the U-Net are those of ``plain_unet``.

    Args:
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel; 0 for none.
        width: Channels w of the encoder's first stage, an even number of 4 or more; tokens have 8w.
        depth: Residual blocks of every stage of the encoder.
        blocks: Blocks of the transformer.
        num_heads: Heads of every block.
        drop_rate: Probability of dropping a channel before the classifier.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        mixer: One name, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.
    Cost: at 96x96 pixels 77 M multiply-adds, 0.60 M parameters.

    Raises:
        UserError: If a value is out of its range, or a mixer cannot sit here.
    """

    encoder_path = "transformer"
    transformer: Any

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        width: int = 12,
        depth: int = 1,
        blocks: int = 4,
        num_heads: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            width=width,
            depth=depth,
            drop_rate=drop_rate,
            device=device,
            dtype=dtype,
        )
        self.transformer = MixerVisionTransformer(
            img_size=self._grid(self.img_size),
            patch_size=1,
            in_chans=8 * width,
            num_classes=0,
            global_pool="",
            embed_dim=8 * width,
            depth=blocks,
            num_heads=num_heads,
            mlp_ratio=2.0,
            class_token=False,
            weight_init="jax",
            drop_path_rate=drop_path_rate,
            mixer=mixer,
            mixer_options=mixer_options,
            device=device,
            dtype=dtype,
        )
        nn.init.constant_(self.transformer.norm.weight, 0.1)  # of what is added

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Say which parameters make a layer: the way down's, the transformer's, the way up."""
        own = within("transformer", self.transformer.group_matcher(coarse=coarse))
        between = [*own["blocks"], (own["stem"], None)]
        return {**within("encoder", self.encoder.group_matcher(coarse=coarse)), "between": between}

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay leaves alone: the transformer's."""
        names = self.transformer.no_weight_decay()
        return super().no_weight_decay() | {f"transformer.{name}" for name in names}

    def intermediates(self, x: Tensor, wanted: Wanted) -> Any:
        """Return maps of the way down, the deepest behind the transformer, and the final ones."""
        found = super().intermediates(x, wanted)
        if wanted.alone and feature_take_indices(1 + STAGES, wanted.indices)[1] == STAGES:
            found[-1] = self._mixed(found[-1])
        return found

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of both parts' blocks instead of keeping them."""
        super().set_grad_checkpointing(enable)
        self.transformer.set_grad_checkpointing(enable)

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size, as that of an `EncoderDecoder`."""
        if img_size is not None:
            size = whole_size("img_size", img_size)
            self.transformer.set_input_size(img_size=self._grid(size))
            super().set_input_size(size)

    def _grid(self, size: Grid) -> Grid:
        height, width = self.padded_size(size)
        return height // self.multiple, width // self.multiple

    def _maps(self, x: Tensor) -> list[Tensor]:
        *maps, last = super()._maps(x)
        return [*maps, self._mixed(last)]

    def _mixed(self, deepest: Tensor) -> Tensor:
        tokens = self.transformer.forward_features(deepest)
        return deepest + to_image(tokens, (deepest.shape[-2], deepest.shape[-1]))


VARIANTS: dict[str, dict[str, Any]] = {"trans_unet_micro": {"img_size": 96}}


register_variants(__name__, TransUNet, VARIANTS, cfg=CFG)
