# SPDX-License-Identifier: Apache-2.0
"""Defaults of a comparison that follow from the data, where nobody names a recipe.

The rule, applied to what is not given:

- *Size.* Images of up to 40 pixels (the shorter side) stay as they are, in patches of 4; up to 80
  they get 64 pixels and patches of 8; larger ones 128 pixels and patches of 16. So the model sees
  about 64 tokens, and the cost hardly grows. On a GPU images of 200 pixels or more get 224, and
  patches of 16, with DeiT-Ti. Nothing is stretched: the shorter side is resized and the centre
  kept. Half or twice the side where a budget asks for it (`keymix.compare.budget`).
- *Stem.* Patches are embedded by strided 3x3 convolutions.
- *Colour.* Grey images stay grey.
- *Flips.* Left and right are swapped, but not of digits, letters and signs. Nothing is turned
  upside down.
- *Test split.* Where cases stay whole and the data have no test split, a test split of fewer than
  ten cases becomes a quarter of all.
- *Mixers.* Where not even data is named, softmax attention and static keys, without the plain
  network: what two cores train in three minutes (docs/results/first-run.md). Else all that can sit
  in the model.
- *Updates.* Batches of 32, and as many epochs as make 1,000 updates, five at least; another
  default recipe keeps its epochs if they make 800. Warm-up is a tenth of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keymix.data.headers import Headers, read_headers
from keymix.data.kinds import IMAGE
from keymix.data.loading import CACHE_BYTES, CACHE_SIDE
from keymix.data.record import DataRecord
from keymix.data.specs import kind_of_spec
from keymix.train.recipe import Recipe, replace_path

FIRST = ("softmax", "static_key")
"""The mixers of a comparison that names nothing."""
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


def fit_to_images(recipe: Recipe, given: Collection[str], *, cuda: bool) -> Recipe:
    """Fit size, patches, colour and flips of a default recipe to the images.

    What was asked for, `given` by dotted keys, stays. `cuda` says whether there is a GPU.
    """
    recipe = _changed(recipe, {"augment.vertical_flip": False}, given)
    data = recipe.data
    if recipe.name != FITTED or kind_of_spec(data.spec) is not IMAGE:
        return recipe
    found = read_headers(data.spec)
    size, patch = sized(found, cuda=cuda)
    large = size == (LARGE, LARGE)
    if "data.image_size" in given and data.image_size is not None:
        asked = data.image_size
        size = asked if isinstance(asked, tuple) else (asked, asked)
        large, patch = False, _patch_of(min(size))
    changes: dict[str, Any] = {"data.image_size": size if size[0] != size[1] else size[0]}
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
    return _changed(recipe, changes, given)


def resized(recipe: Recipe, given: Collection[str], *, larger: bool) -> Recipe | None:
    """Return the recipe for 224 pixels, or for half the side; None where there is no such.

    Images that keep their proportions are halved where their shorter side is above 160 pixels.
    """
    side = recipe.data.image_size
    fitted = recipe.name == FITTED and recipe.model.name == HOST
    if "data.image_size" in given:
        return None
    if isinstance(side, tuple) and min(side) > 2 * _MIDDLE and not larger:
        return _changed(recipe, {"data.image_size": (side[0] // 2, side[1] // 2)}, given)
    if not fitted or not isinstance(side, int) or side <= _AS_THEY_ARE:
        return None
    if not larger:
        side //= 2
    elif min(read_headers(recipe.data.spec).size) >= _FROM_LARGE:
        side = LARGE
    else:
        return None
    padding = side // 8 if recipe.augment.crop_padding and side <= CACHE_SIDE else 0
    changes = {
        "data.image_size": side,
        "model.options.patch_size": _patch_of(side),
        "augment.crop_padding": padding,
    }
    return _changed(recipe, changes, given)


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


def is_symbols(spec: str, classes: Sequence[str]) -> bool:
    """Whether images show digits, letters or signs, which have no mirror image.

    By the name of the data, or where all classes are numbers or single letters.
    """
    named = any(word in spec.lower() for word in _NAMED_SYMBOLS)
    return named or (bool(classes) and all(_SYMBOLS.fullmatch(name) for name in classes))


def used(recipe: Recipe) -> str:
    """Say what a fitted recipe uses of the images, and what is thrown away; else nothing."""
    size = recipe.data.image_size
    if recipe.name != FITTED or kind_of_spec(recipe.data.spec) is not IMAGE or size is None:
        return ""
    found = read_headers(recipe.data.spec)
    size = size if isinstance(size, tuple) else (size, size)
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
    return _changed(recipe, {"data.test_fraction": CASES_SHARE}, given) if few and drawn else recipe


def fit_to_count(recipe: Recipe, given: Collection[str], *, train: int) -> Recipe:
    """Choose the epochs of a default recipe for a number of training inputs."""
    steps = updates(recipe, train) // recipe.schedule.epochs
    enough = recipe.name != FITTED and updates(recipe, train) >= FLOOR
    if "schedule.epochs" in given:
        return with_epochs(recipe, given, recipe.schedule.epochs)
    return recipe if enough else with_epochs(recipe, given, max(LEAST_EPOCHS, -(-AIM // steps)))


def with_epochs(recipe: Recipe, given: Collection[str], epochs: int) -> Recipe:
    """Return the recipe with other epochs; a warm-up that it has becomes a tenth of them."""
    warmup = round(WARMUP * epochs, 3) if recipe.schedule.warmup_epochs else 0.0
    changes = {"schedule.epochs": epochs, "schedule.warmup_epochs": warmup}
    return _changed(recipe, changes, {*given} - {"schedule.epochs"})


def updates(recipe: Recipe, train: int) -> int:
    """Return the updates of a run on a number of training inputs."""
    steps = math.ceil(train / recipe.data.batch_size / recipe.optim.accumulate)
    return recipe.schedule.epochs * steps


def _changed(recipe: Recipe, changes: Mapping[str, Any], given: Collection[str]) -> Recipe:
    """Return a recipe with changes by dotted key, but for what was asked for."""
    return replace_path(recipe, {key: each for key, each in changes.items() if key not in given})
