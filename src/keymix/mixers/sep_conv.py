# SPDX-License-Identifier: Apache-2.0
"""The convolutional control: pointwise, depthwise, pointwise."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.mixers.base import ImageMixer, Site
from keymix.mixers.registry import register_mixer
from keymix.mixers.static_key import StarReLU


@register_mixer("sep_conv")
class SepConv(ImageMixer):
    """Separable convolution: 1x1 to r C channels, activation, k x k depthwise, 1x1 back to C.

    Paper: MetaFormer Baselines, https://arxiv.org/abs/2210.13452 (ConvFormer's mixer, with
    ``kernel_size=7, expansion=2, act="star_relu"``); SKA Table 6 counts it with the defaults here,
    2 C^2 + 9 C weights. Parameter names are timm's: ``pwconv1``, ``act1``, ``dwconv``,
    ``pwconv2``. Prefix tokens pass through.

    Args:
        site: Where the mixer sits; it needs a grid.
        kernel_size: Odd side k of the depthwise convolution, in tokens.
        expansion: Ratio r of inner to outer width.
        act: Activation after the first convolution, None for none.
        conv_bias: Biases of the three convolutions.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any grid. Cost: N (2 r C^2 + k^2 r C) multiply-adds.

    Raises:
        UserError: If the site has no grid or a value is bad.
    """

    family = "controls"
    about = (
        "A separable convolution: to more channels, a depthwise convolution over the "
        "neighbourhood, and back. MetaFormer Baselines for Vision, arXiv 2210.13452."
    )

    why_grid = "convolves over the grid"

    def __init__(
        self,
        site: Site,
        *,
        kernel_size: int = 3,
        expansion: float = 1.0,
        act: Literal["star_relu", "relu", "gelu"] | None = None,
        conv_bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(site)
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise UserError(f"{kernel_size=} must be odd and at least 1")
        inner = int(site.dim * expansion)
        if inner < 1:
            raise UserError(f"{expansion=} leaves no channel of {site.dim}")
        acts: dict[str | None, nn.Module] = {
            None: nn.Identity(),
            "relu": nn.ReLU(),
            "gelu": nn.GELU(),
        }
        if act == "star_relu":
            self.act1: nn.Module = StarReLU(device, dtype)
        elif act in acts:
            self.act1 = acts[act]
        else:
            raise unknown("activation", str(act), ["relu", "gelu", "star_relu"])
        factory = {"bias": conv_bias, "device": device, "dtype": dtype}
        self.pwconv1 = nn.Conv2d(site.dim, inner, 1, **factory)
        self.dwconv = nn.Conv2d(
            inner, inner, kernel_size, padding=kernel_size // 2, groups=inner, **factory
        )
        self.pwconv2 = nn.Conv2d(inner, site.dim, 1, **factory)

    @property
    def tied_to_grid(self) -> bool:
        """Never: a convolution slides over any grid."""
        return False

    def mix(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Convolve."""
        image = self.act1(self.pwconv1(image))
        out: Tensor = self.pwconv2(self.dwconv(image))
        return out
