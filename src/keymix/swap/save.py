# SPDX-License-Identifier: Apache-2.0
"""A swapped model as one file: all of its weights, and what was put where."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from keymix._version import __version__
from keymix.arguments import module_of
from keymix.errors import UserError, WriteError
from keymix.hosts.base import Plan, install, plans_in
from keymix.layers.folding import refuse_folded
from keymix.models.family import MixerModel
from keymix.models.hosted import record_mixers
from keymix.models.preprocessing import describe, described
from keymix.swap.plans import shadow

# Hugging Face's methods that write weights and a configuration which knows of no mixer
LOSING = ("save_pretrained", "push_to_hub")


class Refusing:
    """Stands in for a model's method that would lose a swap, for as long as the swap is there.

    An attribute of the model itself: it is copied and pickled with the model, and goes where the
    model's attributes are put back. The reference to the model, or the part of one whose method it
    is, is weak, so that nothing keeps its memory.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        self.model, self.method = weakref.ref(model), method

    def __reduce__(self) -> tuple[type[Refusing], tuple[nn.Module | None, str]]:
        return Refusing, (self.model(), self.method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the model's class, unless it would lose mixers in the model."""
        model = self.model()
        if model is None:
            raise UserError(f"the model of this {self.method} is gone")
        plans = plans_in(model)
        if plans:
            raise UserError(
                f"{type(model).__name__}.{self.method} would lose the mixer "
                f"{plans[0].mixer!r} at {plans[0].path}: from_pretrained builds the model without "
                "it. Save with keymix.swap.save_swapped(model, file), load with load_swapped"
            )
        return getattr(type(model), self.method)(model, *args, **kwargs)


def keep_from_loss(model: nn.Module) -> None:
    """Let no library save a swapped model as if nothing had been swapped.

    Hugging Face's methods refuse from now on. timm's functions that save one of keymix's models
    record its mixers; those that save a model of timm's own write a file that timm refuses to
    load.
    """
    for module in model.modules():
        for method in LOSING:
            if callable(getattr(type(module), method, None)) and plans_in(module):
                setattr(module, method, Refusing(module, method))
    if isinstance(model, MixerModel):
        record_mixers(model)


FORMAT = "keymix_swap"


def save_swapped(model: nn.Module, path: str | Path) -> None:
    """Write a swapped model's weights and, next to them, what was put where.

    One safetensors file: all tensors of ``model.state_dict()``, and in its metadata, under
    ``"keymix_swap"``, JSON of the mixers, their options and their places, and of what the model's
    ``pretrained_cfg`` says of images and classes. Which weights train is not written.

    Args:
        model: A model after one or more swaps.
        path: Where to; a file there is replaced, at once.

    Raises:
        UserError: If nothing was swapped in this model, or it is folded for inference.
        WriteError: If the file cannot be written.
    """
    model = module_of(model)
    refuse_folded(model, "save_swapped")
    plans = plans_in(model)
    if not plans:
        raise UserError("nothing was swapped in this model; save its state_dict() as any other")
    record = {
        "version": __version__,
        "model": _kind(model),
        "swaps": [asdict(plan) for plan in plans],
        "shown": described(model),
    }
    path, part = Path(path), Path(f"{path}.part")
    try:
        metadata = {FORMAT: json.dumps(record, sort_keys=True)}
        save_file(_apart(model.state_dict()), part, metadata=metadata)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise WriteError(f"{path}: cannot be written: {error}") from error


def load_swapped(base: nn.Module | Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """Make of a model without swaps the one that was saved.

    Args:
        base: The model as it was built before its swaps, or what builds it: the same
            architecture, classes and image size; its weights do not matter. It is changed in
            place, and is what it was after a refusal.
        path: What :func:`save_swapped` wrote.

    Returns:
        The model, on the device, in the type and mode of ``base``.

    Raises:
        UserError: If the file is none of these, or does not fit the model; it names the first
            tensor or layer that does not.
    """
    record, state = _read(Path(path))
    model = base if isinstance(base, nn.Module) else base()
    model = module_of(model)
    if _kind(model) != record["model"]:
        raise UserError(f"{path} holds a swapped {record['model']}, not {_kind(model)}")
    plans = [Plan(**swap) for swap in record["swaps"]]
    copy = shadow(model)
    install(copy, plans)
    _check(copy.state_dict(), state, path)
    install(model, plans)
    keep_from_loss(model)
    model.load_state_dict(state)
    describe(model, record["shown"])
    return model


def _kind(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _apart(state: dict[str, Any]) -> dict[str, Tensor]:
    """Copy what shares memory with another tensor: the format holds each alone."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in state.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return apart


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            stored = (file.metadata() or {}).get(FORMAT)
            if stored is None:
                raise UserError(f"{path} says nothing of a swap; save_swapped writes such files")
            record = _checked(stored, path)
            names = list(file.keys())
            return record, {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _checked(stored: str, path: Path) -> dict[str, Any]:
    """Return the record of a file's swaps; refuse one that save_swapped cannot have written."""
    try:
        record = json.loads(stored)
    except (ValueError, RecursionError):
        record = None
    swaps = record.get("swaps") if isinstance(record, dict) else None
    fits = isinstance(swaps, list) and swaps and isinstance(record.get("model"), str)
    if (
        not fits
        or not isinstance(record.get("shown"), dict)
        or not all(_is_plan(swap) for swap in swaps or ())
    ):
        raise UserError(f"{path}: what it says of its swaps is broken; save the model again")
    whole: dict[str, Any] = record
    return whole


def _is_plan(swap: object) -> bool:
    kinds = {"path": str, "mixer": str, "options": dict}
    return (
        isinstance(swap, dict)
        and swap.keys() == kinds.keys()
        and all(isinstance(swap[name], kind) for name, kind in kinds.items())
    )


def _check(here: dict[str, Any], state: dict[str, Tensor], path: str | Path) -> None:
    for name in sorted(here.keys() | state.keys()):
        if name not in state:
            raise UserError(f"{path} does not hold {name} of this model")
        if name not in here:
            raise UserError(f"{path} holds {name}, for which this model has no place")
        mine, theirs = tuple(here[name].shape), tuple(state[name].shape)
        if mine != theirs:
            raise UserError(f"{path}: {name} is {theirs} there and {mine} in this model")
