# SPDX-License-Identifier: Apache-2.0
"""Global filter: a learned filter in the frequency domain."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.mixers.base import ImageMixer, Site, Traits
from keymix.mixers.registry import register_mixer


@register_mixer("gfnet", aliases=("global_filter",))
class GlobalFilter(ImageMixer):
    r"""Global filter: :math:`\mathcal F^{-1}[K \odot \mathcal F[x]]` on the grid of tokens.

    :math:`\mathcal F` is the 2-D discrete Fourier transform of each channel and K a learned complex
    filter, which is a circular convolution with a kernel as large as the grid. Paper: Global Filter
    Networks, https://arxiv.org/abs/2107.00645, global filter layer. Parameters:
    ``filter [H, W // 2 + 1, C, 2]`` (real and imaginary parts), which starts at N(0, 0.02), as
    published.

    Args:
        site: Where the mixer sits; it needs a grid, to which the filter is tied. Prefix tokens pass
            through, so that a class token never sees the image.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, the N of its grid.
    Cost: 2 N C log2(N) multiply-adds, of the N patches' two transforms.

    Raises:
        UserError: If the site has no grid.
    """

    family = "frequency"
    about = (
        "Multiplies the Fourier transform of the tokens' image by a learned filter. Global Filter "
        "Networks, arXiv 2107.00645."
    )
    why_grid = "filters an image"
    traits = Traits(mixes_prefix=False, maskable=False, permutation="positional", named_only=True)

    def __init__(self, site: Site, *, device: object = None, dtype: object = None) -> None:
        super().__init__(site)
        assert site.grid is not None  # ImageMixer refuses a site without
        height, width = site.grid
        shape = (height, width // 2 + 1, site.dim, 2)
        self.filter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))  # type: ignore[call-overload]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the filter."""
        nn.init.normal_(self.filter, std=0.02)

    def mix(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Filter each channel; transforms are computed in single precision at least."""
        wide = torch.promote_types(image.dtype, torch.float32)
        filters = torch.view_as_complex(self.filter.to(wide)).permute(2, 0, 1)
        waves = torch.fft.rfft2(image.to(wide), norm="ortho")
        mixed = torch.fft.irfft2(waves * filters, s=image.shape[-2:], norm="ortho")
        out: Tensor = mixed.to(image.dtype)
        return out
