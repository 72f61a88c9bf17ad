# SPDX-License-Identifier: Apache-2.0
"""``keymix predict``: classify images or folders with a trained run, or predict their masks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.parser import VerbParser, image_size_of
from keymix.data.specs import is_events, named, task_name
from keymix.data.tasks import SEGMENTATION
from keymix.errors import UserError
from keymix.report import csv_cells

if TYPE_CHECKING:
    from keymix.train.runs import Prediction


EXAMPLES = """\
examples:
  keymix predict my-run some-image.png a-folder --format csv
  keymix predict my-run a-folder --top 2 --out answers.json --format json
  keymix predict my-masks-run                             its own test split, into predictions/
  keymix predict my-masks-run case20_day0/scans --out case20
  keymix predict my-masks-run --data uwgi:PATH --split val --out val-masks

A run on masks writes a folder: masks/<id>.png with class numbers (masks/<class>/<id>.png with 0 and
255 where a pixel may have several classes), overlays/<id>.png, predictions.csv with run lengths at
the size of each image (id,class,segmentation), and predictions.json. A run on stacks of slices
finds the neighbours beside a file."""


def main(argv: list[str]) -> int:
    """Run ``keymix predict``.

    Args:
        argv: The words after the verb.

    Returns:
        0, or 2 if an image was broken (it is named; the others are answered).
    """
    given = _parsed(argv)
    size = image_size_of(given)

    from keymix.train.runs import load_run, predict

    run = load_run(given.run)
    if task_name(run.recipe.data.spec) == SEGMENTATION.name:
        from keymix.cli import predict_masks

        return predict_masks.predict(run, given, size)
    for option, value in (("--data", given.data), ("--split", given.split)):
        if value is not None:
            raise UserError(
                f"{option} {value} is for runs that predict masks; {given.run!r} classifies. Name "
                "image files or folders, or score it with `keymix eval`."
            )
    if not given.images:
        raise UserError(f"no IMAGE: name image files or folders for {given.run!r} to classify.")
    target = None if given.out is None else Path(given.out)
    if target is not None and target.exists() and not given.overwrite:
        raise UserError(f"--out {given.out!r} exists: name another file or add --overwrite.")
    answers = predict(
        run,
        given.images,
        which=given.weights,
        top=5 if given.top is None else given.top,
        image_size=size,
        resize=given.resize,
        time_steps=given.time_steps,
    )
    good = [answer for answer in answers if answer.error is None]
    broken = [answer for answer in answers if answer.error is not None]
    if given.format == "table" and target is None:
        _table(good, named("image", events=is_events(run.recipe.data.spec)))
    else:
        text = _json(answers) if given.format == "json" else _csv(good)
        _write(text, target)
    for answer in broken:
        console.warn(f"keymix: error: {answer.error}")
    return 2 if broken else 0


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = VerbParser(
        prog="keymix predict",
        description="Classify images, or predict their masks, with a trained run. A broken image "
        "is named, the others are answered, and the exit code is then 2.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the folder given as --out to train")
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="image files and folders")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="the file to write instead of standard output; of masks the folder, default: "
        "predictions",
    )
    parser.add_argument("--top", type=int, metavar="K", help="classes an image; 5")
    parser.add_argument(
        "--data", metavar="SPEC", help="of masks, data to predict a split of; default: the run's"
    )
    parser.add_argument(
        "--split", choices=("test", "val", "train"), help="of masks, which; default: test"
    )
    parser.add_argument(
        "--weights", choices=("last", "best"), default="last", help="of which epoch; default: last"
    )
    parser.add_image_size()
    parser.add_time_steps("as it was trained")
    parser.add_argument("--overwrite", action="store_true", help="replace what --out holds")
    parser.add_imports()
    given: argparse.Namespace = parser.parse_args(argv)
    parser.run_imports(given)
    return given


def _table(answers: Sequence[Prediction], item: str) -> None:
    rows = []
    for answer in answers:
        pairs = zip(answer.classes, answer.probabilities, strict=True)
        rows.append([answer.path, ", ".join(f"{name} {share:.1%}" for name, share in pairs)])
    console.table([item, "classes"], rows, left=2)


def _csv(answers: Sequence[Prediction]) -> str:
    rows = []
    for answer in answers:
        pairs = zip(answer.classes, answer.probabilities, strict=True)
        for rank, (name, share) in enumerate(pairs, start=1):
            rows.append([answer.path, rank, name, f"{share:.6f}"])
    return csv_cells.write(["image", "rank", "class", "probability"], rows)


def _json(answers: Sequence[Prediction]) -> str:
    told: list[dict[str, object]] = []
    for answer in answers:
        if answer.error is not None:
            told.append({"image": answer.path, "error": answer.error})
            continue
        pairs = zip(answer.classes, answer.probabilities, strict=True)
        top = [{"class": name, "probability": share} for name, share in pairs]
        told.append({"image": answer.path, "top": top})
    return json.dumps(told, indent=2) + "\n"


def _write(text: str, target: Path | None) -> None:
    if target is None:
        console.say(text.rstrip("\n"))
        return
    try:
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write --out {str(target)!r}: {error.strerror}.") from None
