# SPDX-License-Identifier: Apache-2.0
"""What a swap did, put together for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from torch import nn

from keymix.analysis.counting import Count, count
from keymix.errors import UserError
from keymix.hosts.layers import Layer
from keymix.mixers.base import TokenMixer
from keymix.surgery.images import input_size
from keymix.surgery.plans import Plan
from keymix.surgery.report import LayerDrift, LayerRow, OutputDrift, Untouched
from keymix.surgery.transfer import Fate, keep_around, parts_of, stems


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
        original: The model as it was.
        copy: The model as it is.
        found: All layers of the original.
        plans: What was put where.
        fates: What became of the tensors of each of these layers.
        moved: Drift by layer, and of the output; None where it was not measured.
    """
    notes = []
    try:
        both = count(original, input_size(original)), count(copy, input_size(copy))
    except UserError as error:
        both = None
        notes.append(f"multiply-adds are not counted: {error}")
    layers = {layer.place.path: layer for layer in found}
    drifts, output = moved if moved is not None else ({}, None)
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
        macs=None if both is None else (both[0].macs, both[1].macs),
        output=output,
        notes=tuple(notes),
    )


def _row(
    layer: Layer,
    plan: Plan,
    original: nn.Module,
    copy: nn.Module,
    fate: Fate,
    both: tuple[Count, Count] | None,
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


def _macs(counted: Count, path: str) -> int:
    return sum(
        layer.macs
        for layer in counted.layers
        if layer.path == path or layer.path.startswith(f"{path}.")
    )
