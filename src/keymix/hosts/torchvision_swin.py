# SPDX-License-Identifier: Apache-2.0
"""Adapter to torchvision's Swin: attention sits at ``features.<s>.<i>.attn``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
)

from keymix.errors import UserError
from keymix.hosts.base import Host, Place
from keymix.hosts.conv_grid import patches_of, said_size, watch, watched
from keymix.hosts.plain import UNKNOWN, patched
from keymix.hosts.reading import Layout, Reading
from keymix.hosts.shifted_windows import Cut, HostedShiftedWindows
from keymix.hosts.timm_heads import own_weights
from keymix.hosts.windows import MASKED
from keymix.mixers.base import Grid, Site, TokenMixer

PUBLISHED = (224, 224)  # what torchvision's weights of Swin-T, -S and -B are cropped to


class TorchvisionSwin(Host):
    """torchvision's SwinTransformer, version 1. A mixer sees one window; windows are an axis.

    The table of relative positions stays with the host. Where windows are shifted the mixer is
    handed a mask.

    The model takes images of any size and stores none, but keys a window need the number of
    windows. It is that of ``model.image_size``, a side or (height, width) in pixels, if the model
    was given one; else that of its last call, if :meth:`listen` heard it; else of 224x224. After
    another ``image_size``, ``find_host(model).tell(model)`` lays keys for it that were built with
    ``resize="interpolate"``.

    Swin V2 is refused: its attention compares directions, by a scale that it learns.

    Args:
        shared_keys: Whether learned keys serve all windows of a block, and so images of any size;
            False for keys a window; None for what the model has (keys a window at first).
    """

    name = "torchvision SwinTransformer"

    def __init__(self, *, shared_keys: bool | None = None) -> None:
        self.shared_keys = shared_keys

    def serves(self, model: nn.Module) -> bool:
        """Whether it is torchvision's class."""
        return isinstance(model, SwinTransformer)

    def places(self, model: nn.Module) -> list[Place]:
        """One place a block; its stage is that of the feature map.

        Raises:
            UserError: If it is no such model, or its attention is not that of Swin V1.
        """
        if not isinstance(model, SwinTransformer):
            raise UserError(f"{type(model).__name__} is not torchvision's SwinTransformer")
        grids = _grids(model, said=True)
        places = []
        for stage, path, attention in _attentions(model):
            cut = _cut(attention, grids[stage])
            places.append(
                Place(
                    path=path,
                    stage=stage,
                    site=self._site(attention, cut),
                    defaults=_defaults(attention),
                    needs_mask=MASKED if any(cut.shift) else None,
                )
            )
        return places

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as torchvision's Swin draws its own."""
        for linear in mixer.projections:
            nn.init.trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        before: Any = model.get_submodule(place.path)
        hosted = HostedShiftedWindows(
            mixer,
            place,
            table=before.relative_position_bias_table,
            one_table=False,
            windows=_cut(before, _grids(model, said=True)[place.stage]).windows,
            shift=_sides(before)[1],
            shared_keys=self._shares(before),
        )
        model.set_submodule(place.path, hosted.train(before.training))
        self.listen(model)

    def listen(self, model: nn.Module) -> None:
        """Hear the feature map of the model's calls, from now on."""
        assert isinstance(model, SwinTransformer)
        watch(model.features[0][0])

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, windows, h, N, d]``.

        The bias is relative positions and torchvision's mask, ``[(windows,) h, N, N]``.
        """
        own: Any = _checked("attn", attention)
        x: Tensor = args[0] if args else kwargs["x"]
        cut = _cut(own, (x.shape[1], x.shape[2]))
        q, k, v = (
            t.reshape(*t.shape[:-1], own.num_heads, -1).transpose(-3, -2)
            for t in own.qkv(cut.apart(x)).chunk(3, -1)
        )
        bias, mask = own.get_relative_position_bias()[0], cut.mask(x, -100.0)
        return Reading(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5,
            bias=bias if mask is None else bias + mask[:, None],
        )

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections; ``qkv`` is split."""
        own: Any = _checked("attn", attention)
        return own_weights(own)

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of a place lay in the model's last call."""
        assert isinstance(model, SwinTransformer)
        cut = _cut(model.get_submodule(place.path), _grids(model, said=False)[place.stage])
        return Layout(
            grid=cut.grid,
            key_grid=cut.grid,
            window=cut.window,
            windows=cut.windows,
            shift=cut.shift,
            pads_first=True,
        )

    def _shares(self, attention: Any) -> bool:
        if self.shared_keys is not None:
            return self.shared_keys
        return isinstance(attention, HostedShiftedWindows) and attention.shared_keys

    def _site(self, attention: Any, cut: Cut) -> Site:
        windows = None if self._shares(attention) else cut.windows
        number = 1 if windows is None else windows[0] * windows[1]
        if isinstance(attention, HostedShiftedWindows):
            return replace(attention.place.site, windows=number, window_grid=windows)
        return Site(
            dim=attention.qkv.in_features,
            num_heads=attention.num_heads,
            grid=cut.window,
            windows=number,
            window_grid=windows,
        )


def _attentions(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield stage, path and module of every attention; stages alternate with downsampling."""
    features: Any = model.features
    for s in range(1, len(features), 2):
        for i, block in enumerate(features[s]):
            path = f"features.{s}.{i}.attn"
            yield s // 2, path, _checked(path, getattr(block, "attn", None))


def _checked(path: str, attention: Any) -> nn.Module:
    """Refuse what is not Swin V1's attention."""
    name = type(attention).__name__
    if type(attention) in (ShiftedWindowAttention, HostedShiftedWindows):
        assert isinstance(attention, nn.Module)
        if patched(attention):
            raise UserError(f"the forward of {path} ({name}) was replaced: {UNKNOWN}")
        return attention
    if isinstance(attention, ShiftedWindowAttentionV2):
        raise UserError(
            f"{path} is torchvision's {name}: Swin V2 compares queries and keys by their cosine, "
            "with a scale that it learns and positions from a network, and no mixer in its place "
            "would; take a Swin V1 (swin_t, swin_s, swin_b)"
        )
    raise UserError(
        f"{path} is {name}, not torchvision's ShiftedWindowAttention, so what a mixer in its place "
        "would lose is not known"
    )


def _sides(attention: Any) -> tuple[Grid, Grid]:
    """Return window and shift of a block."""
    if isinstance(attention, HostedShiftedWindows):
        return attention.window_size, attention.shift
    window, shift = attention.window_size, attention.shift_size
    return (window[0], window[1]), (shift[0], shift[1])


def _cut(attention: nn.Module, grid: Grid) -> Cut:
    return Cut.of(grid, *_sides(attention))


def _grids(model: SwinTransformer, *, said: bool) -> list[Grid]:
    """Return the feature map of every stage.

    Args:
        model: The model.
        said: Whether its attribute ``image_size`` comes before the last call.
    """
    conv = model.features[0][0]
    call, size = watched(conv), said_size(model)
    grid = None if call is None else call.grid
    if grid is None or (said and size is not None):
        grid = patches_of(conv, size or PUBLISHED)
    grids = [grid]
    for _ in range(3, len(model.features), 2):
        grids.append((-(-grids[-1][0] // 2), -(-grids[-1][1] // 2)))
    return grids


def _defaults(attention: Any) -> Mapping[str, Any]:
    if isinstance(attention, HostedShiftedWindows):
        return attention.place.defaults
    return {
        "qkv_bias": attention.qkv.bias is not None,
        "proj_bias": attention.proj.bias is not None,
        "attn_drop": attention.attention_dropout,
        "proj_drop": attention.dropout,
    }


HOST = TorchvisionSwin()
