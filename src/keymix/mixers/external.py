# SPDX-License-Identifier: Apache-2.0
"""External attention: keys and values are two learned memories."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import check_positive
from keymix.mixers.base import Grid, Site, Traits
from keymix.mixers.head_mixer import HeadMixer, Roles
from keymix.mixers.registry import register_mixer


@register_mixer("external")
class ExternalAttention(HeadMixer):
    r"""External attention: :math:`\mathrm{Norm}(Q M_k^\top)\, M_v` with learned memories.

    The double normalisation is a softmax over the tokens of each memory slot, then a division by
    the sum over the slots of each token. Static keys' nearest relative: the value is learned too,
    and slots belong to no position. Paper: Beyond Self-attention, https://arxiv.org/abs/2105.02358,
    external attention, its normalisation, and Alg. 2 for heads, which share the memories.
    Parameters: ``q``, ``memory_k`` ``[S, d]``, ``memory_v`` ``[d, S]``, ``proj``.
    Differs: the published code of heads widens queries to 4 C, in four times as many heads, and
    its memories have biases; those of its form with one head have none.

    Args:
        site: Where the mixer sits.
        memory: Slots S of the memories.
        head_dim: As the rest, of :class:`keymix.mixers.head_mixer.HeadMixer`; queries have no
            bias, which the softmax over the tokens would undo.
        proj_bias: Likewise.
        proj_drop: Likewise.
        device: Likewise.
        dtype: Likewise.

    Shape: x ``[*, N, C]`` -> ``[*, N, C]``, any N. Cost: 2 N C^2 + 2 N S C multiply-adds.

    Raises:
        UserError: If a value is bad.
    """

    family = "learned keys"
    about = (
        "Keys and values are two small learned memories that all images share; scores are "
        "normalised over tokens, then over slots. External Attention, arXiv 2105.02358."
    )
    why_no_map = "its keys are slots of a memory, no tokens"
    traits = Traits(maskable=False, named_only=True)
    roles = ("q",)
    joint = None

    def __init__(
        self,
        site: Site,
        *,
        memory: int = 64,
        head_dim: int | None = None,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_positive(memory=memory)
        super().__init__(
            site,
            head_dim=head_dim,
            qkv_bias=False,
            proj_bias=proj_bias,
            proj_drop=proj_drop,
            device=device,
            dtype=dtype,
        )
        self.memory_k = nn.Linear(self.head_dim, memory, bias=False, **self.factory)
        self.memory_v = nn.Linear(memory, self.head_dim, bias=False, **self.factory)

    def transfer_options(self) -> dict[str, Any]:
        """Return those of any mixer with heads and the size of the memories."""
        return {**super().transfer_options(), "memory": self.memory_k.out_features}

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Ask the memory."""
        # e^(log a) / sum e^(log a) over the slots: the division, of which no sum rounds to zero
        weights = self.memory_k(inputs["q"]).log_softmax(-2).softmax(-1)
        y: Tensor = self.memory_v(weights)
        return y
