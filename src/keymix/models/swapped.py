# SPDX-License-Identifier: Apache-2.0
"""A swapped model as one file: all of its weights, and what was put where."""

from __future__ import annotations

import importlib
import json
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models._input import get_model_args
from torch import Tensor, nn

from keymix._version import __version__
from keymix.arguments import module_of
from keymix.errors import Attempt, UserError, WriteError, one_line, reason
from keymix.hosts.base import Plan, install, plans_in, shadow
from keymix.hosts.call_grid import given_size
from keymix.hosts.hf_vit import HuggingFaceViT, of_family
from keymix.layers.folding import refuse_folded
from keymix.models.arguments import refuse_weights, without_weights
from keymix.models.factory import create_model
from keymix.models.family import MixerModel
from keymix.models.hosted import rebuilt_by, record_mixers
from keymix.models.preprocessing import describe, described
from keymix.records import from_json, to_json

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
                "it. Save with keymix.save_swapped(model, FILE); keymix.load_swapped(FILE) loads it"
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


@dataclass(frozen=True, kw_only=True)
class _Base:
    """How a library builds the model without its swaps: what it calls it, and arguments."""

    library: Literal["timm", "transformers"]
    name: str
    arguments: Mapping[str, Any]
    mixers: tuple[Plan, ...] = ()  # in a model of timm's before
    image_size: tuple[int, int] | None = None  # that a user gave a model of transformers


@dataclass(frozen=True, kw_only=True)
class _Swapped:
    """What a file says of itself."""

    version: str
    model: str
    base: _Base | None
    swaps: tuple[Plan, ...]
    shown: Mapping[str, Any]


def save_swapped(model: nn.Module, path: str | Path) -> None:
    """Write a swapped model's weights and, next to them, what was put where.

    One safetensors file: all tensors of ``model.state_dict()``, and in its metadata, under
    ``"keymix_swap"``, JSON of the mixers, their options and their places, of how timm or
    transformers builds the model, and of what its ``pretrained_cfg`` says of images and classes.
    Which weights train is not written.

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
    record = _Swapped(
        version=__version__,
        model=_kind(model),
        base=_base_of(model),
        swaps=tuple(plans),
        shown=described(model),
    )
    path, part = Path(path), Path(f"{path}.part")
    try:
        metadata = {FORMAT: json.dumps(to_json(record), sort_keys=True)}
        save_file(_apart(model.state_dict()), part, metadata=metadata)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise WriteError(f"{path}: cannot be written: {error}") from error


@torch.random.fork_rng(devices=[])  # what is drawn is overwritten
def load_swapped(
    path: str | Path, base: nn.Module | Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Load a swapped model.

    Args:
        path: What :func:`save_swapped` wrote.
        base: The model as it was built before its swaps, or what builds it: the same
            architecture, classes and image size; its weights do not matter. It is changed in
            place, and is what it was after a refusal. None to build it as the file says, for
            models of timm, keymix and transformers; nothing in the file runs.

    Returns:
        The model, on the device, in the type and mode of ``base``; or on the CPU, in the type of
        the file and in eval mode.

    Raises:
        UserError: If the file is none of these, or does not fit the model; it names the first
            tensor or layer that does not. If it does not say how the model is built.
    """
    record, state = _read(Path(path))
    if base is None:
        model = (
            _rebuilt(record, path)
            .to(next(t.dtype for t in state.values() if t.dtype.is_floating_point))
            .eval()
        )
    else:
        model = module_of(base if isinstance(base, nn.Module) else base())
    if _kind(model) != record.model:
        raise UserError(f"{path} holds a swapped {record.model}, not {_kind(model)}")
    copy = shadow(model)
    install(copy, record.swaps)
    _check(copy.state_dict(), state, path)
    install(model, record.swaps)
    keep_from_loss(model)
    model.load_state_dict(state)
    describe(model, record.shown)
    return model


def is_swapped(path: Path) -> bool:
    """Whether a file is one that `save_swapped` wrote."""
    try:
        with safe_open(path, "pt") as file:
            return FORMAT in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _base_of(model: nn.Module) -> _Base | None:
    """Say how its library builds a model, None where it cannot without a part of the user's."""
    kind, name = type(model), type(model).__name__
    try:
        if of_family(kind) and getattr(sys.modules.get("transformers"), name, None) is kind:
            config: Any = model.config
            arguments = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
            return _Base(
                library="transformers",
                name=name,
                arguments=json.loads(json.dumps(arguments)),
                image_size=given_size(model),
            )
        name, more = rebuilt_by(model)
        arguments = without_weights(get_model_args(model) | more)
        known, swapped = arguments.pop("swaps", ()), {plan.path for plan in plans_in(model)}
        return _Base(
            library="timm",
            name=arguments.pop("base", name),
            arguments=json.loads(json.dumps(arguments)),
            mixers=tuple(Plan(**each) for each in known if each["path"] not in swapped),
        )
    except (TypeError, UserError, ValueError):  # timm did not build it, or of a class in arguments
        return None


def _rebuilt(record: _Swapped, path: str | Path) -> nn.Module:
    """Build the model without its swaps; names and arguments may be a stranger's."""
    base, model = record.base, None
    if base is None:
        raise UserError(
            f"{path} does not say how its {record.model} is built, for neither timm nor "
            "transformers built it: give the model as it was before its swaps, base="
        )
    with Attempt() as attempt:
        model = _of_timm(base) if base.library == "timm" else _of_transformers(base)
    if model is None:
        why = reason(attempt.error or RuntimeError())
        raise UserError(
            f"{path}: {base.library} cannot build {one_line(base.name)!r} as it says ({why}); give "
            "the model as it was before its swaps, base="
        )
    return model


def _of_timm(base: _Base) -> nn.Module:
    refuse_weights(base.arguments)
    arguments = dict(base.arguments)
    if isinstance(arguments.get("img_size"), list):  # JSON has no tuples
        arguments["img_size"] = tuple(arguments["img_size"])
    model = create_model(base.name, **arguments)
    install(model, base.mixers)
    return model


def _of_transformers(base: _Base) -> nn.Module:
    """Build a model of the families that mixers can be put into, from what their config knows."""
    kind: Any = getattr(importlib.import_module("transformers"), base.name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or not of_family(kind):
        raise UserError(f"there is no such model in {HuggingFaceViT.name}")
    config: Any = kind.config_class  # type: ignore[attr-defined] # every model's
    known = config().to_dict().keys()
    model: Any = kind(config(**{k: v for k, v in base.arguments.items() if k in known}))
    model.image_size = base.image_size
    return model  # type: ignore[no-any-return]


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


def _read(path: Path) -> tuple[_Swapped, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            stored = (file.metadata() or {}).get(FORMAT)
            if stored is None:
                raise UserError(f"{path} says nothing of a swap; save_swapped writes such files")
            record = from_json(_Swapped, json.loads(stored), where=f"what {path} says of its swaps")
            if not record.swaps:
                raise UserError(f"what {path} says of its swaps is damaged: there are none")
            names = list(file.keys())
            return record, {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError:
        raise
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _check(here: dict[str, Any], state: dict[str, Tensor], path: str | Path) -> None:
    for name in sorted(here.keys() | state.keys()):
        if name not in state:
            raise UserError(f"{path} does not hold {name} of this model")
        if name not in here:
            raise UserError(f"{path} holds {name}, for which this model has no place")
        mine, theirs = tuple(here[name].shape), tuple(state[name].shape)
        if mine != theirs:
            raise UserError(f"{path}: {name} is {theirs} there and {mine} in this model")
