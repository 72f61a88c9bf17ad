# SPDX-License-Identifier: Apache-2.0
"""What a swap did, put together for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from torch import nn

from keymix.analysis.counting import run_counting
from keymix.errors import UserError
from keymix.hosts.layers import Layer, unread_attention
from keymix.mixers.base import TokenMixer
from keymix.surgery.images import input_size
from keymix.surgery.plans import Plan
from keymix.surgery.report import SAYS_NOTHING, LayerDrift, LayerRow, OutputDrift, Untouched
from keymix.surgery.transfer import Fate, keep_around, parts_of, stems

Counted = dict[str, int]  # multiply-adds by path


class Account(TypedDict):
    """The part of a report that all swaps tell alike."""

    rows: tuple[LayerRow, ...]
    untouched: tuple[Untouched, ...]
    params: tuple[int, int]
    macs: tuple[int, int] | None
    output: OutputDrift | None
    notes: tuple[str, ...]


def account(
    original: nn.Module,
    copy: nn.Module,
    found: Sequence[Layer],
    plans: Sequence[Plan],
    fates: Mapping[str, Fate],
    moved: tuple[Mapping[str, LayerDrift], OutputDrift] | None,
) -> Account:
    """Say what became of every layer of a model.

    Args:
        original: The model as it was; a copy that nobody runs after this.
        copy: The model as it is, likewise.
        found: All layers of the original.
        plans: What was put where.
        fates: What became of the tensors of each of these layers.
        moved: Drift by layer, and of the output; None where it was not measured.
    """
    notes = []
    drifts, output = moved if moved is not None else ({}, None)
    if output is not None and not output.varies:
        notes.append(f"drift of the output is undefined: {SAYS_NOTHING}")
    size = input_size(original) or (output.image_size if output is not None else None)
    both: tuple[Counted, Counted] | None = None
    try:
        both = _counted(original, size), _counted(copy, size)
    except UserError as error:
        notes.append(f"multiply-adds are not counted: {error}")
    layers = {layer.place.path: layer for layer in found}
    notes += [
        f"{path} ({type(original.get_submodule(path)).__name__}) stays: no adapter reads it"
        for path in unread_attention(original, found)
    ]
    rows = tuple(
        _row(layers[plan.path], plan, original, copy, fates[plan.path], both, drifts)
        for plan in plans
    )
    touched = {row.path for row in rows}
    untouched = tuple(
        Untouched(path=path, what=_name(layer), why="not among the layers chosen")
        for path, layer in layers.items()
        if path not in touched
    )
    return Account(
        rows=rows,
        untouched=untouched,
        params=(_params(original), _params(copy)),
        macs=None if both is None else (sum(both[0].values()), sum(both[1].values())),
        output=output,
        notes=tuple(notes),
    )


def _row(
    layer: Layer,
    plan: Plan,
    original: nn.Module,
    copy: nn.Module,
    fate: Fate,
    both: tuple[Counted, Counted] | None,
    drifts: Mapping[str, LayerDrift],
) -> LayerRow:
    before, after = original.get_submodule(plan.path), copy.get_submodule(plan.path)
    mixer = after.get_submodule("mixer")
    assert isinstance(mixer, TokenMixer)  # a host puts it there
    names = set(parts_of(mixer)) | keep_around(before, after, fate)
    fresh = names - fate.copied - fate.estimated
    return LayerRow(
        path=plan.path,
        before=_name(layer),
        after=plan.mixer,
        copied=stems(fate.copied, names - fate.copied),
        estimated=stems(fate.estimated, names - fate.estimated),
        fresh=stems(fresh, names - fresh),
        dropped=stems(fate.dropped, ()),
        params=(_params(before), _params(after)),
        macs=None if both is None else (_macs(both[0], plan.path), _macs(both[1], plan.path)),
        drift=drifts.get(plan.path),
        notes=tuple(fate.notes),
    )


def _name(layer: Layer) -> str:
    if layer.mixer is None:
        return type(layer.module).__name__
    return layer.mixer.mixer_name or type(layer.mixer).__name__


def _params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _counted(model: nn.Module, size: tuple[int, ...] | None) -> Counted:
    """Multiply-adds of one image by module; hooks stay in the model."""
    if size is None:
        raise UserError(f"{type(model).__name__} does not say which images it takes")
    anchor = next(model.parameters())
    return run_counting(model, anchor.new_zeros(1, *size))


def _macs(counted: Counted, path: str) -> int:
    return sum(n for name, n in counted.items() if name == path or name.startswith(f"{path}."))
