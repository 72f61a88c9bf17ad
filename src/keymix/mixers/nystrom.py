# SPDX-License-Identifier: Apache-2.0
"""Nyström attention: the map by landmarks and an iterated pseudo-inverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import GridNeeded, UserError, check_positive
from keymix.mixers.base import Grid, Site, Traits, take_rows
from keymix.mixers.head_mixer import HeadMixer, HeadOptions, Roles
from keymix.mixers.registry import register_mixer
from keymix.mixers.site import KeyGrid, coarser
from keymix.ops import resample
from keymix.ops.attention import sdpa


@register_mixer("nystrom")
class NystromAttention(HeadMixer):
    r"""Nyström attention: :math:`\sigma(Q K_m^\top) \sigma(Q_m K_m^\top)^+ \sigma(Q_m K^\top) V`.

    :math:`\sigma` is the softmax of scaled logits; the landmarks :math:`Q_m, K_m` are
    means of tokens; the pseudo-inverse is iterated,
    :math:`Z \leftarrow \frac 1 4 Z (13 I - A Z (15 I - A Z (7 I - A Z)))`, from
    :math:`Z = A^\top / (\lVert A \rVert_1 \lVert A \rVert_\infty)`. Paper: Nyströmformer,
    https://arxiv.org/abs/2102.03902, Eq. 13 and 14. Parameters: ``qkv``, ``conv`` where there is
    one, ``proj``.
    Differs: the start of Z is of each map alone (published code, unless an option says so: of the
    largest in a batch); runs that do not divide the tokens overlap.

    Args:
        site: Where the mixer sits.
        landmarks: A number m: means of m runs of successive tokens, as in the paper, which has 64;
            or a grid, (height, width), ``"7x7"``, or a share of the patches, ``"1/4"``: means of
            cells on the grid, prefix tokens being landmarks themselves. As many landmarks as
            tokens, or more, make softmax attention.
        iterations: Of the pseudo-inverse.
        conv_size: Odd length of a depthwise convolution of the values along the tokens, added to
            what a head returns (the paper's skip connection, 35 in its code for long sequences);
            0 for none.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M.
    Cost: 4 N C^2 + 2 (N + M) m C + m^2 C (2 + 4 m i / d) multiply-adds, i the iterations, and
        conv_size N C with a convolution.

    Raises:
        UserError: If a value is bad.
    """

    family = "low rank"
    about = (
        "Approximates the softmax map by that of landmark tokens, means of runs of tokens. "
        "Nyströmformer, arXiv 2102.03902, Eq. 13."
    )
    traits = Traits(maskable=False, permutation="positional", named_only=True)
    tied_to_grid = False

    def __init__(
        self,
        site: Site,
        *,
        landmarks: int | KeyGrid = 64,
        iterations: int = 6,
        conv_size: int = 0,
        **shared: Unpack[HeadOptions],
    ) -> None:
        check_positive(
            landmarks=landmarks if isinstance(landmarks, int) else 1, iterations=iterations
        )
        if site.grid is None:
            raise GridNeeded(
                f"mixer {self.mixer_name!r} averages tokens by their place and so needs grid=(H, W)"
            )
        if not isinstance(landmarks, int):
            coarser("landmarks", landmarks, site.grid)  # or refuse what is no grid
        if conv_size < 0 or (conv_size and conv_size % 2 == 0):
            raise UserError(f"{conv_size=} must be odd, or 0 for no convolution")
        if conv_size and site.has_own_key_grid:
            raise UserError(f"{conv_size=} needs as many values as tokens; this site has fewer")
        super().__init__(site, **shared)
        self.landmarks, self.iterations = landmarks, iterations
        self.conv: nn.Conv2d | None = None
        if conv_size:
            h, beyond = self.num_heads, (conv_size // 2, 0)
            self.conv = nn.Conv2d(
                h, h, (conv_size, 1), padding=beyond, groups=h, bias=False, **self.factory
            )

    @classmethod
    def needs_all_keys(cls, options: Mapping[str, Any]) -> bool:
        """With the convolution of values, which is added token by token."""
        return bool(options.get("conv_size"))

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer with heads, and landmarks, iterations and convolution."""
        return {
            **super().transfer_options(),
            "landmarks": self.landmarks,
            "iterations": self.iterations,
            "conv_size": 0 if self.conv is None else self.conv.kernel_size[0],
        }

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Ask landmarks, which ask all."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        scale, few = self.head_dim**-0.5, self._landmarks(q, k, grid)
        if few is None:
            y = sdpa.attention(q, k, v, scale=scale)
        else:
            gathered = few[2] @ sdpa.attention(few[0], k, v, scale=scale)
            y = sdpa.attention(q, few[1], gathered, scale=scale)
        if self.conv is None:
            return y
        near: Tensor = self.conv(v.reshape(-1, *v.shape[-3:]))
        return y + near.view(y.shape)

    def form_map(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Form the map, without the convolution."""
        q, k, scale = take_rows(inputs["q"], rows), inputs["k"], self.head_dim**-0.5
        few = self._landmarks(inputs["q"], k, grid)
        made: Tensor
        if few is None:
            made = (q @ k.mT * scale).softmax(-1)
        else:
            last = few[2] @ (few[0] @ k.mT * scale).softmax(-1)
            made = (q @ few[1].mT * scale).softmax(-1) @ last
        return made

    def _landmarks(
        self, q: Tensor, k: Tensor, grid: Grid | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Landmarks of queries and of keys, and the inverse of their map; None if they are all."""
        grid = grid or self.site.grid
        assert grid is not None  # __init__ refuses a site without
        count = self._count(grid, max(q.shape[-2], k.shape[-2]))
        if count is None:
            return None
        prefix = self.site.num_prefix_tokens
        means = []
        for each, there in ((q, grid), (k, self.site.on(grid).key_grid or grid)):
            if isinstance(count, int):
                flat = each.mT.reshape(-1, each.shape[-1], each.shape[-2])
                runs = F.adaptive_avg_pool1d(flat, count).mT
                means.append(runs.reshape(*each.shape[:-2], count, each.shape[-1]))
            else:
                means.append(resample.pool(each, prefix, there, count))
        few_q, few_k = means
        own = (few_q @ few_k.mT * self.head_dim**-0.5).softmax(-1)
        return few_q, few_k, inverse(own, self.iterations)

    def _count(self, grid: Grid, tokens: int) -> int | Grid | None:
        """How many landmarks there are, or their grid; None if they are all tokens."""
        if isinstance(self.landmarks, int):
            return self.landmarks if self.landmarks < tokens else None
        cells = coarser("landmarks", self.landmarks, grid)
        return None if cells == grid else cells


def inverse(a: Float[Tensor, "*batch m m"], iterations: int) -> Float[Tensor, "*batch m m"]:
    """Iterate towards the Moore-Penrose inverse of maps whose rows sum to one (Eq. 14)."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    columns = a.abs().sum(-2).amax(-1)[..., None, None]
    rows = a.abs().sum(-1).amax(-1)[..., None, None]
    z = a.mT / (columns * rows)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z
