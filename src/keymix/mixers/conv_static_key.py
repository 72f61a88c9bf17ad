# SPDX-License-Identifier: Apache-2.0
"""Convolutional static key attention: a grouped convolution of the query image gives the logits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Grid, Site, Traits, redefines, split_prefix, take_rows
from keymix.mixers.head_mixer import Roles
from keymix.mixers.map_mixer import LINEAR
from keymix.mixers.registry import register_mixer
from keymix.mixers.static_key import KeyOptions, LearnedKeys
from keymix.ops.attention import blocked


@register_mixer("conv_static_key", aliases=("cska",))
class ConvStaticKeyAttention(LearnedKeys):
    r"""Convolutional static keys: :math:`A_h = \mathrm{GroupedConv}(Q, h)`, softmax, times V.

    The k x k convolution of the query image, one group per head, has M channels per head: channel
    (h, m) at position n *is* the logit of query n for key m; then scale (the convolution's bias
    included) and softmax over m.

    Paper: Static Key Attention in Vision, https://arxiv.org/abs/2412.07049, Sec. 4.2 (the
    equation; Algorithm 2, where a convolution makes keys, has shapes that do not fit it).
    Prefix tokens have no neighbours: as queries they use a plain static key; patch queries use
    the convolution for all M keys, prefix keys first. Parameters: ``q``, ``key_conv`` (weight
    ``[h * M, d, k, k]``, bias ``[h * M]``; one such a window under ``Site.windows``), ``v``,
    ``proj``, and ``key [h, M, d]`` where P > 0.
    Differs from the authors' code, which leaves some logits unscaled and orders rows otherwise:
    docs/papers.md has what does as it does.
    Under Swin's shift the convolution reaches over the seam between regions of one window; the
    mask on the map holds all the same.

    Args:
        site: Where the mixer sits; its grid fixes keys and image.
        kernel_size: Odd side k of the convolution, in tokens.
        activation: ``"softmax"``, or ``"gelu"``, ``"relu"``, ``"star_relu"`` (SKA Table 4).
        key_init_std: Standard deviation of the prefix queries' static key; the convolution starts
            as PyTorch's do.
        key_grid: Fewer keys than tokens, as in ``static_key``: the convolution has a channel for
            each key, still at every token.
        query_proj: Project tokens to queries; if false, a token cut into heads is the query.
        resize: What to do with tokens of another grid: None refuses, ``"interpolate"`` resamples
            the keys' axis of the convolution, ``"pool_values"`` keeps it, since a convolution
            gives M logits on any image, and averages the values; the reach of k tokens stays.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]`` with the site's N, or any grid under ``resize``.
    Cost: (2 N + M) C^2 + (k^2 + 1) N M C multiply-adds (SKA Table 6, M = N and k = 3:
    N (10 N D + 3 D^2)). Without ``query_proj`` N C^2 less.

    Raises:
        UserError: If the site has no grid, the kernel is even, or a value is bad.
    """

    family = "learned keys"
    about = (
        "Keys are the weights of a learned convolution: it reads the 3x3 neighbourhood of "
        "each query and gives the query's score for every key; softmax and values as usual. "
        "Static Key Attention in Vision, arXiv 2412.07049, Sec. 4.2."
    )

    traits = Traits(permutation="positional")
    grid_parameters = ("key", "key_conv.weight", "key_conv.bias")

    def __init__(
        self,
        site: Site,
        *,
        kernel_size: int = 3,
        **shared: Unpack[KeyOptions],
    ) -> None:
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise UserError(f"{kernel_size=} must be odd and at least 1, so that the grid stays")
        super().__init__(site, **shared)
        site = self.site  # with the keys' grid
        groups = site.windows * self.num_heads
        self.key_conv = nn.Conv2d(
            groups * self.head_dim,
            groups * site.num_keys,
            kernel_size,
            padding=kernel_size // 2,
            groups=groups,
            **self.factory,
        )
        if site.num_prefix_tokens:
            self.key = nn.Parameter(torch.empty(self.key_shape(), **self.factory))
        else:
            self.register_parameter("key", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the prefix queries' key from N(0, key_init_std^2)."""
        super().reset_parameters()
        if self.key is not None:
            nn.init.normal_(self.key, std=self.key_init_std)

    def fold(self) -> None:
        """Bring the factor of the logits into the filters and the key; project q and v at once."""
        super().fold()
        if not redefines(self, ConvStaticKeyAttention, *LINEAR):
            self.key_conv = copy.deepcopy(self.key_conv)
            self.scale_keys()
            self.join_queries_and_values()

    @classmethod
    def learned_keys(cls, site: Site, options: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """The filters, which patch queries meet, and the key of prefix queries."""
        if not options["query_proj"]:
            return {}
        filters = {f"unfolded {options['kernel_size']}": ("key_conv.weight", "key_conv.bias")}
        return {**filters, "prefix queries": ("key",)} if site.num_prefix_tokens else filters

    def transfer_options(self) -> dict[str, Any]:
        """Return those of static keys and the side of the convolution."""
        return {**super().transfer_options(), "kernel_size": self.key_conv.kernel_size[0]}

    @property
    def plain_softmax(self) -> str:
        """Why fused attention cannot serve."""
        return "a convolution gives the logits, which are no product of queries and keys"

    def logits(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Convolve the query image; prefix queries meet the static key."""
        q, P = inputs["q"], self.site.num_prefix_tokens
        prefix, patches = split_prefix(q, P)
        H, W = grid or self.site.grid or (1, 1)
        lead = patches.shape[:-3]
        # [*, h, HW, d] -> [*, h, d, H, W] -> image [B, (windows) * h * d, H, W]
        groups = self.site.windows * self.num_heads
        image = patches.transpose(-2, -1).reshape(-1, groups * self.head_dim, H, W)
        a = self._convolved(image, self._keys_of(inputs, grid))
        a = a.reshape(*lead, self.num_heads, a.shape[1] // groups, H * W).transpose(-2, -1)
        if self.key is not None:
            first = prefix @ inputs["key"].transpose(-2, -1)
            a = torch.cat((first.expand(*lead, *first.shape[-3:]), a), -2)
        return take_rows(a, rows)

    @property
    def whole_maps(self) -> str | None:
        """None: a convolution is a product of keys with queries that hold their neighbours."""
        return self._head_mixing()

    def _entries(self, shape: Sequence[int] | None) -> int:
        """Entries of the maps of one image where gradients follow, of all images if not.

        Blocks are strips of single images, each with a backward pass of its own.
        """
        if shape is not None and torch.is_grad_enabled():
            shape = (self.site.windows, *shape[-2:])
        return super()._entries(shape)

    def _from_entries(self) -> int:
        """Without gradients somewhat more are needed: 2.5 million entries of one image do not."""
        few = super()._from_entries()
        return few if torch.is_grad_enabled() else 4 * few // 3

    def _by_rows(
        self, inputs: Roles, grid: Grid | None, bias: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hand on the query image with the filters as keys; prefix queries meet the static key."""
        P, there = self.site.num_prefix_tokens, grid or self.site.grid or (1, 1)
        prefix, patches = split_prefix(inputs["q"], P)
        weight, shift = self._filters(self._keys_of(inputs, grid))
        first = rest = bias
        if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
            first, rest = split_prefix(bias, P)
        how["scale"] = self.gain()
        y, total = blocked.conv_attention(
            patches,
            weight,
            shift,
            inputs["v"],
            grid=there,
            bias=rest,
            diagonal=P if self.mask_diagonal else None,
            **how,
        )
        if self.key is None:
            return y, total
        of_prefix, _ = blocked.attention(
            prefix,
            inputs["key"],
            inputs["v"],
            bias=first,
            diagonal=0 if self.mask_diagonal else None,
            **how,
        )
        return torch.cat((of_prefix, y), -2), total

    def _filters(self, keys: Grid) -> tuple[Tensor, Tensor]:
        """Return the convolution's weight and bias for keys on ``keys``."""
        weight, bias = (self.resized(f"key_conv.{part}", keys) for part in ("weight", "bias"))
        return weight, bias

    def _convolved(self, image: Tensor, keys: Grid) -> Tensor:
        """Convolve by the filters of keys on ``keys``."""
        if keys == self.key_grid:
            out: Tensor = self.key_conv(image)
            return out
        weight, bias = self._filters(keys)
        conv = self.key_conv
        return F.conv2d(image, weight, bias, padding=conv.kernel_size[0] // 2, groups=conv.groups)

    def set_grid(self, grid: Grid, **geometry: Any) -> None:
        """Take another geometry; the convolution says its new number of channels."""
        super().set_grid(grid, **geometry)
        conv, groups = self.key_conv, self.site.windows * self.num_heads
        conv.out_channels, conv.groups = len(conv.weight), groups
        conv.in_channels = groups * self.head_dim
