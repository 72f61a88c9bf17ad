# SPDX-License-Identifier: Apache-2.0
"""What a study of spikes leaves: of layers, operations and rasters, and as a record. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from keymix.analysis.energy import Energy
from keymix.analysis.study_record import ModelOnImages, StudyRecord

Kind = Literal["binary", "counts", "real"]
"""``"binary"``: 0 and 1. ``"counts"``: whole numbers from 0 on, such as sums of spikes."""

What = Literal["conv", "linear", "product", "sum", "norm", "other"]


@dataclass(frozen=True, kw_only=True)
class Firing:
    """The spikes of one layer of neurons, or of what goes into a projection.

    Attributes:
        path: The module whose output it is; of a projection, whose input.
        inward: Whether it is what goes into a projection, which no neuron gave as it is.
        role: Its name in the paper, such as ``"Q"``; None outside of blocks.
        mixer: The mixer that it belongs to, by name; None for none.
        stage: The model's stage from 1; None where paths do not say.
        block: The block from 1, over all stages; None outside of blocks.
        rate: Spikes per neuron per step, mean over images, steps and neurons.
        by_step: The same at each time step.
        neurons: How many there are for one image.
        silent: Share of neurons that fired in no step of no image; None where images do not lie
            on the second axis.
        largest: Largest value; above 1 where it is not one spike at a time.
    """

    path: str
    inward: bool
    role: str | None
    mixer: str | None
    stage: int | None
    block: int | None
    rate: float
    by_step: tuple[float, ...]
    neurons: int
    silent: float | None
    largest: float


@dataclass(frozen=True, kw_only=True)
class EnergyBounds:
    """Energy in pJ.

    Attributes:
        low: Lower bound.
        middle: Every spike one addition.
        high: Upper bound.
    """

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, energy: tuple[float, float, float]) -> EnergyBounds:
        """Name the three numbers."""
        low, middle, high = energy
        return cls(low=low, middle=middle, high=high)


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
class OperationReading:
    """`keymix.analysis.spikes_operations.Operation` as a record has it, with its energy."""

    path: str
    what: What
    input: Kind
    values: InputValues | None
    dense: float
    twin: float
    macs: float
    acs: float
    acs_low: float
    energy: EnergyBounds


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The network of the same shape without spikes.

    Attributes:
        macs: Its multiply-adds of one image.
        energy: Its energy, pJ.
        ratio: That over the spiking network's; None where the latter does not work.
    """

    macs: float
    energy: float
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class StageRates:
    """Firing rates of a stage, mean over its blocks.

    Attributes:
        mixer: The mixer; None for none.
        stage: The stage, from 1.
        rates: By the name in the paper.
    """

    mixer: str | None
    stage: int
    rates: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class SpikeReading:
    """What `keymix.spike_study` found, with all that follows from it.

    Attributes:
        images: Images that were read.
        time_steps: Steps T.
        batch_norm: ``"folded"`` or ``"separate"``.
        cost: What a multiply-add and an addition cost.
        rate: Spikes per neuron per step.
        silent: Share of neurons that never fired; None where it is not known of all.
        varies: Whether what the network gives varies from image to image.
        sops: Synaptic operations of one image.
        macs: Multiply-adds of one image.
        energy: Energy of one image.
        twin: The same network without spikes.
        notes: What to keep in mind when reading the numbers, in words.
        once: Paths of layers that ran once for all steps.
        repeated: Paths of layers that were given the same at every step.
        saved_once: Energy in pJ that computing those once would save.
        table: Firing rates by stage.
        paper: QKFormer's Table 7, stages 1 and 2, by name of the spikes.
        firings: One entry a layer of neurons and a masked K.
        operations: One entry an operation that costs something.
    """

    images: int
    time_steps: int
    batch_norm: str
    cost: Energy
    rate: float
    silent: float | None
    varies: bool
    sops: float
    macs: float
    energy: EnergyBounds
    twin: Twin
    notes: tuple[str, ...]
    once: tuple[str, ...]
    repeated: tuple[str, ...]
    saved_once: float
    table: tuple[StageRates, ...]
    paper: Mapping[str, tuple[float, float]]
    firings: tuple[Firing, ...]
    operations: tuple[OperationReading, ...]


@dataclass(frozen=True, kw_only=True)
class RasterReading:
    """`keymix.analysis.spikes_raster.Raster` as a record has it.

    Spikes are texts of 0 and 1: one a step of A_t, one a channel of K and X'.
    """

    path: str
    stage: int | None
    block: int | None
    head: int
    heads: int
    step: int
    start: int
    grid: tuple[int, int]
    attention: tuple[str, ...]
    keys: tuple[str, ...]
    masked: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SpikesStudy(SpikeReading, ModelOnImages):
    """What was found of one model of a record.

    Attributes:
        raster_image: Name of the image that rasters are of; None without rasters.
        photo: The image as a data URI; None without rasters.
        rasters: Spikes of Q-K token attention on it.
    """

    raster_image: str | None
    photo: str | None
    rasters: tuple[RasterReading, ...]


@dataclass(frozen=True, kw_only=True)
class SpikesRecord(StudyRecord):
    """The content of ``spikes.json``.

    Attributes:
        studies: One entry a model.
    """

    studies: tuple[SpikesStudy, ...]


@dataclass(frozen=True)
class Part:
    """A part of a model and the energy of its operations, pJ."""

    name: str
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0


def parts(study: SpikeReading) -> list[Part]:
    """Add operations up by the part of the model they are in: stages, and what is beside them."""
    found: dict[str, Part] = {}
    for op in study.operations:
        name = part_of(op.path)
        part = found.get(name, Part(name))
        found[name] = Part(
            name,
            part.low + op.energy.low,
            part.middle + op.energy.middle,
            part.high + op.energy.high,
        )
    return list(found.values())


def part_of(path: str) -> str:
    """Name the part of a model that a path is in."""
    stage = re.match(r"stages\.(\d+)\.(patch_embed)?", path)
    if stage is None:
        return path.partition(".")[0]
    return f"{'embedding' if stage[2] else 'blocks'} {int(stage[1]) + 1}"
