# SPDX-License-Identifier: Apache-2.0
"""The attention maps of a model: one forward pass, then the rows that were asked for.

Of spiking mixers without a map it reads which tokens they let through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from keymix.analysis.capture import (
    Asked,
    At,
    Call,
    Layers,
    Seat,
    class_token_of,
    row_chunks,
    run_once,
    select_layers,
)
from keymix.analysis.images import Images, Model, one_batch
from keymix.arguments import checked, module_of, opened
from keymix.errors import NoAttentionMap, UserError, unknown
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.layers import by_name
from keymix.mixers.base import Queries, Stage
from keymix.mixers.spiking import SpikingMixer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Asked",
    "At",
    "AttentionMaps",
    "Heads",
    "Layers",
    "Windows",
    "attention_maps",
    "masks_tokens",
    "on_image",
    "select_layers",
    "token_masks",
]

_PRINTED = 15  # layers
Heads = Literal["each", "mean"]
Windows = Literal["separate", "image"]


class AttentionMaps(dict[str, Tensor]):
    """Module path to map, in the model's order; a number is the place of a layer, from 0.

    It prints its layers and the shapes of their maps; `overlay` and `plot` lay one on its image.

    Attributes:
        layouts: Module path to where the layer's tokens lie on the image, for :func:`on_image`;
            a path is missing where that is unknown.
        heads: Module path to the number of heads that were read, also where their mean is kept.
        seen: Module path to the number of keys that one query sees: those of a window, where
            attention stays inside windows, also where they are put back on the image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[str, Layout] = {}
        self.heads: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.images = torch.empty(0)  # that were looked at, ``[B, C, H, W]``

    def __getitem__(self, layer: str | int) -> Tensor:
        return super().__getitem__(self.path(layer))

    def path(self, layer: str | int) -> str:
        """Return the path of a layer, which may be given by its place."""
        paths = list(self)
        if isinstance(layer, int) and -len(paths) <= layer < len(paths):
            return paths[layer]
        if layer not in self:
            raise unknown("layer", str(layer), [*paths, *map(str, range(len(paths)))])
        return str(layer)

    def __repr__(self) -> str:
        lines = [
            f"{i:>3}  {path}  {tuple(maps.shape)}" for i, (path, maps) in enumerate(self.items())
        ]
        more = len(lines) - _PRINTED
        shown = [*lines[:_PRINTED], f"     and {more} more"] if more > 0 else lines
        return "\n".join([f"attention maps of {len(lines)} layers", *shown])

    def overlay(
        self, image: int = 0, layer: str | int = -1, head: int | Literal["mean"] = "mean"
    ) -> Float[Tensor, "H W"]:
        """Return how often a layer attends to each pixel, as a multiple of even attention.

        The mean over the queries that were read, on the keys' places, scaled up bilinearly.

        Args:
            image: Which of the images, from 0.
            layer: A path, or the place of a layer.
            head: Which head, from 0, or their mean.

        Raises:
            UserError: If there is no such layer, image or head, or it is unknown where the layer's
                tokens lie on the image.
        """
        path = self.path(layer)
        if path not in self.layouts:
            raise UserError(f"it is unknown where the tokens of layer {path} lie on the image")
        maps = on_image(self[path], self.layouts[path])
        for name, number, count in (("image", image, len(maps)), ("head", head, maps.shape[1])):
            if number != "mean" and not -count <= number < count:
                raise UserError(f"{name}={number}: there are {count}, numbered from 0")
        rows = maps[image].mean(0) if head == "mean" else maps[image, head]
        times = rows.mean(0)[None, None].float() * self[path].shape[-1]
        size = tuple(self.images.shape[-2:])
        return F.interpolate(times, size=size, mode="bilinear", align_corners=False)[0, 0].cpu()

    def plot(
        self,
        image: int = 0,
        layer: str | int = -1,
        head: int | Literal["mean"] = "mean",
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the `overlay` of a layer on its image, which is shown in grey.

        Args:
            image: Which of the images, from 0.
            layer: A path, or the place of a layer.
            head: Which head, from 0, or their mean.
            ax: Where to draw; a new figure if None.

        Returns:
            The axes.

        Raises:
            UserError: As `overlay` does.
        """
        from matplotlib import pyplot as plt

        times = self.overlay(image, layer, head)
        if ax is None:
            ax = plt.subplots(layout="constrained")[1]
        ax.imshow(self.images[image].float().mean(0).cpu(), cmap="gray")
        drawn = ax.imshow(times, cmap="inferno", alpha=0.6, vmin=0)
        ax.figure.colorbar(drawn, ax=ax, label="attention, × even")
        ax.set_title(self.path(layer))
        ax.set_axis_off()
        return ax


@checked
def attention_maps(
    model: Model,
    images: Images,
    *,
    layers: Layers | None = None,
    queries: Asked | None = None,
    stage: Stage = "softmax",
    heads: Heads = "each",
    windows: Windows = "separate",
    missing: dict[str, str] | None = None,
) -> AttentionMaps:
    """Read the attention maps of some layers for a batch of images.

    The images go through the model once, in inference mode and without gradients, with fused
    attention where the model uses it; each chosen layer then forms only the rows asked for from
    the tokens it was given: k rows cost k x N numbers per head, never N x N. The model is left as
    it was, but for a hook or a few that record the size of its images from now on. A layer without
    a map is an error that says why, never an empty answer.

    Args:
        model: A model with keymix mixers, or any other that an adapter knows, with its own
            attention: timm's, torchvision's, Hugging Face's. Or what `keymix.load` returns, or the
            folder of a run.
        images: A batch ``[B, C, H, W]`` or an image ``[C, H, W]`` as the model takes it,
            normalised. Or pictures, which are read as the model is shown them: files, folders,
            images of Pillow's, arrays ``[H, W, C]`` of bytes or of values from 0 to 1, uint8
            tensors ``[C, H, W]``; one of them, or a list.
        layers: Which layers: numbers in the model's order (-1 is the last), ranges such as
            ``"6-11"``, patterns of module paths (``"blocks.3.*"``, ``"stages.2"``), or a list of
            these; all if None.
        queries: Whose rows: indices of tokens, prefix tokens first; ``"cls"``, the class token;
            ``"mean"``, the mean over all patch tokens, which is the attention that keys receive;
            :class:`At`, a place on the image; all tokens if None. One row of a ViT at 224 px is
            197 numbers per head, the whole map 197 times as many.
        stage: ``"softmax"`` for the weights right after the activation (entropy, rollout), or
            ``"final"`` for the map that multiplies V, after any mixing of heads.
        heads: ``"each"``, or ``"mean"`` for their mean, as one head.
        windows: Where attention stays inside windows (Swin), ``"separate"`` returns the map of
            each, with queries as indices inside a window; ``"image"`` puts them back on the image,
            shift and padding undone: queries are tokens of the image, row by row, and a row has
            zeros outside of its query's window.
        missing: If given, layers without a map are put here, path to reason, and are no error.

    Returns:
        Module path to map, ``[B, h, Q, M]`` (separate windows: ``[B, windows, h, Q, M]``), in the
        model's order, with the layers' ``layouts``.

    Example:
        >>> model = keymix.create_model("vit_micro_p4_32", mixer="static_key")
        >>> maps = keymix.attention_maps(model, torch.randn(2, 3, 32, 32), layers=-1, queries=[0])
        >>> [m.shape for m in maps.values()]
        [torch.Size([2, 4, 1, 65])]

    Raises:
        NoAttentionMap: If a chosen layer forms no map; it names the layer and the reason.
        UserError: If an argument is none of these, no adapter knows the model, no layer matches,
            or a query is no token.
    """
    trained = opened(model)
    network, batch = module_of(trained), one_batch(images, trained)
    seats = select_layers(network, layers)
    maps = AttentionMaps()
    maps.images = batch.detach()

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        try:
            read = _Rows(network, seat, call, stage, layout)
            found = read.on_image(queries) if windows == "image" else read.separate(queries)
        except NoAttentionMap as error:
            if missing is None:
                raise
            missing[seat.path] = str(error.__cause__ or error)
            return
        if layout is not None:
            joined = windows == "image" and layout.window is not None
            maps.layouts[seat.path] = _whole(layout) if joined else layout
        area = None if layout is None or layout.window is None else math.prod(layout.window)
        maps.seen[seat.path] = found.shape[-1] if area is None else area
        maps.heads[seat.path] = found.shape[-3]
        maps[seat.path] = found.mean(-3, keepdim=True) if heads == "mean" else found

    run_once(network, batch, seats, on_call)
    return maps


def _whole(layout: Layout) -> Layout:
    return replace(layout, window=None, windows=None, shift=(0, 0))


class _Rows:
    """The rows of one layer's call that queries mean."""

    def __init__(
        self, model: nn.Module, seat: Seat, call: Call, stage: Stage, layout: Layout | None
    ) -> None:
        self.model, self.seat, self.layout = model, seat, layout
        self.call, self.stage = call, stage

    def read(self, rows: Queries | None) -> Tensor:
        """Form some rows."""
        return self.seat.map(self.call, rows, self.stage)

    def separate(self, queries: Asked | None) -> Tensor:
        """Rows as the layer forms them."""
        if queries == "cls":
            return self.read([class_token_of(self.model, self.layout, self.seat.path)])
        if queries == "mean":
            layout = self._known_layout()
            grid, total = layout.window or layout.grid, torch.zeros(())
            count = grid[0] * grid[1]
            for _, maps in row_chunks(count, lambda rows: self.read(layout.prefix + rows)):
                total = total.to(maps) + maps.sum(-2, keepdim=True)
            return total / count
        if not isinstance(queries, At):
            return self.read(queries)
        if self._known_layout().window is not None:
            raise UserError(
                f"layer {self.seat.path} works in windows: a place on the image asks for "
                "windows='image'"
            )
        return self.read([queries.token(self._known_layout())])

    def on_image(self, queries: Asked | None) -> Tensor:
        """Rows of tokens of the image, over keys of the image."""
        layout = self._known_layout()
        if layout.window is None:
            return self.separate(queries)
        joined = WindowsOnImage(layout, self.read)
        if queries == "mean":
            return joined.mean()
        if queries == "cls":
            class_token_of(self.model, layout, self.seat.path)  # windows have none
        if queries is None:
            queries = range(joined.tokens)
        asked = [queries.token(layout)] if isinstance(queries, At) else queries
        return joined.rows(torch.as_tensor(asked, dtype=torch.long).reshape(-1).cpu())

    def _known_layout(self) -> Layout:
        if self.layout is None:
            raise UserError(
                f"it is unknown where the tokens of layer {self.seat.path} lie on the image; ask "
                "for queries= by their indices"
            )
        return self.layout


def on_image(
    maps: Float[Tensor, "B h Q M"], layout: Layout
) -> Float[Tensor, "B h Q key_rows key_columns"]:
    """Arrange rows of attention as pictures over the positions of their keys.

    Prefix keys (class token, registers) lie nowhere on the image and are left out: a picture sums
    to what the patches receive, ``maps[..., layout.prefix:].sum(-1)``.

    Args:
        maps: Of :func:`keymix.attention_maps`, of windows with ``windows="image"``.
        layout: Where they lie, ``maps.layouts[path]``.

    Raises:
        UserError: If the maps are of windows, or have other keys than the layout.
    """
    rows, columns = layout.key_grid
    if maps.ndim != 4:
        raise UserError(
            f"maps of shape {tuple(maps.shape)} are of windows; ask for windows='image'"
        )
    if maps.shape[-1] != layout.prefix + rows * columns:
        raise UserError(
            f"maps of {maps.shape[-1]} keys do not fit {layout.prefix} prefix tokens and a grid of "
            f"{rows}x{columns}"
        )
    return maps[..., layout.prefix :].reshape(*maps.shape[:-1], rows, columns)


def window_positions(layout: Layout) -> Int[Tensor, "windows M"]:
    """Return which token of the image each place of each window holds, -1 for padding."""
    assert layout.window is not None
    assert layout.windows is not None
    (height, width), (h, w), (down, across) = layout.grid, layout.window, layout.windows
    tokens = torch.arange(height * width).view(height, width)
    pad = (0, across * w - width, 0, down * h - height)
    shift = (-layout.shift[0], -layout.shift[1])
    if layout.pads_first:
        tokens = F.pad(tokens, pad, value=-1).roll(shift, (0, 1))
    else:
        tokens = F.pad(tokens.roll(shift, (0, 1)), pad, value=-1)
    return tokens.view(down, h, across, w).transpose(1, 2).reshape(down * across, h * w)


class WindowsOnImage:
    """Puts a layer's maps of windows back on the image.

    `read` forms the map of some places of every window, ``[B, windows, h, Q, M]``.
    """

    def __init__(self, layout: Layout, read: Callable[[Tensor], Tensor]) -> None:
        self.places = window_positions(layout)
        self.tokens = layout.grid[0] * layout.grid[1]
        self.read = read

    def rows(self, queries: Int[Tensor, " Q"]) -> Float[Tensor, "B h Q N"]:
        """Return the rows of image tokens over all image tokens: zero outside of their window.

        What a query gives to padding is left out, so that a row may sum to less than one.
        """
        if len(queries) == 0 or int(queries.min()) < 0 or int(queries.max()) >= self.tokens:
            raise UserError(
                f"queries must be indices of the {self.tokens} tokens, got {queries.tolist()}"
            )
        flat = self.places.flatten()
        where = torch.full((self.tokens,), -1)
        where[flat[flat >= 0]] = (flat >= 0).nonzero()[:, 0]
        size = self.places.shape[1]
        window, place = where[queries] // size, where[queries] % size
        asked, which = torch.unique(place, return_inverse=True)
        maps = self._checked(self.read(asked))
        rows = maps[:, window.to(maps.device), :, which.to(maps.device)]  # [Q, B, h, M]
        return self._scattered(rows.permute(1, 2, 0, 3), self.places[window])

    def mean(self) -> Float[Tensor, "B h 1 N"]:
        """Return the mean row over all tokens of the image."""
        total: Tensor | None = None
        for asked, maps in row_chunks(self.places.shape[1], self.read):
            real = (self.places[:, asked] >= 0).to(maps)  # padding asks too, and does not count
            part = torch.einsum("bwhqm,wq->bhwm", self._checked(maps), real)
            total = part if total is None else total + part
        assert total is not None  # a window has a place
        return self._scattered(total.flatten(2)[:, :, None], self.places.flatten()) / self.tokens

    def _checked(self, maps: Tensor) -> Tensor:
        if maps.ndim != 5 or (maps.shape[1], maps.shape[-1]) != tuple(self.places.shape):
            raise UserError(
                f"maps of shape {tuple(maps.shape)} do not fit {self.places.shape[0]} windows of "
                f"{self.places.shape[1]} tokens"
            )
        return maps

    def _scattered(self, rows: Tensor, places: Tensor) -> Tensor:
        """Put rows ``[B, h, Q, K]`` where their keys lie: places ``[K]`` or ``[Q, K]``."""
        there = places.where(places >= 0, self.tokens).to(rows.device).expand(rows.shape)
        scattered = rows.new_zeros(*rows.shape[:-1], self.tokens + 1)
        return scattered.scatter_(-1, there, rows)[..., :-1]


# ---- masks of tokens -------------------------------------------------------------------------


def masks_tokens(model: nn.Module, layers: Layers | None = None) -> bool:
    """Say whether all mixers of some layers have a mask of tokens; see `token_masks`."""
    seats = select_layers(model, layers).values()
    return all(_mask_of(seat) for seat in seats)


def token_masks(
    model: nn.Module, images: Float[Tensor, "B ..."], *, layers: Layers | None = None
) -> dict[str, Float[Tensor, "B h rows columns"]]:
    """Read in what share of the time steps each head lets a token through.

    The mixers of the model must name their ``token_mask``; layers and images are those of
    `attention_maps`. A `NoAttentionMap` says that a layer has no such mask, or that it is not known
    where its tokens lie.
    """
    found: dict[str, Tensor] = {}

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        mixer, name = seat.module, _mask_of(seat)
        if not isinstance(mixer, SpikingMixer) or not name or layout is None:
            raise NoAttentionMap(f"layer {seat.path} has no mask of tokens on the image")
        named = by_name(*call)
        passing = mixer.spikes(named["x"], named.get("grid"))[name].mean(0)  # [B, h, N, 1]
        found[seat.path] = passing.reshape(*passing.shape[:2], *layout.grid)

    run_once(model, images, select_layers(model, layers), on_call)
    return found


def _mask_of(seat: Seat) -> str:
    """Name the mask of tokens among the spikes of a layer's mixer; empty where it has none."""
    return seat.module.token_mask if isinstance(seat.module, SpikingMixer) else ""
