# SPDX-License-Identifier: Apache-2.0
"""The layers of a model where attention sits, the host's own and mixers alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keymix.arguments import unwrapped
from keymix.errors import NoAttentionMap
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import PLAN, Host, Place, attends, called_attention, find_host, find_mixers
from keymix.mixers.base import Queries, Stage, TokenMixer, query_rows
from keymix.mixers.map_mixer import MapMixer


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One place where attention sits.

    Attributes:
        path: Of the module that is called: ``"blocks.3.attn"`` where the host's own attention
            sits, ``"blocks.3.attn.mixer"`` where a mixer does.
        module: That module; a forward hook on it sees the call.
        place: What the host says of it.
        host: The adapter.
        mixer: The mixer, None where the host's own attention sits.
    """

    path: str
    module: nn.Module
    place: Place
    host: Host
    mixer: TokenMixer | None

    @property
    def attends(self) -> bool:
        """Whether attention sits here, or stood here before a swap: no convolution or pooling."""
        if self.mixer is None:
            return attends(self.host, self.module)
        return hasattr(self.mixer, PLAN) or not self.mixer.traits.control

    def reading(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return queries, keys and values of a call.

        Args:
            args: Positional arguments that the module was called with.
            kwargs: The others.

        Raises:
            NoAttentionMap: If the layer has none; it says why.
        """
        if self.mixer is None:
            return self.host.reading(self.module, args, kwargs)
        return read_mixer(self.mixer, args, kwargs)

    def map(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        queries: Queries | None = None,
        stage: Stage = "softmax",
    ) -> Float[Tensor, "*batch h Q M"]:
        """Return rows of the attention map of a call, without dropout.

        Args:
            args: Positional arguments that the module was called with.
            kwargs: The others.
            queries: Indices of the query tokens; all if None.
            stage: ``"softmax"``, or ``"final"`` for the map that multiplies V.

        Raises:
            NoAttentionMap: If the layer forms none; it says why.
        """
        if self.mixer is not None:
            named = by_name(args, kwargs)
            return self.mixer.attention_map(**named, queries=queries, stage=stage)
        read = self.host.reading(self.module, args, kwargs)
        return read.map(query_rows(queries, read.q), stage)

    def layout(self, model: nn.Module) -> Layout:
        """Say where its tokens lie on the image, as of the model's last call."""
        return self.host.layout(model, self.place)


def find_layers(model: nn.Module) -> list[Layer]:
    """List the layers of a model where attention sits, in the order of the forward pass.

    From now on the model's calls are recorded for the size of their images, see
    :meth:`keymix.hosts.base.Host.listen`.

    Raises:
        UserError: If no adapter knows the model.
    """
    model = unwrapped(model)
    host, mixers = find_host(model), find_mixers(model)
    host.follow_calls(model)
    layers = []
    for place in host.places(model):
        path = f"{place.path}.mixer"
        mixer = mixers.get(path)
        path = place.path if mixer is None else path
        module = model.get_submodule(path)
        layers.append(Layer(path=path, module=module, place=place, host=host, mixer=mixer))
    return layers


def unread_attention(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """List the paths of modules named after attention that are in or around none of the layers."""
    read = [layer.place.path for layer in layers]
    found = [
        path
        for path, module in model.named_modules()
        if path
        and called_attention(module)
        and not any(_within(path, place) or _within(place, path) for place in read)
    ]
    return [path for path in found if not any(o != path and _within(o, path) for o in found)]


def _within(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def read_mixer(mixer: TokenMixer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
    """Return queries, keys and values of a mixer's call, if its logits are a product of them."""
    name = mixer.mixer_name or type(mixer).__name__
    if not isinstance(mixer, MapMixer):
        raise NoAttentionMap(f"mixer {name!r} has no queries and keys")
    named = by_name(args, kwargs)
    grid = mixer.resolve_grid(named["x"], named.get("grid"))
    inputs = mixer.inputs(named["x"], grid)
    both = mixer.factors(inputs)
    if both is None:
        raise NoAttentionMap(f"the logits of mixer {name!r} are no product of queries and keys")
    return Reading(
        q=both[0],
        k=both[1],
        v=inputs["v"],
        scale=mixer.gain(),
        bias=mixer.added_bias(inputs, grid, named.get("bias")),
        pre=mixer.talking_pre,
        post=mixer.talking_post,
    )


def by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a mixer's call by name."""
    return dict(zip(("x", "grid", "bias"), args, strict=False)) | dict(kwargs)
