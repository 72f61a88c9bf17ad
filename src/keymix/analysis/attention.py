# SPDX-License-Identifier: Apache-2.0
"""The attention maps of a model: one forward pass, then the rows that were asked for.

Of spiking mixers without a map it reads which tokens they let through.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
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
    find_seats,
    readout,
    row_chunks,
    run_once,
    select_layers,
)
from keymix.analysis.images import Images, Model, one_batch
from keymix.analysis.rollout import Query, Read, Rollout, rolled
from keymix.arguments import checked, module_of, opened
from keymix.errors import NoAttentionMap, UserError, unknown
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.layers import by_name
from keymix.mixers.base import Stage
from keymix.mixers.spiking import SpikingMixer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PRINTED = 15  # layers
Heads = Literal["each", "mean"]
Windows = Literal["separate", "image"]


class AttentionMaps(dict[str, Tensor]):
    """Module path to map, in the model's order; a number is the place of a layer, from 0.

    It prints its layers and the shapes of their maps; `overlay` and `plot` lay one on its image,
    `rollout` multiplies all.

    Attributes:
        layouts: Module path to where the layer's tokens lie on the image, for :func:`on_image`;
            a path is missing where that is unknown.
        heads: Module path to the number of heads that were read, also where their mean is kept.
        seen: Module path to the number of keys that one query sees: those of a window, where
            attention stays inside windows, also where they are put back on the image.
        images: What was looked at, ``[B, C, H, W]``.
        queries: Whose rows the maps have; all if None.
        stage: At which stage the maps are.
        of: How many layers of the model may have a map.
        readout: ``"cls"`` where a class token passes through these layers and is what the model
            reads out, else ``"mean"``.
    """

    def __init__(self, images: Tensor, queries: Asked | None, stage: Stage, of: int) -> None:
        super().__init__()
        self.images, self.queries, self.stage, self.of = images, queries, stage, of
        self.layouts: dict[str, Layout] = {}
        self.heads: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.readout: Literal["cls", "mean"] = "mean"

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
        ax.imshow(self.images[image].float().mean(0).cpu().numpy(), cmap="gray")
        drawn = ax.imshow(times.numpy(), cmap="inferno", alpha=0.6, vmin=0)
        ax.figure.colorbar(drawn, ax=ax, label="attention, × even")
        ax.set_title(self.path(layer))
        ax.set_axis_off()
        return ax

    def rollout(self, query: Query | None = None) -> Rollout:
        """Multiply all maps, as :func:`keymix.attention_rollout` does without keeping any.

        Args:
            query: Index of a token, ``"cls"``, ``"mean"`` or a place on the image; None for what
                the model reads out.

        Raises:
            UserError: If these are not the whole maps of all layers after the softmax, or cannot
                be rolled out, as :func:`keymix.attention_rollout` says.
        """
        why = ""
        if len(self) < self.of:
            why = f"these are maps of {len(self)} of {self.of} layers"
        elif self.stage != "softmax":
            why = f"these are maps of stage={self.stage!r}"
        elif self.queries is not None:
            why = f"these are rows of queries={self.queries!r}"
        if why:
            raise UserError(
                f"rollout multiplies the whole maps of all layers, and {why}: leave layers=, "
                "stage= and queries= out, or call keymix.attention_rollout(model, images, layers=)"
            )
        layouts = {path: self.layouts.get(path) for path in self}
        reads: dict[str, Read] = {at: partial(_rows_of, maps) for at, maps in self.items()}
        return rolled(layouts, reads, self.readout if query is None else query)


def _rows_of(maps: Tensor, rows: Tensor) -> Tensor:
    return maps[..., rows.to(maps.device), :]


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
    maps = AttentionMaps(batch.detach(), queries, stage, len(find_seats(network)))

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        try:
            read = partial(seat.map, call, stage=stage)
            rows = _on_image if windows == "image" else _separate
            found = rows(seat.path, layout, read, queries)
        except NoAttentionMap as error:
            if missing is None:
                raise
            missing[seat.path] = str(error.__cause__ or error)
            return
        if layout is not None:
            joined = windows == "image" and layout.window is not None
            whole = replace(layout, window=None, windows=None, shift=(0, 0))
            maps.layouts[seat.path] = whole if joined else layout
        area = None if layout is None or layout.window is None else math.prod(layout.window)
        maps.seen[seat.path] = found.shape[-1] if area is None else area
        maps.heads[seat.path] = found.shape[-3]
        maps[seat.path] = found.mean(-3, keepdim=True) if heads == "mean" else found

    run_once(network, batch, seats, on_call)
    maps.readout = readout(network, [maps.layouts.get(path) for path in maps])
    return maps


def _separate(path: str, layout: Layout | None, read: Read, queries: Asked | None) -> Tensor:
    """Form rows as the layer has them."""
    if isinstance(queries, At):
        known = _known(path, layout)
        if known.window is None:
            return read([queries.token(known)])
        raise UserError(
            f"layer {path} works in windows: a place on the image asks for windows='image'"
        )
    if queries == "cls":
        return read([class_token_of(layout, path)])
    if queries == "mean":
        known = _known(path, layout)
        grid, total = known.window or known.grid, torch.zeros(())
        count = grid[0] * grid[1]
        for _, maps in row_chunks(count, lambda rows: read(known.prefix + rows)):
            total = total.to(maps) + maps.sum(-2, keepdim=True)
        return total / count
    return read(queries)


def _on_image(path: str, layout: Layout | None, read: Read, queries: Asked | None) -> Tensor:
    """Form rows of tokens of the image, over keys of the image, ``[B, h, Q, N]``.

    They are zero outside of their window. What a query gives to padding is left out, so that a row
    may sum to less than one.
    """
    known = _known(path, layout)
    if known.window is None:
        return _separate(path, layout, read, queries)
    places, tokens = window_positions(known), known.grid[0] * known.grid[1]
    if queries == "mean":
        total: Tensor | None = None
        for chunk, maps in row_chunks(places.shape[1], read):
            real = (places[:, chunk] >= 0).to(maps)  # padding asks too, and does not count
            part = torch.einsum("bwhqm,wq->bhwm", maps, real)
            total = part if total is None else total + part
        assert total is not None  # a window has a place
        return _scattered(total.flatten(2)[:, :, None], places.flatten(), tokens) / tokens
    if queries == "cls":
        class_token_of(known, path)  # windows have none
    if queries is None:
        queries = range(tokens)
    given = [queries.token(known)] if isinstance(queries, At) else queries
    asked = torch.as_tensor(given, dtype=torch.long).reshape(-1).cpu()
    if len(asked) == 0 or int(asked.min()) < 0 or int(asked.max()) >= tokens:
        raise UserError(f"queries must be indices of the {tokens} tokens, got {asked.tolist()}")
    flat, size = places.flatten(), places.shape[1]
    where = torch.full((tokens,), -1)
    where[flat[flat >= 0]] = (flat >= 0).nonzero()[:, 0]
    window, place = where[asked] // size, where[asked] % size
    read_off, which = torch.unique(place, return_inverse=True)
    maps = read(read_off)  # [B, windows, h, places, M]
    rows = maps[:, window.to(maps.device), :, which.to(maps.device)]  # [Q, B, h, M]
    return _scattered(rows.permute(1, 2, 0, 3), places[window], tokens)


def _scattered(rows: Tensor, places: Tensor, tokens: int) -> Tensor:
    """Put rows ``[B, h, Q, K]`` where their keys lie: places ``[K]`` or ``[Q, K]``."""
    there = places.where(places >= 0, tokens).to(rows.device).expand(rows.shape)
    scattered = rows.new_zeros(*rows.shape[:-1], tokens + 1)
    return scattered.scatter_(-1, there, rows)[..., :-1]


def _known(path: str, layout: Layout | None) -> Layout:
    if layout is None:
        raise UserError(
            f"it is unknown where the tokens of layer {path} lie on the image; ask for queries= by "
            "their indices"
        )
    return layout


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
