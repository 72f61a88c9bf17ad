# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's Cait: patch attention sits at ``blocks.<i>.attn``, class attention stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from timm.models.cait import Cait, TalkingHeadAttn
from torch import Tensor, nn

from keymix.hosts.blocks import BlockHost
from keymix.hosts.reading import Reading
from keymix.hosts.timm_heads import own_weights, read_call


class TimmCait(BlockHost):
    """timm's Cait. The class token enters after the patch blocks, so their sites have no prefix.

    Heads talk in CaiT: mixers that know ``talking_heads`` get them, with a bias after the softmax
    where the model has one. (A bias before the softmax shifts all logits of a row alike, so it
    does nothing and is left out.)
    """

    name = "timm Cait"
    model = Cait
    attention = (TalkingHeadAttn,)
    parts: ClassVar[dict[str, str | None]] = {
        "proj_l.weight": "talking_pre.weight",
        "proj_l.bias": None,
        "proj_w.weight": "talking_post.weight",
        "proj_w.bias": "talking_post.bias",
    }

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as timm's Cait draws its own."""
        assert isinstance(model, Cait)
        model._init_weights(linear)

    def own_defaults(self, attention: Any) -> Mapping[str, Any]:
        """Heads that talk, with a bias after the softmax where the model has one."""
        return {"talking_heads": True if attention.proj_w.bias is None else "bias"}

    def reading(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return what talking-heads attention makes of a call."""
        read = read_call(attention, args, kwargs)
        return replace(read, pre=attention.proj_l, post=attention.proj_w)

    def weights(self, attention: Any) -> dict[str, Tensor]:
        """Return projections and what lets heads talk; the idle bias is left out."""
        found = own_weights(attention)
        for theirs, name in self.parts.items():
            linear = attention.get_submodule(theirs.partition(".")[0])
            tensor = getattr(linear, theirs.rpartition(".")[2])
            if name is not None and tensor is not None:
                found[name] = tensor.detach()
        return found


HOST = TimmCait()
