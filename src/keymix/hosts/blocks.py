# SPDX-License-Identifier: Apache-2.0
"""What hosts share whose attention sits at ``blocks.<i>.attn``, on one grid of patches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Host, Place, laid_out, projections_of
from keymix.hosts.call_grid import CallGrid, call_grid, heard_by
from keymix.hosts.hosted import HostedMixer
from keymix.hosts.reading import Layout, Reading
from keymix.hosts.timm_heads import own_weights, read_call
from keymix.mixers.base import Site, TokenMixer


class BlockHost(Host):
    """A host of one stage, whose blocks are ``model.blocks`` and call their ``attn`` alike."""

    model: ClassVar[type[nn.Module]]  # timm's class
    attention: ClassVar[type[nn.Module]]  # what its blocks hold

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        blocks: Any = getattr(model, "blocks", ())
        return isinstance(model, self.model) and all(
            isinstance(getattr(block, "attn", None), (self.attention, HostedMixer))
            for block in blocks
        )

    def places(self, model: nn.Module) -> list[Place]:
        """One place a block.

        Raises:
            UserError: If it is no such model, or its attention has parts that no mixer has.
        """
        if not isinstance(model, self.model):
            raise UserError(f"{type(model).__name__} is no model of {self.name}")
        blocks: Any = model.blocks
        for i, block in enumerate(blocks):
            self._refuse_more(f"blocks.{i}.attn", block.attn)
        return [
            Place(
                path=f"blocks.{i}.attn",
                stage=0,
                site=self._site(block.attn, model),
                defaults=self._defaults(block.attn),
            )
            for i, block in enumerate(blocks)
        ]

    def _refuse_more(self, path: str, attention: nn.Module) -> None:
        """Refuse an attention with parts that a mixer in its place would lose unsaid."""
        if isinstance(attention, HostedMixer):
            return
        known = {
            "qkv",
            "proj",
            "attn_drop",
            "proj_drop",
            *(k.partition(".")[0] for k in self.parts),
        }
        parts = [
            *(n for n, part in attention.named_children() if not isinstance(part, nn.Identity)),
            *(name for name, _ in attention.named_parameters(recurse=False)),
        ]
        more = [name for name in parts if name not in known]
        if more:
            raise UserError(
                f"{path} has {' and '.join(more)} besides queries, keys and values, which no mixer "
                "in its place would have; build the model without"
            )

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as timm initialises attention's."""
        for linear in mixer.projections:
            self.initialise(model, linear, place.path)
        owner: Any = model
        call = call_grid(owner.patch_embed)
        block, before = (model.get_submodule(p) for p in (place.path[: -len(".attn")], place.path))
        if call.keep not in block._forward_hooks.values():
            block.register_forward_hook(call.keep)
        model.set_submodule(place.path, HostedMixer(mixer, place, call).train(before.training))

    def tell(self, model: nn.Module) -> None:
        """Tell all mixers the grid of patches that the model has now."""
        super().tell(model)
        owner: Any = model
        call_grid(owner.patch_embed).grid = None  # that of a call before

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what the family's own attention makes of a call."""
        return read_call(attention, args, kwargs)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of the family's attention, by their role in a mixer."""
        return own_weights(attention)

    def listen(self, model: nn.Module) -> None:
        """Hear the grid of patches of every call, from now on."""
        owner: Any = model
        call_grid(owner.patch_embed)

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the patches of the model's last call lie; the prefix lies nowhere."""
        owner: Any = model
        call = heard_by(owner.patch_embed, CallGrid)
        grid = call.grid if call is not None else None
        return laid_out(model, place, grid or place.site.grid)

    @abstractmethod
    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws those of its own attention."""

    def prefix(self, model: Any) -> int:
        """Count the prefix tokens that pass through the blocks."""
        return 0

    def own_defaults(self, attention: Any) -> Mapping[str, Any]:
        """Options that the host's own attention has besides biases and dropouts."""
        return {}

    def _site(self, attention: Any, model: Any) -> Site:
        rows, columns = model.patch_embed.grid_size
        if isinstance(attention, HostedMixer):
            return replace(attention.place.site, grid=(rows, columns))
        return Site(
            dim=model.embed_dim,
            num_heads=attention.num_heads,
            grid=(rows, columns),
            num_prefix_tokens=self.prefix(model),
        )

    def _defaults(self, attention: Any) -> Mapping[str, Any]:
        if isinstance(attention, HostedMixer):
            return attention.place.defaults
        return {**projections_of(attention), **self.own_defaults(attention)}
