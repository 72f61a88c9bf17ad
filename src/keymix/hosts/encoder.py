# SPDX-License-Identifier: Apache-2.0
"""Adapter to dense models: the host of their encoder, with paths that begin at the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import Encoded, Host, Place, find_host
from keymix.mixers.base import Site, TokenMixer


class EncoderHost(Host):
    """A dense model's host: that of its encoder, at ``path``, once :meth:`bound` to a model.

    ``inner`` is the host of the encoder; None in the one that all models are first shown to.
    """

    name = "encoders of keymix's SETR"

    def __init__(self, inner: Host | None = None, path: str = "") -> None:
        self._inner, self._path = inner, path
        if inner is not None:
            self.name = inner.name
            self.parts = inner.parts  # type: ignore[misc]  # one host, one encoder

    def serves(self, model: nn.Module) -> bool:
        """Whether it is a dense model, and a host knows its encoder."""
        if not isinstance(model, Encoded):
            return False
        try:
            find_host(model.get_submodule(model.encoder_path))
        except UserError:
            return False
        return True

    def bound(self, model: nn.Module) -> Host:
        """Return the host for this model's encoder."""
        if not isinstance(model, Encoded):
            raise UserError(f"{type(model).__name__} has no encoder")
        path = model.encoder_path
        return EncoderHost(find_host(model.get_submodule(path)), path)

    @property
    def inner(self) -> Host:
        """The encoder's own host."""
        if self._inner is None:
            raise UserError("find_host(model) gives the host of a dense model's encoder")
        return self._inner

    def _encoder(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self._path)

    def _outer(self, place: Place) -> Place:
        return replace(place, path=f"{self._path}.{place.path}")

    def _own(self, place: Place) -> Place:
        return replace(place, path=place.path.removeprefix(f"{self._path}."))

    def places(self, model: nn.Module) -> list[Place]:
        """Those of the encoder."""
        return [self._outer(place) for place in self.inner.places(self._encoder(model))]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Return what the encoder's host says."""
        return self.inner.site_for(place, mixer, options)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer into the encoder."""
        self.inner.put(self._encoder(model), self._own(place), mixer)

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what the encoder's own attention makes of a call."""
        return self.inner.reading(attention, args, kwargs)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of the encoder's attention."""
        return self.inner.weights(attention)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join what the encoder's attention holds in pieces."""
        return self.inner.joined(tensors)

    def follow_calls(self, model: nn.Module) -> None:
        """Record the size of images that the encoder is called with."""
        self.inner.follow_calls(self._encoder(model))

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the encoder's tokens lie on the image."""
        return self.inner.layout(self._encoder(model), self._own(place))

    def update_grids(self, model: nn.Module) -> None:
        """Update the grids of the encoder's mixers."""
        self.inner.update_grids(self._encoder(model))


HOSTS = (EncoderHost(),)
