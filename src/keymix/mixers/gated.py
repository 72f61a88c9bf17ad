# SPDX-License-Identifier: Apache-2.0
"""Gated attention: what the heads return is gated by a sigmoid of the tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Unpack, get_args

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Site, Traits
from keymix.mixers.map_mixer import MapOptions
from keymix.mixers.registry import register_mixer
from keymix.mixers.softmax import SoftmaxAttention

Gate = Literal["elementwise", "headwise"]


@register_mixer("gated")
class GatedAttention(SoftmaxAttention):
    r"""Gated attention: :math:`(\mathrm{softmax}(Q K^\top / \sqrt d)\, V) \odot \sigma(X W_g)`.

    Paper: Gated Attention for Large Language Models, https://arxiv.org/abs/2505.06708, Eq. 5 at
    position G1 (behind the heads, before the output projection). Parameters: ``qkv``, ``gate``
    (no bias), ``proj``.

    Args:
        site: Where the mixer sits.
        gate: ``"elementwise"``: a gate for each channel of each head (the paper's best);
            ``"headwise"``: one for each head, at almost no cost.
        shared: The options of :class:`keymix.mixers.map_mixer.MapMixer`.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N, any M.
    Cost: 5 N C^2 + 2 N M C multiply-adds (headwise 4 N C^2 + N C h + 2 N M C).

    Raises:
        UserError: If a value is bad.
    """

    family = "gates"
    about = (
        "Softmax attention whose heads' outputs are multiplied by a sigmoid gate of the token. "
        "Gated Attention, arXiv 2505.06708, Eq. 5, position G1."
    )
    traits = Traits(named_only=True)

    def __init__(
        self, site: Site, *, gate: Gate = "elementwise", **shared: Unpack[MapOptions]
    ) -> None:
        if gate not in get_args(Gate):
            raise UserError(f"{gate=} must be 'elementwise' or 'headwise'")
        super().__init__(site, **shared)
        width = self.head_dim if gate == "elementwise" else 1
        self.gate = nn.Linear(site.dim, self.num_heads * width, bias=False, **self.factory)

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The input projections, ``gate`` and ``proj``."""
        return (*super().projections[:-1], self.gate, self.proj)

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any map mixer and the kind of gate."""
        alone = self.gate.out_features == self.num_heads != self.num_heads * self.head_dim
        gate = "headwise" if alone else "elementwise"
        return {**super().transfer_options(), "gate": gate}

    def neutralize(self, copied: Collection[str]) -> set[str]:
        """Let all gates start at 1/2, which twice the output projection makes up for."""
        if "gate.weight" in copied:
            return set()
        nn.init.zeros_(self.gate.weight)
        if "proj.weight" in copied:
            self.proj.weight.mul_(2.0)
        return {"gate.weight"}

    def output(self, y: Float[Tensor, "*batch h N d"], x: Float[Tensor, "*batch N C"]) -> Tensor:
        """Gate what the heads return, and turn it into the mixer's output."""
        gates = self.gate(x).sigmoid().unflatten(-1, (self.num_heads, -1))
        return super().output(y * gates.transpose(-3, -2), x)
