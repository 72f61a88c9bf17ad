# SPDX-License-Identifier: Apache-2.0
"""Convolutional vision Transformer with a mixer in every block.

Paper: CvT, https://arxiv.org/abs/2103.15808. The rows of SKA (Tables 1, 8 and 9) are CvT-13 on
32x32 images: grids of 8x8, 4x4 and 2x2 tokens, keys and values with stride 2 on 4x4, 2x2 and 1x1,
the class token in the last stage. ``…_wide`` has the widths of the parameter-matched row.
Differs: the authors scale logits by the whole width, which ``mixer_options={"scale": "dim"}``
does; here the paper's d^-0.5 (docs/papers.md has what else aligns). Their drop path rises within
the last stage alone, ours over all blocks, as timm's models do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from timm.layers import calculate_drop_path_rates, to_2tuple, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions, put_mixers
from keymix.hosts.stages import cvt_grids
from keymix.layers.cvt_stage import CvTStage
from keymix.mixers.base import Grid, to_image
from keymix.models.family import (
    StageModel,
    Wanted,
    linear_head,
    register_variants,
)

POOLS = ("token", "avg", "")
EMBEDS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class CvT(StageModel):
    """CvT with a token mixer in every block, at ``stages.<s>.blocks.<i>.attn.mixer``.

    Mixers with queries get keys and values from convolutions of stride ``kv_stride``; those that
    need as many keys as tokens get stride 1, those without projections sit on the plain tokens.
    Blocks get the grid at every call: images of any size go in where the mixers allow it.
    The backbone's weights are drawn before the mixers', so at one seed they are equal whatever
    the mixer.

    Args:
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of the classifier; 0 for none.
        global_pool: What is read out: ``"token"`` the class token, ``"avg"`` the mean of the
            patch tokens, ``""`` all tokens.
        embed_dims: Width of every stage.
        depths: Blocks of every stage.
        num_heads: Heads of every stage.
        mlp_ratio: Hidden width of the MLPs over that of the tokens.
        embeds: Kernel size, stride and padding of every stage's embedding, pixels of what it
            takes.
        kv_stride: Step of the convolutions of keys and values, for all stages or one per stage.
        class_token: Whether the last stage has one.
        qkv_bias: Biases of the mixers' input projections.
        drop_rate: Probability of dropping a value before the classifier.
        proj_drop_rate: Probability of dropping a value behind mixers and in MLPs.
        attn_drop_rate: Probability of dropping an entry of an attention map.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        mixer: One name, or one per stage, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes]``.

    Raises:
        UserError: If values do not fit one another, or a mixer cannot sit here.
    """

    def __init__(
        self,
        *,
        img_size: int | Grid = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "token",
        embed_dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        mlp_ratio: float = 4.0,
        embeds: Sequence[tuple[int, int, int]] = EMBEDS,
        kv_stride: int | Sequence[int] = 2,
        class_token: bool = True,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        count = len(embed_dims)
        strides = [kv_stride] * count if isinstance(kv_stride, int) else list(kv_stride)
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dims[-1]
        self.num_prefix_tokens = int(class_token)
        self.check_pool(global_pool, num_classes)
        self.grad_checkpointing = False
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stages = nn.ModuleList(
            CvTStage(
                in_chans if i == 0 else embed_dims[i - 1],
                embed_dims[i],
                num_heads=num_heads[i],
                kv_stride=strides[i],
                embed=embeds[i],
                class_token=class_token and i == count - 1,
                drop_path=rates[i],
                attn_drop=attn_drop_rate,
                proj_drop=proj_drop_rate,
                qkv_bias=qkv_bias,
                mlp_ratio=mlp_ratio,
                **factory,
            )
            for i in range(count)
        )
        reduction, self.feature_info = 1, []
        for i, embed in enumerate(embeds):
            reduction *= embed[1]
            info = {"num_chs": embed_dims[i], "reduction": reduction, "module": f"stages.{i}"}
            self.feature_info.append(info)
        self.norm = nn.LayerNorm(self.num_features, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = linear_head(self.num_features, num_classes, **factory)
        self.apply(self.start)
        put_mixers(self, mixer, mixer_options)

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay leaves alone: the class token, and what the mixers name."""
        tokens = {name for name, _ in self.named_parameters() if name.endswith(".cls_token")}
        return super().no_weight_decay() | tokens

    def grids(self, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage, for images of this height and width in pixels."""
        return cvt_grids(self, image)

    def check_pool(self, global_pool: str, num_classes: int) -> None:
        """Refuse an unknown read-out, and that of a class token that is not there."""
        if global_pool not in POOLS:
            raise unknown("global_pool", global_pool, POOLS)
        if global_pool == "token" and not self.num_prefix_tokens:
            raise UserError("global_pool='token' reads the class token out; class_token is False")

    def start(self, module: nn.Module) -> None:
        """Start as the authors do: linear maps and the class token from N(0, 0.02), cut at 2."""
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, CvTStage) and module.cls_token is not None:
            trunc_normal_(module.cls_token, std=0.02)

    def intermediates(self, x: Tensor, wanted: Wanted) -> Any:
        """Return the patch tokens of stages as images, and the final tokens."""
        take, last = feature_take_indices(len(self.stages), wanted.indices)
        end = last + 1 if wanted.stop_early else len(self.stages)
        found: list[Tensor] = []
        tokens = x
        for i, stage in enumerate(self.stages[:end]):
            tokens, grid = stage(x)
            x = _image(tokens, stage, grid)
            if i == len(self.stages) - 1:
                tokens = self.norm(tokens)
            if i in take:
                found.append(_image(tokens, stage, grid) if wanted.norm else x)
        return found if wanted.alone else (tokens, found)

    @property
    def num_maps(self) -> int:
        """Stages."""
        return len(self.stages)

    def keep_maps(self, count: int) -> None:
        """Drop the stages after the first ``count``, and the class token with the last."""
        self.stages = self.stages[:count]
        self.num_prefix_tokens = 0

    def forward_features(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """Return the last stage's tokens, normalised, the class token first."""
        tokens: Tensor = x
        for stage in self.stages:
            tokens, grid = stage(x)
            x = _image(tokens, stage, grid)
        out: Tensor = self.norm(tokens)
        return out

    def forward_head(self, x: Float[Tensor, "B N C"], pre_logits: bool = False) -> Tensor:
        """Read the tokens out and classify.

        Args:
            x: What :meth:`forward_features` returned.
            pre_logits: Stop before the classifier.
        """
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(1)
        x = self.head_drop(x)
        out: Tensor = x if pre_logits else self.head(x)
        return out


def _image(tokens: Tensor, stage: CvTStage, grid: Grid) -> Tensor:
    """Reshape a stage's patch tokens to an image."""
    patches = tokens[:, stage.num_prefix_tokens :]
    return to_image(patches, grid)


_WIDE = {"embed_dims": (64, 198, 402)}  # the paper's; its CIFAR-100 run has 64/195/402

VARIANTS: dict[str, dict[str, Any]] = {
    "cvt_13_32": {"img_size": 32},
    "ska_cvt_13_32": {"img_size": 32, "mixer": "static_key"},
    "cska_cvt_13_32": {"img_size": 32, "mixer": "conv_static_key"},
    "ska_cvt_13_32_wide": {"img_size": 32, **_WIDE, "mixer": "static_key"},
    # not a paper's: small enough to compare on two cores, on grids of 16x16, 8x8 and 4x4
    "cvt_micro_32": {
        "img_size": 32,
        "embed_dims": (32, 64, 128),
        "depths": (1, 2, 2),
        "num_heads": (1, 2, 4),
        "mlp_ratio": 2.0,
        "embeds": ((7, 2, 3), (3, 2, 1), (3, 2, 1)),
    },
}


register_variants(
    __name__,
    CvT,
    VARIANTS,
    cfg=lambda row: {
        "first_conv": "stages.0.patch_embed.proj",
        "classifier": "head",
        "reduction": math.prod(stride for _, stride, _ in row.get("embeds", EMBEDS)),
    },
    maps="depths",
)
