# SPDX-License-Identifier: Apache-2.0
"""``keymix predict``: what a trained run answers to files, such as classes or masks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.console import VerbParser, image_size_of, overlap_of
from keymix.data.specs import kind_of_spec, task_name
from keymix.errors import UserError
from keymix.report.tables import csv_text
from keymix.task import Task, get_task

if TYPE_CHECKING:
    from keymix.train.parts import AnswersPart, Prediction, PredictionRows

OF_PIXELS = frozenset({"flips", "overlap", "window"})
OPTIONS = OF_PIXELS | {"data", "per_image", "score_threshold", "split", "time_steps", "top"}
"""Options that not every task takes."""
FOLDER = "predictions"
"""Where predictions go that are written into a folder."""

EXAMPLES = """\
examples:
  keymix predict my-run some-image.png a-folder --format csv
  keymix predict my-run a-folder --top 2 --json --out answers.json
  keymix predict model.onnx a-folder     a file that keymix export wrote
  keymix predict my-masks-run            its own test split, into predictions/
  keymix predict my-masks-run case20_day0/scans --out case20
  keymix predict my-masks-run scans/patient7 --out seven    a DICOM series, or NIfTI
  keymix predict my-masks-run slides --window 512 --overlap 0.5 --flips both
  keymix predict my-masks-run --data uwgi:PATH --split val --out val-masks

A run on masks prints one summary: in how many images each class was found, and
its mean share of their pixels. --per-image prints a line per image, --format csv
a line per image and class, with areas. It writes a folder: masks/<id>.png with
class numbers (masks/<class>/<id>.png with 0 and 255 where a pixel may have
several classes), overlays/<id>.png, predictions.csv with run lengths at the size
of each image (id,class,segmentation), predictions.json, and of volumes (NIfTI,
DICOM, TIFF) volumes/ in their own format and place. A run on stacks of slices
finds the neighbours next to a file. A detector's folder has detections.json,
in COCO's format, overlays/<id>.jpg and predictions.json."""


def main(argv: list[str]) -> int:
    """Run ``keymix predict``; 2 if a file was broken: it is named, the others are answered."""
    given = parser().parse_args(argv)
    if given.json and given.format not in (None, "json"):
        raise UserError(f"--json and --format {given.format} exclude each other: give one.")
    given.format = "json" if given.json else given.format or "table"
    size = image_size_of(given)
    VerbParser.run_imports(given)

    from keymix.train.exported import is_exported
    from keymix.train.files import write_text
    from keymix.train.parts import answers_of
    from keymix.train.predict import load, predict
    from keymix.train.pushed import is_pushed
    from keymix.train.runs import load_run

    shipped = is_exported(given.run) or is_pushed(given.run)
    file = load(given.run) if shipped else None
    spec = load_run(given.run).recipe.data.spec if file is None else file.data.spec
    task = get_task(task_name(spec)) if file is None else file.task
    part = answers_of(task)
    for name in sorted(OPTIONS - part.predict_options):
        if (value := getattr(given, name)) is not None:
            raise UserError(_not_for(name, value, given.run, task))
    if part.writer:
        return _into_folder(part, given, size)
    if not given.images:
        raise UserError(f"no IMAGE: name image files or folders: {given.run!r} {task.does}.")
    target = console.checked_file(given)
    answers = predict(
        given.run,
        given.images,
        which=given.weights,
        top=5 if given.top is None else given.top,
        image_size=size,
        resize=given.resize,
        time_steps=given.time_steps,
    )
    good = [answer for answer in answers if answer.error is None]
    if given.format == "table" and target is None:
        _table(part.table(good, kind_of_spec(spec).noun))
    else:
        text = _json(part, answers) if given.format == "json" else _csv(part.csv(good))
        if target is None:
            console.say(text.rstrip("\n"))
        else:
            write_text(target, text)
    return console.report_broken(each.error for each in answers if each.error is not None)


def _not_for(name: str, value: object, run: str, task: Task) -> str:
    """Say that an option is not for a task, and what to do."""
    option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
    remedy = "Leave it out."
    if name in ("data", "split"):
        remedy = "Name image files or folders, or score it with `keymix eval`."
    return f"{option} is not for the run {run!r}, which {task.does}. {remedy}"


def _into_folder(part: AnswersPart, given: argparse.Namespace, size: tuple[int, int] | None) -> int:
    """Write predictions of files, or of a split of data, into a folder."""
    from keymix.train.parts import Wanted

    answers, written = part.write(
        Wanted(
            run=Path(given.run),
            paths=given.images,
            out=Path(given.out or FOLDER),
            data=given.data,
            split=given.split,
            which=given.weights,
            image_size=size,
            resize=given.resize,
            overlap=overlap_of(given),
            flips=given.flips,
            score_threshold=given.score_threshold,
            overwrite=given.overwrite,
        )
    )
    good = [answer for answer in answers if answer.error is None]
    if given.format == "json":
        console.say(_json(part, answers).rstrip("\n"))
    elif given.format == "csv":
        console.say(_csv(part.csv(good)).rstrip("\n"))
    elif good:
        _table(part.table(good, "image") if given.per_image else part.summary(good, "image"))
    console.note(written)
    return console.report_broken(each.error for each in answers if each.error is not None)


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix predict",
        description="Classify images, or predict masks or boxes, with a trained run.\n"
        "Broken images are named, the others are predicted, and the exit code is then 2.",
        epilog=EXAMPLES,
    )
    made.add_run("; or what was exported or pushed")
    made.add_argument("images", metavar="IMAGE", nargs="*", help="image files and folders")
    made.add_argument(
        "--format",
        choices=("table", "csv", "json"),
        help="format of predictions, printed or in a file (default: table)",
    )
    made.add_json()
    made.add_argument(
        "--per-image",
        action="store_true",
        default=None,
        help="for masks and boxes: a line per image in place of a summary",
    )
    made.add_out(
        "the predictions, or a folder of masks or boxes,",
        metavar="PATH",
        default="printed; a folder: predictions",
    )
    made.add_argument("--top", type=int, metavar="K", help="classes per image (default: 5)")
    made.add_argument(
        "--data",
        metavar="SPEC",
        help="for masks and boxes: other data to predict (default: the run's)",
    )
    made.add_argument(
        "--split",
        choices=("test", "val", "train"),
        help="for masks and boxes: the split of the data (default: test)",
    )
    made.add_argument(
        "--score-threshold",
        type=float,
        metavar="X",
        help="for boxes: the score from which on they are drawn and counted (default: 0.5)",
    )
    made.add_image_size_of_run()
    made.add_time_steps("as it was trained")
    made.add_imports()
    return made


def _table(table: PredictionRows) -> None:
    rows = [[str(cell) for cell in row] for row in table.rows]
    console.table(list(table.heads), rows, left=table.left)


def _csv(table: PredictionRows) -> str:
    return csv_text(list(table.heads), [list(row) for row in table.rows])


def _json(part: AnswersPart, answers: Sequence[Prediction]) -> str:
    return json.dumps([part.plain(answer) for answer in answers], indent=2) + "\n"
