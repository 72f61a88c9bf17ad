# SPDX-License-Identifier: Apache-2.0
"""What the trained models attend to: maps of the same test images, and how alike layers are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keymix.compare.worker import FAILURES, reason
from keymix.errors import NoAttentionMap
from keymix.report.pictures import image_uri

if TYPE_CHECKING:
    from torch import Tensor, nn

    from keymix.data.dataset import ImageData, Split

PICTURES = 4
COLLAPSE_IMAGES = 64


def spread_out(split: Split, number: int) -> list[int]:
    """Return indices of images evenly spread over a split, of different classes while there are.

    The choice is fixed by the data alone.
    """
    labels = split.labels.tolist()
    classes = sorted(set(labels))
    step = max(1, len(classes) // number)
    chosen = [labels.index(c) for c in classes[::step][:number]]
    spare = (i for i in range(len(labels)) if i not in chosen)
    while len(chosen) < min(number, len(labels)):
        chosen.append(next(spare))
    return chosen


def evenly(split: Split, number: int) -> list[int]:
    """Return indices of images at equal distances over a split."""
    n = len(split)
    return sorted({i * n // min(number, n) for i in range(min(number, n))})


def normalised(data: ImageData, split: Split, chosen: Sequence[int]) -> Tensor:
    """Read images as the models see them in evaluation, ``[B, C, H, W]``."""
    import torch

    pixels = torch.stack([split.read(i) for i in chosen]).double() / 255
    mean = torch.tensor(data.mean, dtype=torch.float64).view(1, -1, 1, 1)
    std = torch.tensor(data.std, dtype=torch.float64).view(1, -1, 1, 1)
    return ((pixels - mean) / std).float()


def attention(models: Mapping[str, nn.Module], data: ImageData, *, pooling: str) -> dict[str, Any]:
    """Record where every mixer's trained model looks on the same few test images.

    The map is the softmax stage, averaged over heads: the row of the class token where the model
    reads out by it, else the mean of the rows of all patch tokens. Prefix keys are left out.

    Args:
        models: Label to trained model.
        data: The images.
        pooling: How the models read out, timm's word.

    Returns:
        ``images`` (PNG, class, origin), ``layers``, ``query``, ``maps`` (label to image to layer
        to rows of weights), ``missing`` (label to reason).
    """
    from keymix.analysis.attention import attention_maps
    from keymix.hosts import find_mixers

    chosen = spread_out(data.test, PICTURES)
    images = normalised(data, data.test, chosen)
    depth = max((len(find_mixers(model)) for model in models.values()), default=0)
    layers = sorted({max(0, depth // 2 - 1), depth - 1})
    by_class_token = pooling == "token"
    maps: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for label, model in models.items():
        mixers = find_mixers(model)
        try:
            rows = attention_maps(
                model, images, layers=layers, queries=[0] if by_class_token else None
            )
        except FAILURES as error:  # UserError included
            missing[label] = _why(error)
            continue
        pictures = [_on_grid(rows[path], mixers[path], by_class_token) for path in rows]
        maps[label] = [[picture[i] for picture in pictures] for i in range(len(chosen))]
    query = (
        "Attention of the class token to the patches"
        if by_class_token
        else "Attention that the patches receive, averaged over all patch tokens"
    )
    return {
        "images": [
            {
                "png": image_uri(data.test.read(i).numpy()),
                "label": data.classes[int(data.test.labels[i])],
                "id": data.test.ids(i),
            }
            for i in chosen
        ],
        "layers": [f"Block {i + 1} of {depth}" for i in layers],
        "query": f"{query}, softmax stage, averaged over heads, weights of the last epoch.",
        "maps": maps,
        "missing": missing,
    }


def _on_grid(rows: Tensor, mixer: Any, by_class_token: bool) -> list[list[list[float]]]:
    """Turn maps ``[B, h, Q, M]`` into weights on the key grid, one picture an image."""
    site = mixer.site
    prefix = site.num_prefix_tokens
    picked = rows.float().mean(1)
    picked = picked[:, 0] if by_class_token else picked[:, prefix:].mean(1)
    height, width = site.key_grid or site.grid
    weights = picked[:, prefix:].reshape(-1, height, width)
    return [[[round(v, 6) for v in row] for row in image] for image in weights.tolist()]


def collapse(models: Mapping[str, nn.Module], data: ImageData, *, seed: int) -> dict[str, Any]:
    """Record how alike the maps of neighbouring blocks are (DeepViT, Eq. 2).

    Args:
        models: Label to trained model.
        data: The images.
        seed: Whose weights they are, for the record.
    """
    from keymix.analysis.collapse import map_similarity

    images = normalised(data, data.test, evenly(data.test, COLLAPSE_IMAGES))
    similarity: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    pairs: list[str] = []
    for label, model in models.items():
        try:
            found = map_similarity(model, images).adjacent
        except FAILURES as error:  # UserError included
            missing[label] = _why(error)
            continue
        values = [pair.mean for pair in found]
        if any(math.isnan(v) for v in values):
            missing[label] = "a block's map is zero throughout"
            continue
        similarity[label] = [round(v, 6) for v in values]
        if len(values) > len(pairs):
            pairs = [f"{i + 1}–{i + 2}" for i in range(len(values))]
    return {
        "pairs": pairs,
        "images": len(images),
        "seed": seed,
        "similarity": similarity,
        "missing": missing,
    }


def _why(error: BaseException) -> str:
    return reason(error.__cause__ if isinstance(error.__cause__, NoAttentionMap) else error)
