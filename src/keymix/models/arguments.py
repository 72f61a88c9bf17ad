# SPDX-License-Identifier: Apache-2.0
"""Arguments of models, checked before a constructor stumbles over them or takes them unsaid.

What an argument takes is read from the constructors' annotations, timm's included; which numbers
make sense and what has one value per stage is checked by name, for all families alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

from keymix.arguments import accepted, leaves, of_kind, words
from keymix.errors import UserError

Values = Mapping[str, Any]

_RANGES: tuple[tuple[frozenset[str], str, Callable[[float], bool]], ...] = (
    (
        frozenset(
            {
                *("img_size", "in_chans", "patch_size", "window_size", "merging", "kv_stride"),
                *("depth", "depths", "depth_token_only", "dims", "embed_dim", "embed_dims"),
                *("num_heads", "head_dim", "class_heads", "class_head_dim", "time_steps"),
                *("decoder_width", "decoder_widths", "stem_depths", "width", "stem_stride"),
                *("out_channels", "proposals", "samples", "detections", "backbone_size"),
            }
        ),
        " of 1 or more",
        lambda number: number >= 1,
    ),
    (
        frozenset({"num_classes", "reg_tokens", "last_blocks", "stem", "embeds", "out_index"}),
        " of 0 or more",
        lambda number: number >= 0,
    ),
    (
        frozenset({"mlp_ratio", "mlp_ratio_token_only", "residual_scale", "norm_eps"}),
        " above 0",
        lambda number: number > 0,
    ),
)
_MOST: tuple[tuple[frozenset[str], int, int], ...] = (
    (frozenset({"img_size"}), 4_096, 2**20),
    (frozenset({"num_classes"}), 2**20, 10**8),
    (frozenset({"time_steps"}), 64, 1_024),
    (
        frozenset({"depth", "depths", "depth_token_only", "last_blocks", "stem_depths"}),
        64,
        1_024,
    ),
    (
        frozenset(
            {
                *("in_chans", "patch_size", "window_size", "merging", "kv_stride", "reg_tokens"),
                *("dims", "embed_dim", "embed_dims", "mlp_ratio", "head_dim"),
                *("decoder_width", "decoder_widths"),
                *("num_heads", "class_heads", "class_head_dim", "mlp_ratio_token_only", "width"),
            }
        ),
        4_096,
        2**16,
    ),
)
"""Names, above which number a model is first built without memory, and the largest number."""
_SIDES = ("img_size", "patch_size", "window_size")  # height and width will do for all of timm's
_AT_MOST = {"last_blocks": "depth"}  # an argument to another that it cannot be above

_STAGED = ("dims", "embed_dims", "num_heads", "embeds", "kv_stride", "merging")
_STAGED_IF_LISTS = ("head_dim", "mlp_ratio", "layer_scale_init_values", "res_scale_init_values")


def arguments_of(build: type) -> dict[str, tuple[Any, Any]]:
    """Return default and annotation of what a family's class takes by name, timm's included."""
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: (parameter.default, hint)
        for name, (parameter, hint) in accepted(build).items()
        if parameter.kind not in unnamed
    }


def check_most(name: str, value: Any) -> bool:
    """Refuse numbers that no model has; say whether one is so large that memory may not hold it."""
    numbers: list[Any] = [leaf for leaf in leaves(value) if isinstance(leaf, Real)]
    for names, large, most in _MOST:
        if name in names and numbers:
            if max(numbers) > most:
                raise UserError(f"{name}={value!r} must be at most {most:,}")
            return bool(max(numbers) > large)
    return False


def check_value(name: str, value: Any, hint: Any, *, lists: bool = False) -> None:
    """Refuse a value of another kind than annotated, or a number out of the argument's range.

    With ``lists`` a list will do too where the annotation names one value.
    """
    values = leaves(value)
    fits = of_kind(value, hint)
    if lists and isinstance(value, tuple | list):
        fits = fits or all(of_kind(leaf, hint) for leaf in values)
    numbers: list[Any] = [leaf for leaf in values if isinstance(leaf, Real)]
    which = ""
    for names, text, holds in _RANGES:
        if name in names:
            which = text
            fits = fits and all(holds(number) for number in numbers)
    if not fits or not values:
        raise UserError(f"{name}={value!r} must be {words(hint, which)}")
    check_most(name, value)


def check_arguments(model: str, build: type, row: Values, given: Values) -> None:
    """Refuse arguments that a family cannot take, by kind, range and number of stages.

    ``model`` is the name for the message, ``row`` the variant's own arguments. What the family's
    class does not take is left to its constructor, but for mixers, which every family may be asked
    to take.
    """
    known = arguments_of(build)
    for name in ("mixer", "mixer_options"):
        if name not in known and given.get(name) is not None:
            raise UserError(
                f"model {model!r} has no attention to replace: leave {name}={given[name]!r} out, "
                "or take a model with attention (`keymix list models` shows the mixer of each)"
            )
    merged = {name: default for name, (default, _) in known.items()} | dict(row) | dict(given)
    several = "depths" in known
    try:
        for name, value in given.items():
            if name in known and value is not None:
                lists = name in _SIDES or (several and name in _STAGED_IF_LISTS)
                check_value(name, value, known[name][1], lists=lists)
        for name, other in _AT_MOST.items():
            if given.get(name) is not None and given[name] > merged[other]:
                raise UserError(f"{name}={given[name]} must be at most {other}={merged[other]}")
        if several:
            _check_stages(merged, given)
    except UserError as error:
        raise UserError(f"model {model!r}: {error}") from None


def _check_stages(values: Values, given: Collection[str]) -> None:
    """Refuse lists that have not one value per stage, of which ``depths`` has as many."""
    depths = values["depths"]
    names = [*_STAGED, *(name for name in _STAGED_IF_LISTS if name in given)]
    for name in names:
        value = values.get(name)
        if not isinstance(value, tuple | list):
            continue
        short = name == "merging"  # nothing is merged before the first stage
        if len(value) == len(depths) - short:
            continue
        if name in given:
            what = f"{len(depths) - short} values, one for each of the {len(depths)} stages of "
            first = " but the first" if short else ""
            raise UserError(f"{name}={value!r} must have {what}depths={depths!r}{first}")
        raise UserError(
            f"depths={depths!r} must have {len(value) + short} values, one per stage as in "
            f"{name}={value!r}; or give {name} too"
        )


OF_WEIGHTS = (
    "pretrained",
    "checkpoint_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "cache_dir",
)
"""Arguments by which timm looks for weights; in a record of a model they are a stranger's."""


def without_weights(arguments: Any) -> Any:
    """Return arguments, those of a part included, without those by which timm looks for weights."""
    if not isinstance(arguments, Mapping):
        return arguments
    return {k: without_weights(v) for k, v in arguments.items() if k not in OF_WEIGHTS}


def refuse_weights(stored: Any) -> None:
    """Refuse arguments from a file, those of a part included, that name weights elsewhere."""
    if isinstance(stored, Mapping):
        for name, value in stored.items():
            if name in OF_WEIGHTS:
                raise UserError(f"the stored argument {name}={value!r} asks for other weights")
            refuse_weights(value)
