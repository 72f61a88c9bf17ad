# SPDX-License-Identifier: Apache-2.0
"""Firing rates: which spikes are read, under which name of the paper, and how they are added up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keymix.analysis.spikes_record import Firing
from keymix.layers.neurons import SpikingNeuron
from keymix.mixers.base import TokenMixer

ROLES = {
    "qk_token": {"q_sn": "Q", "k_sn": "K", "attn_sn": "A_t", "proj": "X'", "proj_sn": "X''"},
    "qk_channel": {"q_sn": "Q", "k_sn": "K", "attn_sn": "A_c", "proj": "X'", "proj_sn": "X''"},
    "spiking_self": {
        "q_sn": "Q",
        "k_sn": "K",
        "v_sn": "V",
        "attn_sn": "SSA'",
        "proj_sn": "SSA",
    },
    "spike_driven": {
        "q_sn": "Q",
        "k_sn": "K",
        "v_sn": "V",
        "attn_sn": "A_c",
        "proj": "SDSA'",
        "proj_sn": "SDSA",
    },
}
"""Mixer to the parts whose spikes have a name in the paper; of ``proj`` it is what comes in."""

MLP = ("MLP layer 1", "MLP layer 2")

TABLE7: Mapping[str, tuple[float, float]] = {
    "Q": (0.0432, 0.0231),
    "K": (0.1784, 0.0847),
    "A_t": (0.3477, 0.2655),
    "X'": (0.0832, 0.0350),
    "X''": (0.1478, 0.0577),
    MLP[0]: (0.0518, 0.0246),
    MLP[1]: (0.2733, 0.1869),
}
"""QKFormer's Table 7 (App. A.3), stages 1 and 2: HST-10-768 trained on ImageNet, 224 pixels."""


@dataclass(frozen=True)
class Point:
    """A place where spikes are read: what comes out of a module, or what goes in."""

    path: str
    module: nn.Module
    inward: bool
    role: str | None
    mixer: str | None
    stage: int | None
    block: int | None


def neuron_paths(model: nn.Module) -> dict[str, nn.Module]:
    """List the neuron layers, outermost ones where one holds another: path to module.

    A neuron layer is a :class:`keymix.layers.neurons.SpikingNeuron`, or a module with a
    ``v_threshold``, as SpikingJelly's neurons are.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and (isinstance(module, SpikingNeuron) or hasattr(module, "v_threshold")):
            found[path] = module
    return found


def points_of(model: nn.Module) -> list[Point]:
    """List the places where spikes are read, in the model's order."""
    mixers = {p: m for p, m in model.named_modules() if isinstance(m, TokenMixer)}
    neurons = neuron_paths(model)
    watched: dict[str, tuple[nn.Module, bool]] = {p: (m, False) for p, m in neurons.items()}
    for path, mixer in mixers.items():
        if "proj" in ROLES.get(mixer.mixer_name, {}):
            watched[f"{path}.proj"] = (mixer.get_submodule("proj"), True)
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    numbers: dict[tuple[str, str], int] = {}
    mlps: dict[str, int] = {}
    points = []
    for path in sorted(watched, key=order.__getitem__):
        module, inward = watched[path]
        stage, within = _place(path)
        block = None
        if within is not None:
            block = numbers.setdefault(within, len(numbers) + 1)
        parent, _, name = path.rpartition(".")
        owner = mixers[parent].mixer_name if parent in mixers else None
        role = ROLES.get(owner or "", {}).get(name)
        if block is not None and owner is None and ".mlp." in path:
            before = path.partition(".mlp.")[0]
            number = mlps.get(before, 0)
            mlps[before] = number + 1
            role = MLP[number] if number < len(MLP) else None
        points.append(Point(path, module, inward, role, owner, stage, block))
    return points


def _place(path: str) -> tuple[int | None, tuple[str, str] | None]:
    """Read stage (from 1) and block off a path."""
    stage = re.search(r"(?:^|\.)stages\.(\d+)\.", path)
    block = re.search(r"(?:^|\.)blocks\.(\d+)\.", path)
    number = int(stage[1]) + 1 if stage else None
    if block is None:
        return number, None
    return number or 1, (stage[1] if stage else "", block[1])


class FiringTally:
    """Adds up the spikes of one place over batches.

    Args:
        point: The place.
    """

    def __init__(self, point: Point) -> None:
        self.point = point
        self._total: list[float] = []  # by step
        self._count: list[int] = []
        self._largest = 0.0
        self._fired: Tensor | None = None
        self._images_known = True
        self._neurons = 0
        self._calls: list[Tensor] = []

    def hear(self, spikes: Tensor, images: int, steps: int) -> None:
        """Read what one call gave; keep it until the batch ends where it is one step of several.

        Args:
            spikes: With the steps first, or of one step.
            images: Images of the batch.
            steps: Time steps of the model; 0 where nobody knows.
        """
        if len(spikes) == steps and not self._calls:
            self._add(spikes, images)
        else:
            self._calls.append(spikes.detach())

    @property
    def heard(self) -> bool:
        """Whether it ran at all, in any batch."""
        return bool(self._count)

    @property
    def steps_heard(self) -> int:
        """Time steps that it saw in the batch that is under way."""
        return sum(len(call) for call in self._calls) if len(self._calls) == 1 else len(self._calls)

    def end_batch(self, images: int, steps: int) -> None:
        """Add up the calls of a batch that are kept: one with all steps, or one a step.

        Args:
            images: Images of the batch.
            steps: Time steps of the model.
        """
        calls, self._calls = self._calls, []
        if not calls:
            return
        one_a_step = len(calls) == steps and steps > 1
        self._add(torch.stack(calls) if one_a_step else torch.cat(calls), images)

    def _add(self, spikes: Tensor, images: int) -> None:
        flat = spikes.flatten(1)
        totals = flat.sum(1, dtype=torch.float64).tolist()
        self._total += [0.0] * (len(totals) - len(self._total))
        self._count += [0] * (len(totals) - len(self._count))
        for i, total in enumerate(totals):
            self._total[i] += total
            self._count[i] += flat.shape[1]
        self._largest = max(self._largest, float(spikes.max()))
        self._neurons = flat.shape[1] // images
        self._silence(spikes, images)

    def _silence(self, spikes: Tensor, images: int) -> None:
        if spikes.ndim < 2 or spikes.shape[1] != images or not self._images_known:
            self._images_known = False
            return
        fired = (spikes != 0).flatten(0, 1).any(0)
        if self._fired is not None and self._fired.shape != fired.shape:
            self._images_known = False
            return
        self._fired = fired if self._fired is None else self._fired | fired

    def result(self) -> Firing:
        """Return what was read."""
        point = self.point
        silent = None
        if self._images_known and self._fired is not None:
            silent = 1 - float(self._fired.double().mean())
        return Firing(
            path=point.path,
            inward=point.inward,
            role=point.role,
            mixer=point.mixer,
            stage=point.stage,
            block=point.block,
            rate=sum(self._total) / sum(self._count),
            by_step=tuple(t / n for t, n in zip(self._total, self._count, strict=True)),
            neurons=self._neurons,
            silent=silent,
            largest=self._largest,
        )


def by_stage(
    firings: tuple[Firing, ...], pick: Callable[[Firing], float] = lambda firing: firing.rate
) -> dict[tuple[str | None, int], dict[str, float]]:
    """Average over the blocks of a stage, as Table 7 has it, apart for each mixer.

    Args:
        firings: What was read.
        pick: The number that is averaged.

    Returns:
        Mixer and stage (from 1) to rates by name: of the mixer and of the MLP of its blocks.
    """
    of_block = {f.block: f.mixer for f in firings if f.mixer is not None}
    sums: dict[tuple[str | None, int], dict[str, list[float]]] = {}
    for firing in firings:
        if firing.role is None or firing.stage is None:
            continue
        key = (firing.mixer or of_block.get(firing.block), firing.stage)
        sums.setdefault(key, {}).setdefault(firing.role, []).append(pick(firing))
    return {
        key: {role: sum(rates) / len(rates) for role, rates in roles.items()}
        for key, roles in sums.items()
    }
