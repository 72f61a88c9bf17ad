# SPDX-License-Identifier: Apache-2.0
"""Firing rates, rasters, synaptic operations and energy: the options and the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.analysis.energy import energy_of
from keymix.errors import UserError
from keymix.studies.inputs import Images, Loaded
from keymix.studies.on_images import StudyOnImages, reading
from keymix.studies.spikes.result import Spikes, SpikeStudies
from keymix.studies.study import Session

if TYPE_CHECKING:
    from torch import Tensor


class _Spikes(StudyOnImages[SpikeStudies]):
    together = SpikeStudies
    summary = "spikes and energy: firing rates, rasters, synaptic operations, energy"
    description = """\
Measure the spikes of a spiking network: firing rates of Q, K, A_t, X', X'' and the MLPs by stage
(QKFormer, Table 7), spikes of the token attention (Fig. 3), what values go into each layer,
synaptic operations and energy with their assumptions, and the ANN counterpart, the same
network without spikes. Several models are shown side by side."""
    examples = """\
examples:
  keymix analyze spikes my-run
  keymix analyze spikes qkformer-run spikformer-run --out spikes
  keymix analyze spikes my-run --time-steps 2 --batch-norm separate --energy int8
  keymix analyze spikes my-run --raster-image 5 --raster-layers 0,1 --head 2 --step 0 --out spikes
  keymix analyze spikes my-run --json > spikes.json

A run on recordings of events is shown recordings, as frames. Blocks, heads and steps are numbered
from 1; options count layers, heads, steps, tokens and images of rasters from 0. docs/spikes.md
explains every measure and every assumption."""

    def add_options(self, add: Callable[..., Any]) -> None:
        super().add_options(add)
        add(
            "--time-steps",
            type=int,
            metavar="T",
            help="time steps of every model (default: its own)",
        )
        add(
            "--energy",
            default="fp32",
            metavar="NAME",
            help="energies in 45 nm (Horowitz 2014): fp32 (4.6 pJ per multiply-add, 0.9 per "
            "addition; default), fp16, int32, int8; or two numbers of pJ: MAC,AC",
        )
        add(
            "--batch-norm",
            choices=("folded", "separate"),
            default="folded",
            help="folded into the weights before it, or one multiply-add per element "
            "(default: folded)",
        )
        add(
            "--raster-image",
            type=int,
            metavar="I",
            help="which of the images the rasters are of (default: the first that can be read)",
        )
        add(
            "--raster-layers",
            metavar="LIST",
            help="which layers of Q-K token attention: numbers among them from 0, or patterns of "
            "paths (default: the first of each stage)",
        )
        add("--head", type=int, default=0, metavar="H", help="head of the rasters (default: 0)")
        add("--step", type=int, metavar="S", help="time step of the rasters (default: the last)")
        add(
            "--tokens",
            type=_segment,
            metavar="START,COUNT",
            help="tokens that rasters show: the first, and how many (default: 100 in the middle)",
        )

    def prepare(self, loaded: Sequence[Loaded], given: argparse.Namespace) -> None:
        given.energy = energy_of(given.energy)
        for one in loaded:
            prepare(one, given.time_steps)

    def measure(
        self, loaded: Loaded, images: Images, given: argparse.Namespace, session: Session
    ) -> Spikes:
        from keymix.analysis.spikes import spike_rasters
        from keymix.data.pixels import picture
        from keymix.report.pictures import image_uri
        from keymix.studies.spikes.measure import spike_study

        # rasters first, since what is wrong there shows at once
        number, pixels = _raster_image(images, given.raster_image)
        rasters = spike_rasters(
            loaded.model,
            images.view.normalised(pixels),
            layers=given.raster_layers,
            head=given.head,
            step=given.step,
            tokens=given.tokens,
        )
        with reading(session, loaded, images) as progress:
            found = spike_study(
                loaded.model,
                images.batches(given.batch_size),
                energy=given.energy,
                batch_norm=given.batch_norm,
                progress=progress,
            )
        found.of, found.chance = loaded.studied_on(images), _chance(loaded)
        if rasters:
            found.rasters, found.raster_image = rasters, Path(images.names[number]).name
            found.photo = image_uri(picture(pixels, images.kind).numpy())
        return found


STUDY = _Spikes()


def _segment(text: str) -> tuple[int, int]:
    try:
        start, count = (int(part) for part in text.split(","))
    except ValueError:
        wanted = "give the first token and how many, such as 1500,100"
        raise argparse.ArgumentTypeError(f"{text!r}: {wanted}") from None
    return start, count


def prepare(loaded: Loaded, time_steps: int | None) -> None:
    """Check that a model has spikes, and set its time steps."""
    from keymix.analysis.spikes import neurons_of
    from keymix.models.image_size import take_time_steps

    try:
        neurons_of(loaded.model)
    except UserError as error:
        raise UserError(f"{loaded.name!r}: {error}") from error
    if time_steps is not None:
        take_time_steps(loaded.model, time_steps)


def _chance(loaded: Loaded) -> float | None:
    """Return a run's test accuracy, if it has one that is not above chance."""
    from keymix.analysis.statistics import no_better_than_chance

    if loaded.run is None or not loaded.run.done:
        return None
    summary = loaded.run.summary
    images, top1 = summary.data.sizes["test"], summary.last.test.scores.get("top1")
    classes = len(summary.data.classes)
    if top1 is None or not no_better_than_chance(top1, classes=classes, images=images):
        return None
    return top1


def _raster_image(images: Images, number: int | None) -> tuple[int, Tensor]:
    """Read the image that rasters are of."""
    if number is None:
        for i in range(len(images)):
            with suppress(UserError):
                return i, images.pixels(i)
        number = 0  # which cannot be read either, and says why
    if not 0 <= number < len(images):
        raise UserError(f"--raster-image {number}: there are {len(images)}, numbered from 0")
    return number, images.pixels(number)
