# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze spikes``: firing rates, rasters, synaptic operations and energy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.cli.models_and_images import (
    add_arguments,
    load_images,
    load_models,
    warn_of_random,
)
from keymix.errors import UserError, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.analysis.spikes_record import RasterReading, SpikesRecord, SpikesStudy
    from keymix.cli.models_and_images import Images, Loaded

SUMMARY = "what spikes come to: firing rates, rasters, synaptic operations, energy"
RECORD, PAGE = "spikes.json", "spikes.html"
PIPED = ("total", "rates")
"""Tables that a pipe gets; layers, steps and operations are for files."""

_DESCRIPTION = """\
Measure the spikes of a spiking network: firing rates of Q, K, A_t, X', X'' and the MLPs by stage
(QKFormer, Table 7), spikes of the token attention (Fig. 3), what values go into each layer,
synaptic operations and energy with their assumptions, and the same network without spikes beside
it. Several models stand side by side."""

_EPILOG = """\
examples:
  keymix analyze spikes my-run
  keymix analyze spikes qkformer-run spikformer-run --out spikes
  keymix analyze spikes my-run --time-steps 2 --batch-norm separate --energy int8
  keymix analyze spikes my-run --raster-image 5 --raster-layers 0,1 --head 2 --step 0 --out spikes
  keymix analyze spikes my-run --json > spikes.json

A run on recordings of events is shown recordings, as frames. Heads, steps, tokens and images of
rasters count from 0. docs/spikes.md tells every measure and
every assumption."""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix analyze spikes",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add_arguments(add)
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
        help="energies in 45 nm (Horowitz 2014): fp32 (4.6 pJ a multiply-add, 0.9 an addition; "
        "default), fp16, int32, int8; or two numbers of pJ: MAC,AC",
    )
    add(
        "--batch-norm",
        choices=("folded", "separate"),
        default="folded",
        help="folded into the weights before it, or one multiply-add an element (default folded)",
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
        help="which layers of Q-K token attention: numbers among them from 0, or patterns of paths "
        "(default: the first of each stage)",
    )
    add("--head", type=int, default=0, metavar="H", help="head of the rasters (default 0)")
    add("--step", type=int, metavar="S", help="time step of the rasters (default: the last)")
    add(
        "--tokens",
        metavar="START,COUNT",
        help="tokens that rasters show (default: 100 in the middle)",
    )
    add("--batch-size", type=int, default=8, metavar="B", help="images at a time (default 8)")
    add("--out", metavar="DIR", help=f"write {PAGE}, {RECORD}, CSV and SVG files there")
    add("--overwrite", action="store_true", help="replace the analysis that is in DIR")
    add("--json", action="store_true", help="print the whole record as JSON")
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix analyze spikes``.

    Args:
        argv: The words after ``spikes``.

    Returns:
        0, or 2 if an image was broken (it is named; the others are read).
    """
    from keymix.analysis.energy import energy_of

    given = parser().parse_args(argv)
    given.segment = _segment(given.tokens)
    folder = None
    if given.out is not None:
        folder = console.checked_folder(given.out, RECORD, overwrite=given.overwrite)
    energy_of(given.energy)
    VerbParser.run_imports(given)
    loaded = load_models(given.models, pretrained=given.pretrained)
    for one in loaded:
        _prepare(one, given.time_steps)
    images = [
        load_images(one, given.images, limit=given.limit, time_steps=given.time_steps)
        for one in loaded
    ]
    warn_of_random(loaded, console.note)

    from keymix.analysis.spikes_record import SpikesRecord
    from keymix.analysis.study_record import joined
    from keymix.train.signals import interruptible

    stands = "nothing was written" if folder is None else f"{given.out!r} is as it was"
    made: list[SpikesRecord] = []
    with interruptible(lambda: stands), console.made_folder(folder, lambda: bool(made)):
        studies = tuple(_study(*pair, given) for pair in zip(loaded, images, strict=True))
        frame = console.frame("analyze", "spikes", *argv)
        made.append(joined(SpikesRecord, frame, studies=studies))
    (record,) = made
    if folder is not None:
        _write(record, folder)
    _tell(record, as_json=given.json)
    if folder is not None:
        console.note(f"{folder / PAGE} shows it; {RECORD}, CSV files and charts lie beside it")
    return console.tell_broken(why for each in images for why in each.left_out.values())


def _segment(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        start, count = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"--tokens {text!r}: give the first token and how many, such as 1500,100"
        ) from None
    return start, count


def _prepare(loaded: Loaded, time_steps: int | None) -> None:
    """Check that a model has spikes, and set its time steps.

    Raises:
        UserError: If it has none; it names models that do.
    """
    from keymix.analysis.spikes import checked_neurons

    try:
        checked_neurons(loaded.model)
    except UserError as error:
        raise UserError(f"{loaded.name!r}: {error}") from error
    if time_steps is None:
        return
    change = getattr(loaded.model, "set_time_steps", None)
    if change is None:
        raise UserError(f"{loaded.name!r} takes no other number of time steps: drop --time-steps")
    change(time_steps)


def _study(loaded: Loaded, images: Images, given: argparse.Namespace) -> SpikesStudy:
    """Measure one model."""
    from keymix.analysis.spikes import spike_study
    from keymix.analysis.spikes_record import SpikesStudy
    from keymix.analysis.study_record import joined
    from keymix.train.model import device_of_this_machine

    model = loaded.model.to(device_of_this_machine())
    raster_image, photo, rasters = _rasters(
        loaded, images, given
    )  # first, since what is wrong there shows at once
    with _watching(loaded.label, len(images), images.kind.nouns) as progress:
        found = spike_study(
            model,
            images.batches(given.batch_size),
            energy=given.energy,
            batch_norm=given.batch_norm,
            batch_size=given.batch_size,
            progress=progress,
        )
    loaded.model.to("cpu")
    return joined(
        SpikesStudy,
        found.reading(),
        loaded.studied_on(images),
        notes=(*_at_chance(loaded), *found.notes),
        raster_image=raster_image,
        photo=photo,
        rasters=rasters,
    )


def _at_chance(loaded: Loaded) -> list[str]:
    """Say of a run that its test accuracy, if it has one, is not above chance."""
    from keymix.analysis.statistics import no_better_than_chance

    if loaded.run is None or not loaded.run.done:
        return []
    summary = loaded.run.summary
    images, top1 = summary.data.sizes["test"], summary.last.test.scores.get("top1")
    classes = len(summary.data.classes)
    if top1 is None or not no_better_than_chance(top1, classes=classes, images=images):
        return []
    return [
        f"The run's test accuracy, {100 * top1:.1f} %, is no better than chance: its rates and its "
        "energy say nothing of a network that works."
    ]


def _rasters(
    loaded: Loaded, images: Images, given: argparse.Namespace
) -> tuple[str | None, str | None, tuple[RasterReading, ...]]:
    """Read the spikes of the token attention on one image: its name, itself, and the rasters."""
    from keymix.analysis.spikes_raster import spike_rasters
    from keymix.report.pictures import image_uri

    number, pixels = _raster_image(images, given.raster_image)
    found = spike_rasters(
        loaded.model,
        images.view.normalised(pixels),
        layers=given.raster_layers,
        head=given.head,
        step=given.step,
        tokens=given.segment,
    )
    if not found:
        return None, None, ()
    photo = image_uri(images.picture(pixels).numpy())
    return Path(images.names[number]).name, photo, tuple(raster.reading() for raster in found)


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


def _tell(record: SpikesRecord, *, as_json: bool) -> None:
    if as_json:
        console.say_json(record)
    elif console.out.is_terminal:
        _tell_person(record)
    else:
        _tell_pipe(record)


def _tell_person(record: SpikesRecord) -> None:
    from keymix.report.spikes_tables import headline, tables

    for study in record.studies:
        console.out.print(one_line(study.label), style="bold", markup=False)
        told = [headline(study), *study.notes]
        if study.random:
            told.append("Random weights: this says nothing of a trained model.")
        console.say("\n".join(f"  {one_line(line)}" for line in told) + "\n")
    for table in tables(record):
        if table.shown:
            console.show(table)
    cost = record.studies[0].cost
    console.say(
        f"{cost.mac:g} pJ a multiply-add, {cost.ac:g} pJ an addition ({cost.name}); "
        "memory access is not counted. --out DIR writes every layer and every assumption."
    )


def _tell_pipe(record: SpikesRecord) -> None:
    """Print the totals and the rates by stage, each line led by its table's name."""
    from keymix.report.spikes_tables import headline, tables

    for table in tables(record):
        if table.key in PIPED:
            for line in table.piped():
                console.line((table.key, *line))
    for study in record.studies:
        for told in (headline(study), *study.notes):
            console.note(one_line(f"{study.label}: {told}"))


def _write(record: SpikesRecord, folder: Path) -> None:
    from keymix.report.spikes import files, render
    from keymix.train.files import write_text

    made = files(record)
    for pattern in ("spikes-*.svg", "spikes-*.csv"):
        for stale in folder.glob(pattern):
            if stale.name not in made:
                stale.unlink()
    texts = {RECORD: console.json_text(record), **made}
    for name, text in {**texts, PAGE: render(record)}.items():
        write_text(folder / name, text)


@contextmanager
def _watching(label: str, total: int, kind: str) -> Iterator[Callable[[int], None] | None]:
    """Show progress on standard error: a bar at a terminal, else a line a model."""
    label = one_line(label)
    if not console.err.is_terminal:
        console.note(f"reading {total} {kind} with {label}")
        yield None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    told = TextColumn("{task.description}")
    with Progress(*columns, told, console=console.err, transient=True) as bar:
        task = bar.add_task(escape(label), total=total)
        yield lambda done: bar.update(task, completed=done)
