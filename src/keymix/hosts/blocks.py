# SPDX-License-Identifier: Apache-2.0
"""What hosts share whose attention is one of timm's, on one grid of patches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Host, Place, laid_out
from keymix.hosts.call_grid import CallGrid, call_grid, heard_by
from keymix.hosts.finishes import PARTS, Finishes, finishes_of
from keymix.hosts.hosted import HostedMixer, HostedRope
from keymix.hosts.plain import patched
from keymix.hosts.reading import Layout, Reading
from keymix.hosts.timm_heads import (
    first_projection,
    joined_projections,
    own_weights,
    projections_of,
    read_call,
    takes_rope,
)
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer


class BlockHost(Host):
    """A host of one stage, whose blocks are ``model.blocks`` and call their ``attn`` alike."""

    model: ClassVar[type[nn.Module]]  # timm's class
    attention: ClassVar[tuple[type[nn.Module], ...]]  # what its blocks hold
    parts: ClassVar[Mapping[str, str | None]] = PARTS

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        blocks: Any = getattr(model, "blocks", ())
        return isinstance(model, self.model) and all(
            self.knows(getattr(block, "attn", None)) for block in blocks
        )

    def knows(self, attention: nn.Module | None) -> bool:
        """Whether it is an attention of this family, which computes what timm's class does."""
        return isinstance(attention, HostedMixer) or any(
            isinstance(attention, kind)
            and type(attention).forward is kind.forward
            and not patched(attention)
            for kind in self.attention
        )

    def paths(self, model: nn.Module) -> list[str]:
        """Paths of the attention modules, in the order of the forward pass.

        Raises:
            UserError: If it is no such model.
        """
        if not isinstance(model, self.model):
            raise UserError(f"{type(model).__name__} is no model of {self.name}")
        blocks: Any = model.blocks
        return [f"blocks.{i}.attn" for i in range(len(blocks))]

    def places(self, model: nn.Module) -> list[Place]:
        """One place an attention.

        Raises:
            UserError: If it is no such model.
        """
        return [self._place(model, path) for path in self.paths(model)]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Return the place's site; refuse other heads where the host's own pass through more."""
        site = place.site
        if site.finish is None or not issubclass(mixer, MapMixer):
            return site
        own = (site.num_heads, place.defaults.get("head_dim", site.dim // site.num_heads))
        heads = options.get("num_heads", own[0])
        width = options.get("head_dim") or site.dim // heads
        if (heads, width) != own:
            raise UserError(
                f"{place.path} has {' and '.join(place.extras)} for {own[0]} heads of {own[1]} "
                f"channels, and mixer {mixer.mixer_name!r} would have {heads} of {width}; leave "
                "num_heads and head_dim as the model has them"
            )
        return site

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as timm initialises attention's."""
        for linear in mixer.projections:
            self.initialise(model, linear, place.path)
        embed = self.embed(model, place.path)
        call = CallGrid() if embed is None else call_grid(embed)
        block = model.get_submodule(place.path.rpartition(".")[0])
        before = model.get_submodule(place.path)
        if call.keep not in block._forward_hooks.values():
            block.register_forward_hook(call.keep)
        hosted = HostedRope if takes_rope(before) else HostedMixer
        model.set_submodule(place.path, hosted(mixer, place, call).train(before.training))

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what the family's own attention makes of a call."""
        return read_call(attention, args, kwargs)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of the family's attention, by their role in a mixer."""
        return own_weights(attention)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join projections that are apart, and EVA's biases, as a mixer has them."""
        return joined_projections(tensors)

    def listen(self, model: nn.Module) -> None:
        """Hear the grid of patches of every call, from now on."""
        for path in self.paths(model):
            embed = self.embed(model, path)
            if embed is not None:
                call_grid(embed)

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the patches of the model's last call lie; the prefix lies nowhere."""
        embed = self.embed(model, place.path)
        call = None if embed is None or place.site.grid is None else heard_by(embed, CallGrid)
        grid = call.grid if call is not None else None
        return laid_out(model, place, grid or place.site.grid)

    def tell(self, model: nn.Module) -> None:
        """Tell all mixers the grid of patches that the model has now."""
        super().tell(model)
        for path in self.paths(model):
            embed = self.embed(model, path)
            if embed is not None:
                call_grid(embed).grid = None  # that of a call before

    @abstractmethod
    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws those of its own attention."""

    def embed(self, model: Any, path: str) -> nn.Module | None:
        """Return what cuts images into the patches that an attention meets, None if unknown."""
        embed: nn.Module = model.patch_embed
        return embed

    def grid(self, model: Any, attention: nn.Module, path: str) -> Grid | None:
        """Return the grid of patches that an attention meets, None if unknown."""
        rows, columns = model.patch_embed.grid_size
        return rows, columns

    def prefix(self, model: Any, path: str) -> int | None:
        """Count the prefix tokens that an attention meets, None if unknown."""
        return 0

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Say what the rotary positions are called that calls of attention bring."""
        return None

    def own_defaults(self, attention: Any) -> Mapping[str, Any]:
        """Options that the host's own attention has besides biases and dropouts."""
        return {}

    def _place(self, model: nn.Module, path: str) -> Place:
        attention: Any = model.get_submodule(path)
        grid = self.grid(model, attention, path)
        if isinstance(attention, HostedMixer):
            before = attention.place
            finish = before.site.finish
            if isinstance(finish, Finishes):
                finish = finish.after(attention.mixer, next(model.parameters()))
            return replace(before, site=replace(before.site, grid=grid, finish=finish))
        prefix = self.prefix(model, path)
        finishes = finishes_of(attention, rotary=self.rotary(model, attention))
        site = Site(
            dim=first_projection(attention).in_features,
            num_heads=attention.num_heads,
            grid=grid,
            num_prefix_tokens=prefix or 0,
            finish=finishes,
        )
        return Place(
            path=path,
            stage=0,
            site=site,
            defaults={**projections_of(attention), **self.own_defaults(attention)},
            extras=() if finishes is None else finishes.extras,
            prefix_known=prefix is not None,
        )
