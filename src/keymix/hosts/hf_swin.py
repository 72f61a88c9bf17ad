# SPDX-License-Identifier: Apache-2.0
"""Adapter to Hugging Face's Swin and Swin V2: attention sits in each layer, and gets windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.hosts.base import Place
from keymix.hosts.blocks import Facts
from keymix.hosts.call_grid import (
    CALL_SIZE,
    CallSize,
    ConvGrid,
    attach_call_hook,
    call_hook_of,
    given_size,
)
from keymix.hosts.hf_vit import (
    SWIN,
    attentions,
    described,
    owner_of,
    patches_in,
    projected,
    refuse_weights,
    row_in,
)
from keymix.hosts.projections import weights_of
from keymix.hosts.windows import Cut, HostedWindows, SwinHost
from keymix.mixers.base import TokenMixer

ONE_SIZE = "those a window one size, which is said as model.image_size = (height, width)"


class HostedLayerWindows(HostedWindows):
    """Stands where a layer's attention stood, takes its call, returns no weights.

    The mask is minus infinity where the layer's is -100, or twice that.
    """

    def forward(  # type: ignore[override]  # a layer of transformers calls it
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Mix the windows ``[B * nW, N, C]``; refuse to return weights."""
        refuse_weights(self.config, kwargs)
        mask = attention_mask
        cut = Cut(getattr(self, CALL_SIZE).size, self.window_size, self.shift)
        shared = "put_mixers(…, host=HuggingFaceSwin(shared_keys=True))"
        self.refuse_other(cut.windows, mask is not None, shared, ONE_SIZE)
        self.window_grid = cut.windows
        exact = None if mask is None else mask.masked_fill(mask != 0, -torch.inf)
        return super().forward(hidden_states, exact), None


class HuggingFaceSwin(SwinHost):
    """Swin and Swin V2 of Hugging Face's transformers, alone or in another model.

    Keys per window are for images of ``model.image_size``, a side or (height, width) in pixels, if
    the model was given one, else of ``config.image_size``.
    """

    name = "Hugging Face Swin and Swin V2"
    generic = True
    hosted = HostedLayerWindows
    pads_first = True

    def serves(self, model: nn.Module) -> bool:
        """Whether one is in the model."""
        return next(attentions(model, SWIN), None) is not None

    def cuts(self, model: nn.Module, *, called: bool) -> Iterator[tuple[int, str, Any, Cut]]:
        """Yield every layer's attention; an image is padded until patches fill it."""
        for path in attentions(model, SWIN):
            stage, conv = int(path.split(".")[-4]), patches_in(owner_of(model, path))
            assert conv is not None
            call = call_hook_of(conv, ConvGrid) if called else None
            size = given_size(model) or whole_size(
                "image_size", owner_of(model, path).config.image_size
            )
            grid = _halves(size, conv.stride) if call is None or call.grid is None else call.grid
            grid = _halves(grid, (2**stage, 2**stage))
            layer: Any = model.get_submodule(path.rpartition(".")[0])
            window, shift = layer.window_size, layer.shift_size
            if min(grid) <= window and hasattr(layer, "set_shift_and_window_size"):
                shift = 0  # as version 1 sets it when it is called
            own = model.get_submodule(path)
            if not isinstance(own, HostedWindows):
                row_in(path, own)
            yield stage, path, own, Cut(grid, (window, window), (shift, shift))

    def facts(self, attention: nn.Module) -> Facts:
        """Describe the library's attention."""
        return described("attention", attention)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws its own."""
        owner_of(model, path)._init_weights(linear)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, and follow the model's calls."""
        super().put(model, place, mixer)
        self.follow_calls(model)

    def heads(self, attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values of heads, ``[*, h, N, d]``."""
        read = projected("attention", attention, x)
        return read.q, read.k, read.v

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections."""
        return weights_of(attention, row_in("attention", attention))

    def follow_calls(self, model: nn.Module) -> None:
        """Record the grid of patches, and that of tokens at every layer, from now on."""
        for path in attentions(model, SWIN):
            conv = patches_in(owner_of(model, path))
            assert conv is not None
            attach_call_hook(conv, ConvGrid())
            layer = model.get_submodule(path.rpartition(".")[0])
            call = attach_call_hook(layer, CallSize(axis=None))
            setattr(model.get_submodule(path), CALL_SIZE, call)


def _halves(grid: Any, by: Any) -> Any:
    """Return how often steps fit into a grid, the last perhaps in part."""
    return -(-grid[0] // by[0]), -(-grid[1] // by[1])


HOSTS = (HuggingFaceSwin(),)
