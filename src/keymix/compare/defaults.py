# SPDX-License-Identifier: Apache-2.0
"""Defaults of a comparison that follow from the data, where nobody names a recipe.

The rule, applied to what is not given:

- *Size.* Images of up to 40 pixels (the shorter side) stay as they are, in patches of 4; up to 80
  they get 64 pixels and patches of 8; larger ones 128 pixels and patches of 16. So the model sees
  about 64 tokens, and the cost hardly grows. Images of 200 pixels or more get 224, and patches of
  16, where ``--minutes`` is four times the default's time; on a GPU always, with DeiT-Ti. Nothing
  is stretched: the shorter side is resized and the centre kept.
- *Stem.* Patches are embedded by strided 3x3 convolutions.
- *Colour.* Grey images stay grey.
- *Flips.* Left and right are swapped, but not of digits, letters and signs. Nothing is turned
  upside down.
- *Test split.* Where cases stay whole and the data have no test split, a test split of fewer than
  ten cases becomes a quarter of all.
- *Updates.* Batches of 32, and as many epochs as make 1,000 updates, five at least; another
  default recipe keeps its epochs if they make 800. Warm-up is a tenth of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keymix.data.headers import Headers, read_headers
from keymix.data.kinds import IMAGE
from keymix.data.loading import CACHE_BYTES, CACHE_SIDE
from keymix.data.record import DataRecord
from keymix.data.specs import kind_of_spec
from keymix.train.recipe import Recipe, replace_path

FITTED = "small_images_vit"
"""The recipe whose size, patches and flips are fitted to the images."""
HOST, _PATCH = "vit_micro_conv_p4_32", 4
"""Its model, and the side of its patches, pixels."""
LARGE_HOST, LARGE = "deit_tiny_patch16_224", 224
AIM, FLOOR = 1_000, 800
"""Updates that a default training makes, and with which a recipe's own epochs are enough."""
LEAST_EPOCHS = 5
WARMUP = 0.1
"""Share of the updates."""
LEAST_CASES, CASES_SHARE = 10, 0.25
"""Cases below which a test split is too small, and the share of all that it gets then."""
_AS_THEY_ARE, _MIDDLE, _FROM_LARGE = 40, 80, 200  # pixels of the shorter side
_TOKENS = 8  # a side
_SYMBOLS = re.compile(r"[0-9]{1,3}|[A-Za-z]")
_NAMED_SYMBOLS = ("digit", "mnist", "svhn", "sign", "letter", "character", "text", "gtsrb")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A recipe fitted to data, and in words what is used of the data."""

    recipe: Recipe
    used: str = ""


def fit_to_images(recipe: Recipe, given: Collection[str], *, cuda: bool) -> Fitted:
    """Fit size, patches, colour and flips of a default recipe to the images.

    What was asked for, `given` by dotted keys, stays. `cuda` says whether there is a GPU.
    """
    if recipe.augment.vertical_flip and "augment.vertical_flip" not in given:
        recipe = replace_path(recipe, {"augment.vertical_flip": False})
    data = recipe.data
    if recipe.name != FITTED or kind_of_spec(data.spec) is not IMAGE:
        return Fitted(recipe=recipe)
    found = read_headers(data.spec, cell_mib=data.cell_mib)
    size, patch = sized(found, cuda=cuda)
    large = size == (LARGE, LARGE)
    if "data.image_size" in given and data.image_size is not None:
        asked = data.image_size
        size = asked if isinstance(asked, tuple) else (asked, asked)
        large, patch = False, _patch_of(min(size))
    changes: dict[str, Any] = {"data.image_size": _plain(size)}
    if found.grey:
        changes["data.channels"] = 1
    if recipe.model.name == HOST and large:
        changes["model.name"] = LARGE_HOST
    elif recipe.model.name == HOST and patch != _PATCH:
        changes["model.options.patch_size"] = patch
    side = min(size)
    images = min(found.count, data.limit or found.count)
    in_memory = side <= CACHE_SIDE and images * 3 * side**2 < CACHE_BYTES
    changes["augment.crop_padding"] = max(1, side // 8) if in_memory else 0
    if is_symbols(data.spec, found.classes):
        changes["augment.flip"] = False
    kept = {key: value for key, value in changes.items() if key not in given}
    return Fitted(recipe=replace_path(recipe, kept), used=_used(found, size))


def more_pixels(recipe: Recipe, given: Collection[str]) -> dict[str, int]:
    """Return the size for a larger budget, to override the default; empty where there is none."""
    data = recipe.data
    fitted = recipe.name == FITTED and kind_of_spec(data.spec) is IMAGE
    if not fitted or {"data.image_size", "model.name"} & {*given}:
        return {}
    shorter = min(read_headers(data.spec, cell_mib=data.cell_mib).size)
    return {"data.image_size": LARGE} if shorter >= _FROM_LARGE else {}


def sized(found: Headers, *, cuda: bool) -> tuple[tuple[int, int], int]:
    """Return height and width that images get, pixels, and the side of a patch."""
    height, width = found.size
    shorter = min(height, width)
    if shorter <= _AS_THEY_ARE:
        step = 4
        if found.same:
            return (max(step, height - height % step), max(step, width - width % step)), step
        side = max(step, shorter - shorter % step)
        return (side, side), step
    if cuda and shorter >= _FROM_LARGE:
        return (LARGE, LARGE), 16
    side = 64 if shorter <= _MIDDLE else 128
    return (side, side), side // _TOKENS


def _patch_of(side: int) -> int:
    """Return the patch size that makes about 8 x 8 tokens: 4, 8 or 16 pixels."""
    sides = [patch for patch in (4, 8, 16) if side % patch == 0] or [4]
    return min(sides, key=lambda patch: abs(math.log(side / patch / _TOKENS)))


def _plain(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size


def is_symbols(spec: str, classes: Sequence[str]) -> bool:
    """Whether images show digits, letters or signs, which have no mirror image.

    By the name of the data, or where all classes are numbers or single letters.
    """
    named = any(word in spec.lower() for word in _NAMED_SYMBOLS)
    return named or (bool(classes) and all(_SYMBOLS.fullmatch(name) for name in classes))


def _used(found: Headers, size: tuple[int, int]) -> str:
    """Say what is used of the images, and what is thrown away."""
    height, width = found.size
    if found.same and (height, width) == size:
        return f"{found.text}, as they are"
    scale = max(size[0] / height, size[1] / width)
    kept = size[0] * size[1] / (scale**2 * height * width)
    how = f"resized to {size[1]}x{size[0]}" if scale != 1 else f"cropped to {size[1]}x{size[0]}"
    lost = f", {100 * (1 - kept):.0f} % of their area cut off" if kept < 0.995 else ""
    return f"{found.text}, {how}{lost}"


def with_enough_cases(recipe: Recipe, given: Collection[str], found: DataRecord) -> Recipe:
    """Give the test split more cases, where it was split off from train and has too few."""
    few = found.cases is not None and found.cases["test"] < LEAST_CASES
    drawn = found.test_fraction is not None and found.test_fraction < CASES_SHARE
    if not (few and drawn) or "data.test_fraction" in given:
        return recipe
    return replace_path(recipe, {"data.test_fraction": CASES_SHARE})


def fit_to_count(
    recipe: Recipe, given: Collection[str], *, train: int, before: Recipe | None
) -> Recipe:
    """Choose the epochs for a number of training inputs, unless they are `given`.

    The choices of `before`, the recipe of the comparison that the folder holds, stay.
    """
    if before is not None and before.data.spec == recipe.data.spec and before.name == recipe.name:
        kept = {
            "schedule.epochs": before.schedule.epochs,
            "schedule.warmup_epochs": before.schedule.warmup_epochs,
        }
        return _without(recipe, kept, given)
    changes: dict[str, Any] = {}
    steps = math.ceil(train / recipe.data.batch_size / recipe.optim.accumulate)
    epochs = recipe.schedule.epochs
    if recipe.name == FITTED or epochs * steps < FLOOR:
        changes["schedule.epochs"] = max(LEAST_EPOCHS, math.ceil(AIM / steps))
    if "schedule.epochs" in given or "schedule.epochs" in changes:
        epochs = epochs if "schedule.epochs" in given else changes["schedule.epochs"]
        if recipe.schedule.warmup_epochs:
            changes["schedule.warmup_epochs"] = round(WARMUP * epochs, 3)
    return _without(recipe, changes, given)


def _without(recipe: Recipe, changes: Mapping[str, Any], given: Collection[str]) -> Recipe:
    return replace_path(recipe, {key: each for key, each in changes.items() if key not in given})


def updates(recipe: Recipe, train: int) -> int:
    """Return the updates of a run on a number of training inputs."""
    steps = math.ceil(train / recipe.data.batch_size / recipe.optim.accumulate)
    return recipe.schedule.epochs * steps


def kept_choices(recipe: Recipe, before: Recipe | None, given: Collection[str]) -> Recipe | None:
    """Return the recipe with what the first call chose for the folder; None where there is none."""
    if before is None or before.name != recipe.name or before.data.spec != recipe.data.spec:
        return None
    chosen = {
        "data.image_size": before.data.image_size,
        "data.channels": before.data.channels,
        "model.name": before.model.name,
        "augment.crop_padding": before.augment.crop_padding,
        "augment.flip": before.augment.flip,
        "augment.vertical_flip": before.augment.vertical_flip,
        "data.test_fraction": before.data.test_fraction,
    }
    fitted = _without(recipe, chosen, given)
    if "model.name" in given:
        return fitted
    options = {**before.model.options, **recipe.model.options}
    return replace(fitted, model=replace(fitted.model, options=options))
