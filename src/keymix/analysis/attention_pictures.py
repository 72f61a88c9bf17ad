# SPDX-License-Identifier: Apache-2.0
"""What a model looks at, ready to be drawn: pictures or matrices of layers, for some queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.analysis.attention import AttentionMaps, Heads, attention_maps, on_image
from keymix.analysis.capture import (
    At,
    Layers,
    class_token_of,
    find_seats,
    select_layers,
)
from keymix.analysis.rollout import attention_rollout
from keymix.arguments import unwrapped
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.base import Encoded
from keymix.mixers.base import Stage

T = TypeVar("T")
FloatArray = npt.NDArray[np.float32]
Asking = Literal["cls", "mean"] | At
View = Literal["image", "matrix"]

MOST_LAYERS = 12
"""Layers that are shown at most where none are chosen."""


@dataclass(frozen=True, kw_only=True)
class LayerLook:
    """The maps of one layer."""

    number: int  # of the layer in the model's order, from 0
    path: str
    # where its tokens lie; None for matrices of a layer whose layout is not known
    layout: Layout | None
    keys: int  # keys that a row runs over, zeros outside its window among them
    # one over the even weight of each query's row: the keys that a query sees, M or those of its
    # window; all M of the mean over queries. Of matrices one, of every row
    even: tuple[int, ...]
    heads: int  # heads that were read, also where their mean is what is kept
    weights: FloatArray  # ``[image, head, query, H, W]``, or ``[image, head, N, M]`` as matrices
    # what each row gives to prefix keys, ``[image, head, query]``; None for matrices
    prefix: FloatArray | None


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a model looks at on some images."""

    queries: tuple[Asking, ...]
    layers: tuple[LayerLook, ...]
    missing: dict[str, str]  # path to reason of those without
    # ``[image, query, H, W]``, None if it was not asked for or cannot be
    rollout: FloatArray | None = None
    rolled: tuple[int, ...] = ()  # numbers of the layers that it multiplies
    of: int = 0
    no_rollout: str | None = None  # why it cannot be


def look(
    model: nn.Module,
    images: Float[Tensor, "B C H W"],
    *,
    layers: Layers | None = None,
    queries: Sequence[Asking] = (),
    stage: Stage = "softmax",
    heads: Heads = "mean",
    view: View = "image",
    rollout: bool = False,
) -> Look:
    """Read what a model looks at, for normalised images.

    A layer that was chosen must have a map; without `layers`, all that have one are shown, or
    `MOST_LAYERS` of them evenly. Without `queries` the class token is asked where it passes through
    the layers, else the mean over all patches. A view ``"image"`` has rows over the positions of
    their keys, windows put back; ``"matrix"`` whole maps, queries down and keys across. Rollout
    goes over the layers that were chosen, else over every layer that has a map.
    """
    paths = list(find_seats(model))
    missing: dict[str, str] = {}
    wanted = list(select_layers(model, layers))
    if layers is None:
        wanted = _with_maps(model, images[:1], missing)
    multiplied, wanted = wanted, wanted if layers is not None else shown_layers(wanted)
    asked = tuple(queries) or (_default_query(model, images[:1], wanted),)
    each: list[AttentionMaps] = [
        attention_maps(
            model, images, layers=wanted, queries=query, stage=stage, heads=heads, windows="image"
        )
        for query in ((None,) if view == "matrix" else asked)
    ]
    found = [
        _layer(
            paths.index(path),
            path,
            [maps[path] for maps in each],
            each[0].layouts.get(path),
            each[0].heads[path],
            (each[0].seen[path],) if view == "matrix" else _even(each, path, asked),
            view,
        )
        for path in wanted
    ]
    rolled, why = None, None
    if rollout:
        try:
            pictures = [
                attention_rollout(model, images, layers=multiplied, query=query).picture
                for query in asked
            ]
            rolled = _plain(torch.stack(pictures, 1))
        except UserError as error:
            why = str(error)
    return Look(
        queries=asked,
        layers=tuple(found),
        missing=missing,
        rollout=rolled,
        rolled=tuple(paths.index(path) for path in multiplied) if rolled is not None else (),
        of=len(paths),
        no_rollout=why,
    )


def _with_maps(model: nn.Module, image: Tensor, missing: dict[str, str]) -> list[str]:
    """Find the layers that have a map, and note why others have none."""
    found = list(attention_maps(model, image, queries=[0], missing=missing))
    if not found:
        path, why = next(iter(missing.items()))
        raise NoAttentionMap(f"no layer has a map: {path}: {why}")
    return found


def shown_layers(found: Sequence[T]) -> list[T]:
    """Choose `MOST_LAYERS` evenly, first and last included."""
    last = len(found) - 1
    if last < MOST_LAYERS:
        return list(found)
    return [found[round(i * last / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]


def _default_query(model: nn.Module, image: Tensor, paths: Sequence[str]) -> Asking:
    if isinstance(unwrapped(model), Encoded):  # whose class token is not decoded
        return "mean"
    layouts = attention_maps(model, image, layers=list(paths), queries=[0]).layouts
    try:
        for path in paths:
            class_token_of(model, layouts.get(path), path)
    except UserError:
        return "mean"
    return "cls"


def _even(each: Sequence[AttentionMaps], path: str, asked: Sequence[Asking]) -> tuple[int, ...]:
    """Return what even weights of each query are one over: the mean's are of all keys."""
    return tuple(
        maps[path].shape[-1] if query == "mean" else maps.seen[path]
        for maps, query in zip(each, asked, strict=True)
    )


def _layer(
    number: int,
    path: str,
    rows: Sequence[Tensor],
    layout: Layout | None,
    heads: int,
    even: tuple[int, ...],
    view: View,
) -> LayerLook:
    joined, prefix = torch.cat(list(rows), 2), None  # [B, h, queries, M]
    weights = joined
    if view == "image":
        if layout is None:
            raise UserError(f"it is unknown where the tokens of layer {path} lie on the image")
        weights = on_image(joined, layout)
        prefix = _plain(joined[..., : layout.prefix].sum(-1))
    return LayerLook(
        number=number,
        path=path,
        layout=layout,
        keys=joined.shape[-1],
        even=even,
        heads=heads,
        weights=_plain(weights),
        prefix=prefix,
    )


def _plain(t: Tensor) -> FloatArray:
    array: FloatArray = t.detach().float().cpu().numpy()
    return array
