# SPDX-License-Identifier: Apache-2.0
"""What hosts share whose attention modules each meet the patches of an image as one sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from keymix.hosts.attention_inputs import Layout
from keymix.hosts.base import Host, Place, draw_truncated, layout_on
from keymix.hosts.call_grid import CallGrid, attach_call_hook, call_hook_of
from keymix.hosts.head_norms import HeadNorms, norms_kept
from keymix.hosts.hosted import HostedMixer
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.site import as_grid

POSITIONS = "relative positions"
"""Among a place's extras: the host adds them to the logits of each of its heads."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an attention module says of itself: width, heads, options, what heads pass through."""

    dim: int
    num_heads: int
    options: Mapping[str, Any]
    norms: HeadNorms | None = None
    extras: tuple[str, ...] = ()


class BlockHost(Host):
    """A host of one stage whose attention modules are listed by path, and are called alike."""

    all_attend = True
    hosted: ClassVar[type[HostedMixer]]  # what takes the calls of the host's attention
    hook: ClassVar[type[CallGrid]] = CallGrid  # what follows the calls of `embed`
    remedy = ", or say it, if it is one grid for all: model.token_grid = (height, width)"

    @abstractmethod
    def paths(self, model: nn.Module) -> list[str]:
        """Paths of the attention modules, in the order of the forward pass."""

    @abstractmethod
    def facts(self, model: nn.Module, path: str) -> Facts:
        """Describe the host's own attention at a path, or refuse it."""

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws those of its own attention."""
        draw_truncated(linear)

    def kind_for(self, before: nn.Module) -> type[HostedMixer]:
        """Return the class of what is put in the place of an attention, or of another mixer."""
        return self.hosted

    def embed(self, model: nn.Module, path: str) -> nn.Module | None:
        """Return what cuts images into the patches that an attention meets, None if unknown."""
        return None

    def serves(self, model: nn.Module) -> bool:
        """Whether attention that it knows is in the model."""
        return bool(self.paths(model))

    def grid(self, model: nn.Module, attention: nn.Module, path: str) -> Grid | None:
        """Return the grid of patches that an attention meets, None if unknown.

        A user says it of a model of their own as ``token_grid``, with ``num_prefix_tokens``.
        """
        given = getattr(model, "token_grid", None)
        return None if given is None else as_grid("token_grid", given)

    def prefix(self, model: nn.Module, path: str) -> int | None:
        """Count the prefix tokens that an attention meets, None if unknown."""
        without = 0 if hasattr(model, "token_grid") else None
        return getattr(model, "num_prefix_tokens", without)

    def places(self, model: nn.Module) -> list[Place]:
        """One place an attention."""
        return [self._place(model, path) for path in self.paths(model)]

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as the model's attention is."""
        for linear in mixer.projections:
            self.initialise(model, linear, place.path)
        call = self._followed(model, place.path) or self.hook()
        call.keep_at(model.get_submodule(place.path.rpartition(".")[0]))
        before = model.get_submodule(place.path)
        hosted = self.kind_for(before)(mixer, place, call, before)
        model.set_submodule(place.path, hosted.train(before.training))

    def follow_calls(self, model: nn.Module) -> None:
        """Record the grid of patches of every call, from now on."""
        for path in self.paths(model):
            self._followed(model, path)

    def _followed(self, model: nn.Module, path: str) -> CallGrid | None:
        embed = self.embed(model, path)
        return None if embed is None else attach_call_hook(embed, self.hook())

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the patches of the model's last call lie; the prefix lies nowhere."""
        embed = self.embed(model, place.path)
        call = None if embed is None or place.site.grid is None else call_hook_of(embed, self.hook)
        grid = call.grid if call is not None else None
        return layout_on(model, place, grid or place.site.grid)

    def update_grids(self, model: nn.Module) -> None:
        """Update all mixers to the grid of patches that the model has now."""
        super().update_grids(model)
        for path in self.paths(model):
            call = self._followed(model, path)
            if call is not None:
                call.grid = None  # that of a call before

    def _place(self, model: nn.Module, path: str) -> Place:
        attention: Any = model.get_submodule(path)
        grid = self.grid(model, attention, path)
        before = getattr(attention, "place", None)
        if isinstance(before, Place):
            like = next(model.parameters())
            norms = norms_kept(before.site.post_projection, attention.mixer, like)
            return replace(before, site=replace(before.site, grid=grid, post_projection=norms))
        prefix, own = self.prefix(model, path), self.facts(model, path)
        site = Site(
            dim=own.dim,
            num_heads=own.num_heads,
            grid=grid,
            num_prefix_tokens=prefix or 0,
            post_projection=own.norms,
        )
        return Place(
            path=path,
            stage=0,
            site=site,
            defaults=own.options,
            extras=(*own.extras, *(own.norms.extras if own.norms is not None else ())),
            prefix_known=prefix is not None,
        )
