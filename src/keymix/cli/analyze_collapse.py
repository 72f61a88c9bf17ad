# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze collapse``: do deep layers repeat their attention, several models overlaid."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.cli.models_and_images import (
    add_arguments,
    load_images,
    load_models,
    refuse_frames,
    spikes_instead,
    warn_of_random,
)
from keymix.errors import one_line

if TYPE_CHECKING:
    from keymix.analysis.collapse_record import CollapseRecord, CollapseStudy
    from keymix.cli.models_and_images import Images, Loaded

SUMMARY = "do deep layers repeat their attention: DeepViT's similarity, entropy, sinks, rank"
RECORD, PAGE = "collapse.json", "collapse.html"

_DESCRIPTION = """\
Measure attention collapse (DeepViT, Eq. 2 and 7): how alike the attention maps of every two
blocks are, of neighbours, of the heads of a block; how many blocks are similar, and which could
share one map. Beside it the entropy of attention, the most attended token, and effective rank and
similarity of the tokens along the blocks. Several models are overlaid."""

_EPILOG = """\
examples:
  keymix analyze collapse my-run
  keymix analyze collapse vit-run deepvit-run --out collapse
  keymix analyze collapse vit_small_patch16_224 --pretrained --images photos --limit 64
  keymix analyze collapse vit_32b --images folder:photos --layers 16-31 --nearest 4
  keymix analyze collapse my-run --json > collapse.json

Blocks are numbered from 1 in words and charts; --layers counts from 0, as the model's paths do.
docs/collapse.md tells every measure with its equation."""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix analyze collapse",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add_arguments(add)
    add(
        "--layers",
        metavar="LIST",
        help="with commas: numbers from 0, ranges such as 6-11, patterns of paths (default: all)",
    )
    add(
        "--threshold",
        type=float,
        default=0.5,
        metavar="TAU",
        help="cosine above which two columns are similar (default 0.5)",
    )
    add(
        "--similar",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="share of similar columns above which a block is like the one before (default 0.8)",
    )
    add(
        "--unique",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of similar columns below which a block is unique (default 0.9)",
    )
    add(
        "--nearest",
        type=int,
        default=2,
        metavar="K",
        help="blocks that a block is held against, the nearest on both sides (default 2)",
    )
    add("--batch-size", type=int, default=8, metavar="B", help="images at a time (default 8)")
    add("--out", metavar="DIR", help=f"write {PAGE}, {RECORD} and SVG files there")
    add("--overwrite", action="store_true", help="replace the analysis that is in DIR")
    add("--json", action="store_true", help="print the whole record as JSON")
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix analyze collapse``.

    Args:
        argv: The words after ``collapse``.

    Returns:
        0, or 2 if an image was broken (it is named; the others are read).
    """
    given = parser().parse_args(argv)
    folder = None
    if given.out is not None:
        folder = console.checked_folder(given.out, RECORD, overwrite=given.overwrite)
    VerbParser.run_imports(given)
    loaded = load_models(given.models, pretrained=given.pretrained)
    refuse_frames(loaded)
    images = [load_images(one, given.images, limit=given.limit) for one in loaded]
    warn_of_random(loaded, console.note)

    from keymix.analysis.collapse_record import CollapseRecord
    from keymix.analysis.study_record import joined
    from keymix.train.signals import interruptible

    stands = "nothing was written" if folder is None else f"{given.out!r} is as it was"
    made: list[CollapseRecord] = []
    with interruptible(lambda: stands), console.made_folder(folder, lambda: bool(made)):
        studies = tuple(_study(*pair, given) for pair in zip(loaded, images, strict=True))
        frame = console.frame("analyze", "collapse", *argv)
        made.append(joined(CollapseRecord, frame, studies=studies))
    (record,) = made
    if folder is not None:
        _write(record, folder)
    _tell(record, as_json=given.json)
    for one in loaded:
        instead = spikes_instead(one)
        if instead:
            console.note(f"{one.label}: spikes form no attention map{instead}")
    if folder is not None:
        console.note(f"{folder / PAGE} shows it; {RECORD} and the charts lie beside it")
    return console.tell_broken(why for each in images for why in each.left_out.values())


def _study(loaded: Loaded, images: Images, given: argparse.Namespace) -> CollapseStudy:
    """Measure one model."""
    from keymix.analysis.collapse import collapse
    from keymix.analysis.collapse_record import CollapseStudy
    from keymix.analysis.study_record import joined
    from keymix.train.model import device_of_this_machine

    layers = None
    if given.layers is not None:
        layers = [part.strip() for part in given.layers.split(",") if part.strip()]
    with _watching(loaded.label, len(images)) as progress:
        found = collapse(
            loaded.model.to(device_of_this_machine()),
            images.batches(given.batch_size),
            layers=layers,
            threshold=given.threshold,
            similar=given.similar,
            unique=given.unique,
            nearest=given.nearest,
            batch_size=given.batch_size,
            progress=progress,
        )
    loaded.model.to("cpu")
    return joined(
        CollapseStudy,
        found.reading(),
        loaded.studied_on(images),
    )


def _tell(record: CollapseRecord, *, as_json: bool) -> None:
    if as_json:
        console.say_json(record)
    elif console.out.is_terminal:
        for study in record.studies:
            _tell_person(study)
    else:
        _tell_pipe(record.studies)
        for study in record.studies:
            console.note(one_line(f"{study.label}: {study.verdict.headline}"))


def _tell_person(study: CollapseStudy) -> None:
    verdict = study.verdict
    console.out.print(one_line(study.label), style="bold", markup=False)
    told = [verdict.headline, *verdict.evidence, *verdict.caveats]
    if study.random:
        told.append("Random weights: this says nothing of a trained model.")
    console.say("\n".join(f"  {one_line(line)}" for line in told) + "\n")


def _tell_pipe(studies: Sequence[CollapseStudy]) -> None:
    """Print a line a block, numbers raw."""
    from keymix.report.collapse import COLUMNS, rows_of

    headings = [key for key, *_ in COLUMNS]
    console.table(
        ["model", "path", *headings],
        [
            [
                study.label,
                row.path,
                *("" if raw is None else f"{raw:.6g}" for raw, _ in row.cells),
            ]
            for study in studies
            for row in rows_of(study)
        ],
    )


def _write(record: CollapseRecord, folder: Path) -> None:
    from keymix.report.collapse import files, render
    from keymix.train.files import write_text

    made = files(record)
    for stale in folder.glob("collapse-*.svg"):
        if stale.name not in made:
            stale.unlink()
    texts = {RECORD: console.json_text(record), **made}
    for name, text in {**texts, PAGE: render(record)}.items():
        write_text(folder / name, text)


@contextmanager
def _watching(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show progress on standard error: a bar at a terminal, else a line a model."""
    label = one_line(label)
    if not console.err.is_terminal:
        console.note(f"reading {total} images with {label}")
        yield None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    told = TextColumn("{task.description}")
    with Progress(*columns, told, console=console.err, transient=True) as bar:
        task = bar.add_task(escape(label), total=total)
        yield lambda done: bar.update(task, completed=done)
