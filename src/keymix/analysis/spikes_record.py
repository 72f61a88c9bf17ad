# SPDX-License-Identifier: Apache-2.0
"""What a study of spikes leaves: of layers, operations and rasters, and as a record. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from keymix.analysis.energy import Energy
from keymix.analysis.study_record import ModelOnImages

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
    """Energy in pJ."""

    low: float  # lower bound
    middle: float  # every spike one addition
    high: float  # upper bound

    @classmethod
    def of(cls, energy: tuple[float, float, float]) -> EnergyBounds:
        """Name the three numbers."""
        low, middle, high = energy
        return cls(low=low, middle=middle, high=high)


@dataclass(frozen=True, kw_only=True)
class InputValues:
    """The values that drive an operation."""

    kind: Kind  # the least plain kind among them
    mean: float  # their mean
    nonzero: float  # share that is not 0
    shares: tuple[float, ...] | None  # shares of the values 0, 1, 2, …; None of real numbers


@dataclass(frozen=True, kw_only=True)
class OperationReading:
    """`keymix.analysis.spikes_operations.Operation` as a record has it, with its energy."""

    path: str
    what: What
    input: Kind
    values: InputValues | None
    dense: float
    ann: float  # multiply-adds in the ANN counterpart
    macs: float
    acs: float
    acs_low: float
    energy: EnergyBounds


@dataclass(frozen=True, kw_only=True)
class AnnCounterpart:
    """The ANN counterpart of a spiking model: the same network without spikes."""

    macs: float  # its multiply-adds of one image
    energy: float
    ratio: float | None  # that over the spiking network's; None where the latter does not work


@dataclass(frozen=True, kw_only=True)
class StageRates:
    """Firing rates of a stage, mean over its blocks."""

    mixer: str | None
    stage: int
    rates: Mapping[str, float]  # by the name in the paper


@dataclass(frozen=True, kw_only=True)
class SpikeReading:
    """What `keymix.spike_study` found, with all that follows from it."""

    images: int
    time_steps: int  # steps T
    batch_norm: str  # ``"folded"`` or ``"separate"``
    cost: Energy  # what a multiply-add and an addition cost
    rate: float
    silent: float | None  # share of neurons that never fired; None where it is not known of all
    varies: bool  # whether what the network gives varies from image to image
    sops: float  # synaptic operations of one image
    macs: float  # multiply-adds of one image
    energy: EnergyBounds
    ann: AnnCounterpart
    notes: tuple[str, ...]  # what to keep in mind when reading the numbers, in words
    once: tuple[str, ...]  # paths of layers that ran once for all steps
    repeated: tuple[str, ...]  # paths of layers that were given the same at every step
    saved_once: float  # energy in pJ that computing those once would save
    table: tuple[StageRates, ...]  # firing rates by stage
    # QKFormer's Table 7, stages 1 and 2, by name of the spikes
    paper: Mapping[str, tuple[float, float]]
    firings: tuple[Firing, ...]  # one entry per layer of neurons and a masked K
    operations: tuple[OperationReading, ...]  # one entry an operation that costs something


@dataclass(frozen=True, kw_only=True)
class RasterPlace:
    """Where a raster is of: heads, steps and tokens count from 0, stages and blocks from 1."""

    path: str
    stage: int | None
    block: int | None
    head: int
    heads: int
    step: int
    start: int  # first token of the segment
    grid: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RasterReading(RasterPlace):
    """`keymix.analysis.spikes_raster.Raster` as a record has it.

    Spikes are texts of 0 and 1: one per step of A_t, one per channel of K and X'.
    """

    attention: tuple[str, ...]
    keys: tuple[str, ...]
    masked: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SpikesStudy(SpikeReading, ModelOnImages):
    """What was found of one model of a record."""

    raster_image: str | None  # name of the image that rasters are of; None without rasters
    photo: str | None  # the image as a data URI; None without rasters
    rasters: tuple[RasterReading, ...]  # spikes of Q-K token attention on it
    # whether the run's test accuracy is no better than chance
    at_chance: bool


@dataclass(frozen=True)
class Part:
    """A part of a model and the energy of its operations, pJ."""

    name: str
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0


def parts(study: SpikeReading) -> list[Part]:
    """Add operations up by the part of the model they are in: stages, and what is outside them."""
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
