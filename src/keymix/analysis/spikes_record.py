# SPDX-License-Identifier: Apache-2.0
"""What is read of a spiking network: rates, operations, energies, rasters. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from keymix.analysis.energy import Bounds, Energy
from keymix.records import to_json

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["binary", "counts", "real"]
"""``"binary"``: 0 and 1. ``"counts"``: whole numbers from 0 on, such as sums of spikes."""

What = Literal["conv", "linear", "product", "sum", "norm", "other"]

DEAD = 0.9
"""Share of silent neurons above which a network does not work."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where spikes are read: what comes out of a layer of neurons, or what goes into a projection.

    Attributes:
        path: The module whose output it is; of a projection, whose input.
        inward: Whether it is what goes into a projection, which no neuron gave as it is.
        role: Its name in the paper, such as ``"Q"``; None outside of blocks.
        mixer: The mixer that it belongs to, by name; None for none.
        stage: The model's stage from 1; None where paths do not say.
        block: The block from 1, over all stages; None outside of blocks.
    """

    path: str
    inward: bool
    role: str | None
    mixer: str | None
    stage: int | None
    block: int | None


@dataclass(frozen=True, kw_only=True)
class Firing(Place):
    """The spikes of one place.

    Attributes:
        rate: Spikes per neuron per step, mean over images, steps and neurons.
        by_step: The same at each time step.
        neurons: How many there are for one image.
        silent: Share of neurons that fired in no step of no image; None where images do not lie
            on the second axis.
        largest: Largest value; above 1 where it is not one spike at a time.
    """

    rate: float
    by_step: tuple[float, ...]
    neurons: int
    silent: float | None
    largest: float


@dataclass(frozen=True, kw_only=True)
class InputValues:
    """The values that drive an operation.

    Attributes:
        kind: The least plain kind among them.
        mean: Their mean.
        nonzero: Share that is not 0.
        shares: Shares of the values 0, 1, 2, …; None of real numbers.
    """

    kind: Kind
    mean: float
    nonzero: float
    shares: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a model, on one image over all time steps.

    Attributes:
        path: The innermost module that ran it.
        what: ``"conv"`` and ``"linear"`` have weights; ``"product"`` is of two activations, as in
            spiking self attention; ``"sum"`` adds spikes up, as Q-K attention does with Q;
            ``"norm"`` is a batch norm that is not folded; ``"other"`` has a formula, no more.
        input: Values that drive it: ``"binary"`` (0 and 1), ``"counts"`` (whole numbers, such as
            spikes that a shortcut added), ``"real"``.
        values: Mean, share that is not 0, and shares of the values 0, 1, 2, …; None for "norm"
            and "other".
        dense: Multiply-adds if every input counted, over all steps.
        ann: Multiply-adds of it in the ANN counterpart, which has one step.
        macs: Multiply-adds that have to be made: all of ``dense`` where the input is real.
        acs: Additions, a spike of value v counted as v (synaptic operations, SOPs).
        acs_low: Additions if an input costs one whatever its value; equals ``acs`` if binary.
    """

    path: str
    what: What
    input: Kind
    values: InputValues | None
    dense: float
    ann: float
    macs: float
    acs: float
    acs_low: float

    def energy(self, cost: Energy) -> Bounds:
        """Return energy in pJ: lower bound, every spike one addition, upper bound.

        The lower bound takes one addition for an input above one too, the upper bound one
        multiply-add; all three agree where the input is binary, or real.
        """
        if self.input == "real":
            return Bounds(*(self.macs * cost.mac,) * 3)
        middle = self.acs * cost.ac
        if self.input == "binary":
            return Bounds(middle, middle, middle)
        multiplied = 0.0 if self.what == "sum" else self.acs_low * cost.mac
        return Bounds(self.acs_low * cost.ac, middle, max(middle, multiplied))


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
    def failure(self) -> Literal["", "silent", "alike"]:
        """Why its energy says nothing of a network that works, if so.

        Hardly a neuron fires, or it answers all images alike.
        """
        if (self.silent or 0.0) > DEAD or not self.energy.middle:
            return "silent"
        return "" if self.varies else "alike"

    @property
    def dead(self) -> bool:
        """Whether it does not work, so that what it saves says nothing of one that does."""
        return bool(self.failure)

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
    def energy(self) -> Bounds:
        """Energy of one image in pJ: lower bound, every spike one addition, upper bound."""
        return Bounds.total(op.energy(self.cost) for op in self.operations)

    @property
    def ann_macs(self) -> float:
        """Multiply-adds of the network of the same shape without spikes, which needs one step."""
        return sum(op.ann for op in self.operations)

    @property
    def ann_energy(self) -> float:
        """Energy of that network, every multiply-add of it, pJ."""
        return self.ann_macs * self.cost.mac

    @property
    def ann_ratio(self) -> float | None:
        """That over the energy of this one; None where this one does not work."""
        return None if self.dead else self.ann_energy / self.energy.middle

    @property
    def once(self) -> tuple[str, ...]:
        """Paths of layers that ran once for all steps, as the first on a still image does."""
        return tuple(
            op.path
            for op in self.operations
            if op.what in ("conv", "linear") and op.ann == op.dense and self.time_steps > 1
        )

    @property
    def saved_once(self) -> float:
        """Energy in pJ that computing the layers of `repeated` once would save."""
        macs = sum(op.macs for op in self.operations if op.path in self.repeated)
        return macs * (1 - 1 / self.time_steps) * self.cost.mac

    @property
    def by_stage(self) -> dict[tuple[str | None, int], dict[str, float]]:
        """Rates, mean over the blocks of a stage: mixer and stage to rates by name."""
        of_block = {f.block: f.mixer for f in self.firings if f.mixer is not None}
        found: dict[tuple[str | None, int], dict[str, list[float]]] = {}
        for firing in self.firings:
            if firing.role is not None and firing.stage is not None:
                key = (firing.mixer or of_block.get(firing.block), firing.stage)
                found.setdefault(key, {}).setdefault(firing.role, []).append(firing.rate)
        return {
            key: {role: sum(rates) / len(rates) for role, rates in roles.items()}
            for key, roles in found.items()
        }

    def record(self) -> dict[str, Any]:
        """Return plain data with all that follows from it, as JSON takes it."""
        derived = ("rate", "silent", "sops", "macs", "once", "saved_once")
        return {
            **to_json(self),
            **{name: to_json(getattr(self, name)) for name in derived},
            "energy": self.energy._asdict(),
            "ann": {"macs": self.ann_macs, "energy": self.ann_energy, "ratio": self.ann_ratio},
            "table": [
                {"mixer": mixer, "stage": stage, "rates": rates}
                for (mixer, stage), rates in self.by_stage.items()
            ],
            "operations": [
                to_json(op) | {"energy": op.energy(self.cost)._asdict()} for op in self.operations
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Raster:
    """The spikes of one head of Q-K token attention, on one image.

    Attributes:
        path: The mixer.
        stage: Its stage from 1; None where paths do not show it.
        block: Its block from 1, over all stages.
        head: The head, from 0.
        heads: How many there are.
        step: Time step of keys and masked keys, from 0.
        start: First token of the segment.
        grid: Rows and columns that the tokens lie on; one row where that is unknown.
        attention: A_t of all tokens at every step ``[T, N]``.
        keys: K ``[d, n]`` of the segment's n tokens.
        masked: X' likewise.
    """

    path: str
    stage: int | None
    block: int | None
    head: int
    heads: int
    step: int
    start: int
    grid: tuple[int, int]
    attention: Tensor
    keys: Tensor
    masked: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it; spikes are texts of 0 and 1, one per row."""
        return {
            name: _rows(value) if name in ("attention", "keys", "masked") else to_json(value)
            for name, value in vars(self).items()
        }


def _rows(spikes: Tensor) -> list[str]:
    return ["".join("1" if s else "0" for s in row) for row in spikes.tolist()]
