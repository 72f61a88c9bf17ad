# SPDX-License-Identifier: Apache-2.0
"""Windows of Swin and Swin V2, whoever wrote them: an axis; positions and mask are one bias."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from timm.layers import resize_rel_pos_bias_table, trunc_normal_
from timm.models.swin_transformer import get_relative_position_index
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import (
    Layout,
    Reading,
    network_in,
    positions_in,
    relative_positions,
)
from keymix.hosts.base import Host, Place, draw_truncated
from keymix.hosts.blocks import Facts
from keymix.hosts.call_grid import CALL_SIZE, CallSize
from keymix.hosts.head_norms import cosine, cosine_norms, norms_kept
from keymix.hosts.timm_heads import named_call, project_heads, projections_of
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.resize import GridBound, counted

MASKED = (
    "its windows are shifted, so that tokens from opposite edges of the image meet in one window, "
    "and this mixer cannot honour the mask that keeps them apart; name another mixer for the "
    "shifted blocks (mixer= takes one per block), or take a model without shifts"
)

# what timm's interpolation of a table says of its own workings, and a user can do nothing about
INNER = (
    r"torch\.searchsorted\(\): input value tensor is non-contiguous",
    r"Using a non-tuple sequence for multidimensional indexing is deprecated",
)


def table_rows(window: Grid) -> int:
    """Return how many relative positions there are in a window."""
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def resized_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample a table ``[(2 h - 1) (2 w - 1), heads]`` for other windows, as timm does."""
    if old == new:
        return table
    shape = (table_rows(new), table.shape[1])
    with warnings.catch_warnings():
        for message in INNER:
            warnings.filterwarnings("ignore", message, UserWarning)
        moved: Tensor = resize_rel_pos_bias_table(
            table, new_window_size=new, new_bias_shape=shape, old_window_size=old
        )
    return moved


def window_grid(resolution: Grid, window_size: Grid) -> Grid:
    """Return how many rows and columns of windows there are; the last ones are padded."""
    height, width = resolution
    return math.ceil(height / window_size[0]), math.ceil(width / window_size[1])


@dataclass(frozen=True)
class Cut:
    """One way of cutting a feature map ``grid`` into windows of ``window`` tokens, after a shift.

    The map is padded at the right and the bottom until windows fill it.
    """

    grid: Grid
    window: Grid
    shift: Grid

    @property
    def windows(self) -> Grid:
        """Rows and columns of windows."""
        return window_grid(self.grid, self.window)


def read_windows(
    attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Reading:
    """Return a reading of projected heads in windows ``[B, nW, h, N, d]``, a mask ``[nW, N, N]``.

    Swin V2 compares directions, by a scale that each head learns.
    """
    scale = getattr(positions_in(attention), "logit_scale", None)
    if scale is not None:
        q, k = cosine(q, scale), cosine(k, scale)
    bias = relative_positions(attention)
    if mask is not None and bias is not None:
        bias = bias + mask[:, None]
    return Reading(q=q, k=k, v=v, scale=q.shape[-1] ** -0.5, bias=bias)


class HostedWindows(nn.Module):
    """Stands where timm's WindowAttention stood, takes its call, and hands the mixer windows.

    timm folds windows into the batch; the mixer gets them as an axis, ``[B, nW, N, C]``. The table
    of relative positions ``[(2 h - 1) (2 w - 1), heads or 1]`` stays the host's (timm's name and
    shape, perhaps one column for all heads), or Swin V2's network of positions; they and the
    shift's mask reach the mixer as one additive bias. Mixers without an attention map have no use
    for positions and get none. ``cut`` is that of the image now, ``before`` is what stood here.
    """

    relative_position_bias_table: nn.Parameter | None
    relative_position_index: Tensor
    relative_coords_table: Tensor | None
    cpb_mlp: nn.Module | None

    def __init__(
        self, mixer: TokenMixer, place: Place, before: nn.Module, *, cut: Cut, shared_keys: bool
    ) -> None:
        super().__init__()
        assert place.site.grid is not None
        self.mixer = mixer
        self.place = place  # what the host itself says, for the next mixer put here
        self.window_size, self.window_grid = place.site.grid, cut.windows
        shift = getattr(before, "shift", getattr(before, "shift_size", cut.shift))
        self.shift = shift[0], shift[1]  # the block's, where it is one for any image
        self.config = getattr(before, "config", None)  # may ask for attention weights
        kept, maps = positions_in(before), isinstance(mixer, MapMixer)
        table = getattr(kept, "relative_position_bias_table", None)
        one = getattr(kept, "one_table", table is not None and table.shape[1] == 1)
        self.one_table, self.shared_keys = one, shared_keys
        self.cpb_mlp = network_in(kept) if maps else None
        self.pretrained_window_size = getattr(kept, "pretrained_window_size", (0, 0))
        coordinates = getattr(kept, "relative_coords_table", None)
        self.register_buffer("relative_coords_table", coordinates, persistent=False)
        self.register_parameter("relative_position_bias_table", None)
        if isinstance(mixer, MapMixer) and coordinates is None:
            columns = 1 if self.one_table else mixer.num_heads
            if table is None or table.shape[1] != columns:
                rows = table_rows(self.window_size)
                table = nn.Parameter(torch.empty(rows, columns, **mixer.factory))
                trunc_normal_(table, std=0.02)
            self.relative_position_bias_table = table
        device = None if table is None else table.device
        index = get_relative_position_index(*self.window_size, device=device)
        self.register_buffer("relative_position_index", index, persistent=False)

    _make_pair_wise_relative_positions = WindowAttention._make_pair_wise_relative_positions

    def init_non_persistent_buffers(self) -> None:
        """Fill index and coordinates, of windows or memory that the model was given just now."""
        device, coordinates = self.relative_position_index.device, self.relative_coords_table
        self.relative_position_index = get_relative_position_index(*self.window_size, device=device)
        if coordinates is not None:
            made = self._make_pair_wise_relative_positions(device, coordinates.dtype)
            self.relative_coords_table = made[0]

    def set_window_size(self, window_size: Grid) -> None:
        """Resample the table for windows of another size, as timm does."""
        if tuple(window_size) == self.window_size:
            return
        before, self.window_size = self.window_size, (window_size[0], window_size[1])
        self.init_non_persistent_buffers()
        table = self.relative_position_bias_table
        if table is not None:
            with torch.no_grad():
                resized = resized_table(table, before, self.window_size)
            trains = table.requires_grad
            self.relative_position_bias_table = nn.Parameter(resized, requires_grad=trains)

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """Return relative positions and mask as one bias, ``[(nW,) heads or 1, N, N]``."""
        positions = relative_positions(self)
        if positions is None:
            return None if mask is None else mask[:, None]
        return positions if mask is None else positions + mask[:, None]

    def refuse_other(self, windows: Grid, masked: bool, shared: str, one_size: str) -> None:
        """Refuse an image whose mask or windows are not those that the mixer can serve.

        What else would serve it is said: how keys are ``shared``, and how one size is set.
        """
        mixer = self.mixer
        if masked and not mixer.claims.maskable:
            raise UserError(f"mixer {mixer.mixer_name!r} cannot serve an image so large: {MASKED}")
        if not isinstance(mixer, GridBound) or not mixer.own_windows:
            return
        site = mixer.site
        if windows != site.window_grid:
            raise UserError(
                f"mixer {mixer.mixer_name!r} {mixer.holds} in each of "
                f"{counted(site.windows, site.window_grid)}, and this image has "
                f"{counted(math.prod(windows), windows)}; keys that all windows share serve any "
                f"image ({shared}), and {one_size}"
            )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix windows, image by image ``[B * nW, N, C]``; a mask ``[nW, N, N]`` is a bias."""
        count = self.window_grid[0] * self.window_grid[1]
        out: Tensor = self.mixer(x.reshape(-1, count, *x.shape[1:]), bias=self.bias(mask))
        return out.flatten(0, 1)


class SwinHost(Host):
    """What hosts of Swin share: a mixer sees the tokens of one window; windows are an axis.

    Relative positions stay with the host. Where windows are shifted the mixer gets a mask.
    ``shared_keys`` says whether learned keys serve all windows of a block, False for keys per
    window, as published; None for what the model has (keys per window at first).
    """

    hosted: ClassVar[type[HostedWindows]] = HostedWindows
    pads_first: ClassVar[bool] = False  # whether maps are padded before they are rolled

    def __init__(self, *, shared_keys: bool | None = None) -> None:
        self.shared_keys = shared_keys

    def shares(self, attention: nn.Module) -> bool:
        """Whether keys serve all windows of a block that has this attention, or a mixer there."""
        if self.shared_keys is not None:
            return self.shared_keys
        return isinstance(attention, HostedWindows) and attention.shared_keys

    @abstractmethod
    def cuts(self, model: nn.Module, *, called: bool) -> Iterator[tuple[int, str, Any, Cut]]:
        """Yield stage, path and attention of every block, and how it cuts its feature map.

        That is the map of the model's last call if ``called``, else that of the images it is for.
        """

    def facts(self, attention: Any) -> Facts:
        """Describe the host's own attention."""
        dim, heads = attention.qkv.in_features, attention.num_heads
        return Facts(dim=dim, num_heads=heads, options=projections_of(attention))

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as the model draws those of its own attention."""
        draw_truncated(linear)

    def heads(self, attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values of heads, ``[*, h, N, d]``."""
        return project_heads(attention, x)

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block."""
        return [self._place(model, *each) for each in self.cuts(model, called=False)]

    def _place(
        self, model: nn.Module, stage: int, path: str, attention: nn.Module, cut: Cut
    ) -> Place:
        if isinstance(attention, HostedWindows):
            place, like = attention.place, next(model.parameters())
            norms = norms_kept(place.site.post_projection, attention.mixer, like)
        else:
            own, norms = self.facts(attention), cosine_norms(positions_in(attention))
            site = Site(dim=own.dim, num_heads=own.num_heads)
            extras = () if norms is None else norms.extras
            place = Place(path=path, stage=stage, site=site, defaults=own.options, extras=extras)
        windows = None if self.shares(attention) else cut.windows
        return replace(
            place,
            site=replace(
                place.site,
                grid=cut.window,
                windows=1 if windows is None else math.prod(windows),
                window_grid=windows,
                post_projection=norms,
            ),
            needs_mask=MASKED if any(cut.shift) else None,
        )

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as the model's attention is."""
        for linear in mixer.projections:
            self.initialise(model, linear, place.path)
        before = model.get_submodule(place.path)
        cut = self._cut(model, place, called=False)
        hosted = self.hosted(mixer, place, before, cut=cut, shared_keys=self.shares(before))
        model.set_submodule(place.path, hosted.train(before.training))

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what attention makes of a call, windows as an axis: ``q [B, nW, h, N, d]``.

        Relative positions and the shift's mask are its bias. It needs to know how many windows an
        image has, from the mask or the block's call.
        """
        x, mask = [*named_call(attention, args, kwargs).values()][1:3]
        call_size: CallSize | None = getattr(attention, CALL_SIZE, None)
        if mask is not None:
            count = len(mask)
        elif call_size is not None and call_size.size is not None:
            window: Any = positions_in(attention).window_size
            count = math.prod(window_grid(call_size.size, window))
        else:
            raise UserError(
                "the number of windows per image of Swin's attention is not known; find its layers "
                "by keymix.hosts.layers.find_layers before the model is called"
            )
        if len(x) % count:
            raise UserError(f"{len(x)} windows do not make images of {count} windows each")
        x = x.reshape(-1, count, *x.shape[1:])
        return read_windows(attention, *self.heads(attention, x), mask)

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say how the windows of the model's last call lie."""
        cut = self._cut(model, place, called=True)
        return Layout(
            grid=cut.grid,
            key_grid=cut.grid,
            window=cut.window,
            windows=cut.windows,
            shift=cut.shift,
            pads_first=self.pads_first,
        )

    def _cut(self, model: nn.Module, place: Place, *, called: bool) -> Cut:
        found = {path: cut for _, path, _, cut in self.cuts(model, called=called)}
        return found[place.path]
