# SPDX-License-Identifier: Apache-2.0
"""Spikes and energy of a spiking network: firing rates, synaptic operations, energy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keymix.analysis.capture import inference_mode_of, refusing
from keymix.analysis.energy import Energy, energy_of
from keymix.analysis.images import Images, Model, batches_of
from keymix.analysis.passes import Varies
from keymix.analysis.spikes_operations import Operation, OperationCounter
from keymix.analysis.spikes_record import (
    AnnCounterpart,
    EnergyBounds,
    Firing,
    SpikeReading,
    StageRates,
)
from keymix.analysis.study_record import joined
from keymix.arguments import module_of, opened
from keymix.errors import UserError, check_positive
from keymix.layers.neurons import SpikingNeuron
from keymix.mixers.base import TokenMixer

Progress = Callable[[int], None]

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

FEW = 16
"""Images below which a study says that they are few."""

DEAD = 0.9
"""Share of silent neurons above which a network does not work."""

NAMED = 3
"""Layers that a note names; it counts the others."""


@dataclass(kw_only=True, repr=False)
class SpikeReadings:
    """Firing rates, operations and energy of a spiking network, of one image on average.

    Attributes:
        firings: One entry per layer of neurons and a masked K, in the model's order.
        operations: One entry an operation that costs something, in the order of the forward pass.
        time_steps: Steps T.
        images: Images that were read.
        batch_norm: ``"folded"`` into the layer before, or ``"separate"``.
        cost: What a multiply-add and an addition cost.
        repeated: Paths of layers with real-valued input that was the same at every step, as of a
            still image: their multiply-adds are counted T times, and could be made once.
        varies: Whether what the network gives varies from image to image.
    """

    firings: tuple[Firing, ...]
    operations: tuple[Operation, ...]
    time_steps: int
    images: int
    batch_norm: str
    cost: Energy
    repeated: tuple[str, ...]
    varies: bool

    @property
    def rate(self) -> float:
        """Spikes per neuron per step, over all neurons of the model."""
        own = [f for f in self.firings if not f.inward]
        return sum(f.rate * f.neurons for f in own) / sum(f.neurons for f in own)

    @property
    def silent(self) -> float | None:
        """Share of neurons that never fired; None where it is not known of all."""
        own = [(f.silent, f.neurons) for f in self.firings if not f.inward]
        known = [(silent, count) for silent, count in own if silent is not None]
        if len(known) < len(own):
            return None
        return sum(silent * count for silent, count in known) / sum(count for _, count in own)

    @property
    def dead(self) -> bool:
        """Whether it does not work, so that what it saves says nothing of one that does."""
        return (self.silent or 0.0) > DEAD or not self.varies

    @property
    def unspiking(self) -> tuple[str, ...]:
        """Paths of the layers of neurons that gave no spike at all."""
        return tuple(f.path for f in self.firings if not f.inward and f.rate == 0)

    @property
    def sops(self) -> float:
        """Synaptic operations of one image: additions that spikes cause."""
        return sum(op.acs for op in self.operations)

    @property
    def macs(self) -> float:
        """Multiply-adds of one image: those of layers whose input is real."""
        return sum(op.macs for op in self.operations)

    @property
    def energy(self) -> tuple[float, float, float]:
        """Energy of one image in pJ: lower bound, every spike one addition, upper bound."""
        low, middle, high = zip(*(op.energy(self.cost) for op in self.operations), strict=True)
        return sum(low), sum(middle), sum(high)

    @property
    def ann_macs(self) -> float:
        """Multiply-adds of the network of the same shape without spikes, which needs one step."""
        return sum(op.ann for op in self.operations)

    @property
    def ann_energy(self) -> float:
        """Energy of that network, every multiply-add of it, pJ."""
        return self.ann_macs * self.cost.mac

    @property
    def once(self) -> tuple[str, ...]:
        """Paths of layers that ran once for all steps, as the first on a still image does."""
        return tuple(
            op.path
            for op in self.operations
            if op.what in ("conv", "linear") and op.ann == op.dense and self.time_steps > 1
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What to keep in mind when reading the numbers, in words."""
        notes = []
        silent = self.silent
        if silent is not None and silent > DEAD:
            notes.append(
                f"{100 * silent:.1f} % of the neurons never fired: hardly any spike gets through "
                "this network, and its energy says nothing about a working one."
            )
        if not self.varies:
            notes.append(
                "The network's outputs do not vary from image to image: no spike that depends on "
                "the image reaches them, and its energy says nothing about a working network."
            )
        if self.unspiking:
            notes.append(_no_spike(self.unspiking, sum(not f.inward for f in self.firings)))
        if self.images < FEW:
            notes.append(f"Read on {self.images} images only; rates vary with the images.")
        above = [op.path for op in self.operations if op.input == "counts"]
        if above:
            notes.append(
                f"{len(above)} of {len(self.operations)} operations are given values above 1, "
                "which shortcuts make that add spikes; their energy has bounds."
            )
        return tuple(notes)

    @property
    def saved_once(self) -> float:
        """Energy in pJ that computing the layers of `repeated` once would save."""
        macs = sum(op.macs for op in self.operations if op.path in self.repeated)
        return macs * (1 - 1 / self.time_steps) * self.cost.mac

    def reading(self) -> SpikeReading:
        """Return it as a record has it, with all that follows from it."""
        energy = EnergyBounds.of(self.energy)
        return joined(
            SpikeReading,
            self,
            rate=self.rate,
            silent=self.silent,
            sops=self.sops,
            macs=self.macs,
            energy=energy,
            ann=AnnCounterpart(
                macs=self.ann_macs,
                energy=self.ann_energy,
                ratio=None if self.dead or not energy.middle else self.ann_energy / energy.middle,
            ),
            notes=self.notes,
            once=self.once,
            saved_once=self.saved_once,
            table=tuple(
                StageRates(mixer=mixer, stage=stage, rates=rates)
                for (mixer, stage), rates in by_stage(self.firings).items()
            ),
            paper=TABLE7,
            operations=tuple(op.reading(self.cost) for op in self.operations),
        )


def _no_spike(paths: Sequence[str], layers: int) -> str:
    """Name layers of neurons that gave no spike."""
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    named = ", ".join(paths[:NAMED])
    return f"{len(paths)} of {layers} layers of neurons gave no spike: {named}{more}."


def read_spikes(
    model: Model,
    images: Images,
    *,
    energy: str | Energy = "fp32",
    batch_norm: Literal["folded", "separate"] = "folded",
    batch_size: int = 8,
    progress: Progress | None = None,
) -> SpikeReadings:
    """Read spikes and operations of a network; see `keymix.spike_study`, which shows them."""
    cost = energy_of(energy)
    check_positive(batch_size=batch_size)
    trained = opened(model)
    inner = module_of(trained)
    neurons = checked_neurons(inner)
    reading = _Reading(inner, neurons)
    seen = 0
    for batch in batches_of(images, trained, batch_size, frames=True):
        reading.run(batch)
        seen += len(batch)
        if progress is not None:
            progress(seen)
    if not seen:
        raise UserError("a study of spikes needs at least one image, got none")
    return SpikeReadings(
        firings=tuple(tally.result() for tally in reading.tallies if tally.ran),
        operations=reading.counter.results(seen, reading.steps, norms=batch_norm == "separate"),
        time_steps=reading.steps,
        images=seen,
        batch_norm=batch_norm,
        cost=cost,
        repeated=reading.counter.same_at_every_step(),
        varies=reading.outputs.varied(),
    )


def checked_neurons(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's layers of neurons."""
    neurons = neuron_paths(model)
    if not neurons:
        raise UserError(
            f"{type(model).__name__} has no spiking neurons; choose a model that has, such as "
            "keymix's qkformer and spikformer models (not with neuron='relu', which has no "
            "spikes)"
        )
    return neurons


class _Reading:
    """Runs batches through a model, spikes and operations listened to."""

    def __init__(self, model: nn.Module, neurons: dict[str, nn.Module]) -> None:
        self.model, self.neurons = model, neurons
        self.tallies = [FiringTally(point) for point in points_of(model)]
        self.steps = int(getattr(model, "time_steps", 0))
        self.counter = OperationCounter(model, neurons, self.steps or None)
        self.outputs = Varies()

    def run(self, batch: Tensor) -> None:
        for neuron in self.neurons.values():
            reset = getattr(neuron, "reset", None)
            if callable(reset):
                reset()
        parameter = next(self.model.parameters(), None)
        if parameter is not None:
            batch = batch.to(device=parameter.device, dtype=parameter.dtype)
        with (
            self._hooks(len(batch)),
            undisturbed(self.model),
            self.counter.listening(len(batch)),
            refusing(self.model, batch),
        ):
            given = self.model(batch)
        if isinstance(given, Tensor):
            self.outputs.see(given)
        self.steps = self.steps or max(tally.steps_seen for tally in self.tallies)
        for tally in self.tallies:
            tally.end_batch(len(batch), self.steps)

    @contextlib.contextmanager
    def _hooks(self, images: int) -> Iterator[None]:
        def record_call(tally: FiringTally) -> Callable[..., None]:
            def out(_module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
                self.counter.paused = True  # what is read off is no work of the model's
                tally.add(args[0] if tally.point.inward else output, images, self.steps)
                self.counter.paused = False

            return out

        with contextlib.ExitStack() as stack:
            for tally in self.tallies:
                module = tally.point.module
                if tally.point.inward:
                    stack.callback(module.register_forward_pre_hook(record_call(tally)).remove)
                else:
                    stack.callback(module.register_forward_hook(record_call(tally)).remove)
            yield


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in inference mode, without gradients, every operation as it is written."""
    with (
        torch.no_grad(),
        inference_mode_of(model),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


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
    for path, each in mixers.items():
        if "proj" in each.spiking_roles:
            watched[f"{path}.proj"] = (each.get_submodule("proj"), True)
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
        mixer = mixers.get(parent)
        owner = None if mixer is None else mixer.mixer_name
        role = None if mixer is None else mixer.spiking_roles.get(name)
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
    """Adds up the spikes of one place over batches."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self._total: list[float] = []  # by step
        self._count: list[int] = []
        self._largest = 0.0
        self._fired: Tensor | None = None
        self._images_known = True
        self._neurons = 0
        self._calls: list[Tensor] = []

    def add(self, spikes: Tensor, images: int, steps: int) -> None:
        """Read what one call gave, steps first; keep it until the batch ends where it is one step.

        The number of `steps` is 0 where it is not known.
        """
        if len(spikes) == steps and not self._calls:
            self._add(spikes, images)
        else:
            self._calls.append(spikes.detach())

    @property
    def ran(self) -> bool:
        """Whether it ran at all, in any batch."""
        return bool(self._count)

    @property
    def steps_seen(self) -> int:
        """Time steps that it saw in the batch that is under way."""
        return sum(len(call) for call in self._calls) if len(self._calls) == 1 else len(self._calls)

    def end_batch(self, images: int, steps: int) -> None:
        """Add up the calls of a batch that are kept: one with all steps, or one per step."""
        calls, self._calls = self._calls, []
        if not calls:
            return
        one_per_step = len(calls) == steps and steps > 1
        self._add(torch.stack(calls) if one_per_step else torch.cat(calls), images)

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


def by_stage(firings: tuple[Firing, ...]) -> dict[tuple[str | None, int], dict[str, float]]:
    """Average over the blocks of a stage, as Table 7 has it: mixer and stage to rates by name."""
    of_block = {f.block: f.mixer for f in firings if f.mixer is not None}
    sums: dict[tuple[str | None, int], dict[str, list[float]]] = {}
    for firing in firings:
        if firing.role is None or firing.stage is None:
            continue
        key = (firing.mixer or of_block.get(firing.block), firing.stage)
        sums.setdefault(key, {}).setdefault(firing.role, []).append(firing.rate)
    return {
        key: {role: sum(rates) / len(rates) for role, rates in roles.items()}
        for key, roles in sums.items()
    }
