# SPDX-License-Identifier: Apache-2.0
"""Linformer: keys and values are projected along the tokens."""

from __future__ import annotations

from typing import Any, Literal, Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import GridNeeded, UserError, check_positive
from keymix.mixers.base import Grid, Site, Traits
from keymix.mixers.head_mixer import HeadMixer, HeadOptions, Roles
from keymix.mixers.registry import register_mixer
from keymix.ops.attention import sdpa

Share = Literal["none", "headwise", "key_value"]


@register_mixer("linformer")
class LinformerAttention(HeadMixer):
    r"""Linformer: :math:`\mathrm{softmax}(Q (E K)^\top / \sqrt d)\, (F V)` with learned E and F.

    E and F, ``[S, M]``, make S rows of the M keys and values. Paper: Linformer,
    https://arxiv.org/abs/2006.04768, Eq. 7; sharing as in its Sec. 4. Parameters: ``qkv``, ``e``
    and ``f`` (``[S, M]``, or ``[h, S, M]`` unshared; ``e`` alone for ``"key_value"``), which start
    at N(0, 1/S), ``proj``.

    Args:
        site: Where the mixer sits; it needs a grid, to which E and F are tied.
        rows: Projected keys S.
        share: ``"headwise"``: all heads have one E and one F; ``"key_value"``: E is F as well;
            ``"none"``: each head has its own.
        shared: The options of :class:`keymix.mixers.head_mixer.HeadMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, the N of its grid.
    Cost: 4 N C^2 + 2 M S C + 2 N S C multiply-adds.

    Raises:
        UserError: If the site has no grid, or a value is bad.
    """

    family = "low rank"
    about = (
        "Learned matrices reduce the tokens of keys and values to a fixed number of rows. "
        "Linformer, arXiv 2006.04768, Eq. 7."
    )
    why_no_map = "its keys are sums of tokens"
    traits = Traits(maskable=False, permutation="positional", named_only=True)

    def __init__(
        self,
        site: Site,
        *,
        rows: int = 64,
        share: Share = "headwise",
        **shared: Unpack[HeadOptions],
    ) -> None:
        check_positive(rows=rows)
        if share not in get_args(Share):
            raise UserError(f"{share=} must be 'none', 'headwise' or 'key_value'")
        if site.grid is None:
            raise GridNeeded(
                f"mixer {self.mixer_name!r} has a weight for every token and so needs grid=(H, W)"
            )
        super().__init__(site, **shared)
        self.share = share
        shape = (self.num_heads,) * (share == "none") + (rows, site.num_keys)
        self.e = nn.Parameter(torch.empty(shape, **self.factory))
        self.f: nn.Parameter | None = None
        if share != "key_value":
            self.f = nn.Parameter(torch.empty(shape, **self.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw E and F."""
        for each in self.parameters(recurse=False):
            nn.init.normal_(each, std=each.shape[-2] ** -0.5)

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer with heads, the number of rows, and what is shared."""
        return {**super().transfer_options(), "rows": self.e.shape[-2], "share": self.share}

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Project keys and values along the tokens, and attend to these."""
        k, v = self.e @ inputs["k"], (self.e if self.f is None else self.f) @ inputs["v"]
        return sdpa.attention(inputs["q"], k, v, scale=self.head_dim**-0.5)
