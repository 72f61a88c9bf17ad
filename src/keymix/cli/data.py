# SPDX-License-Identifier: Apache-2.0
"""``keymix data``: ``check`` validates a data set before hours are spent, ``shard`` rewrites it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.data.specs import kind_of_spec, task_name
from keymix.errors import UserError, missing, one_line, unknown
from keymix.task import get_task
from keymix.train.recipe import DataConfig, TaskConfig

if TYPE_CHECKING:
    from keymix.data.check import Progress
    from keymix.data.findings import Finding, Report

_SHOWN = 5  # places named in the table; --json and --out name all
_SILENCE = 30.0  # seconds between two lines of progress where there is no terminal

_OF_ONE_KIND: Mapping[str, tuple[type, str, str]] = {
    "frames_by": (str, "UNIT", "of events, number or time (default: number)"),
    "masks": (
        str,
        "KIND",
        "of images with masks, as task.options.masks will be in training; like the next three: "
        "exclusive or multilabel (default: exclusive)",
    ),
    "stack": (int, "N", "slices that will be an image's channels (default: 1)"),
    "split_by": (str, "UNIT", "case or slice (default: case)"),
    "test_fraction": (float, "F", "share of the images that will become test (default: 0.04)"),
}

_HELP = """\
usage: keymix data check DATA [--time-steps T] [--frames-by UNIT] [--masks KIND] [--stack N]
                         [--split-by UNIT] [--test-fraction F] [--json] [--out FILE] [--overwrite]
                         [--import FILE.py]
       keymix data shard DATA --out DIR [--format FORMAT] [--shard-size MB | --images-per-shard N]
                         [--overwrite] [--json] [--import FILE.py]

  check     decode every image, mask or recording of a data set and find what would stop training
            or falsify its results: broken ones, ones in two splits, bad labels and masks, empty
            classes, odd files
  shard     write images with a class each as shards, which `stream:DIR` reads in order while
            training

`keymix data check --help` and `keymix data shard --help` show more.
"""


def main(argv: list[str]) -> int:
    """Run ``keymix data``: 0, or 1 if the data would stop training or falsify its results."""
    if not argv:
        raise missing("verb of keymix data", _VERBS)
    if argv[0] in ("-h", "--help"):
        console.say(_HELP.rstrip())
        return 0
    if argv[0] not in _VERBS:
        raise unknown("verb of keymix data", argv[0], _VERBS)
    return _VERBS[argv[0]](argv[1:])


def parsers() -> dict[str, VerbParser]:
    """Return the parsers of the command lines, by what follows ``keymix``."""
    return {"data check": _parser(), "data shard": _shard_parser()}


def _parser() -> VerbParser:
    made = VerbParser(
        prog="keymix data check",
        description="Decode every image, mask or recording of a data set and report all that is "
        "wrong with it.",
        epilog="The exit code is 0 for data that is fit for training, warnings or not; 1 if "
        "something would stop training or falsify its results; 2 for a mistake in the command.\n\n"
        "examples:\n  keymix data check photos\n  keymix data check cifar10\n"
        "  keymix data check parquet:birds --json\n"
        "  keymix data check cifar10dvs:CIFAR10DVS --time-steps 16\n"
        "  keymix data check uwgi:uw-madison-gi --masks multilabel\n",
    )
    made.add_argument("data", metavar="DATA", help="a path, or a spec (`keymix list data`)")
    made.add_argument(
        "--time-steps",
        type=int,
        metavar="T",
        help="frames per recording of events, as data.time_steps in training (default: 10)",
    )
    for name, (kind, metavar, text) in _OF_ONE_KIND.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    made.add_json()
    made.add_out("the whole report, as JSON,", metavar="FILE")
    made.add_imports()
    return made


def _check(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    VerbParser.run_imports(given)
    if given.time_steps is not None and given.time_steps < 1:
        raise UserError(f"--time-steps {given.time_steps}: give 1 or more.")
    target = console.checked_file(given)

    from keymix.data.check import check, resolve
    from keymix.data.specs import Options
    from keymix.train.files import write_text

    of_one_kind = {name: getattr(given, name) for name in _OF_ONE_KIND}
    # refuse what training would
    DataConfig(spec=given.data, **{k: v for k, v in of_one_kind.items() if hasattr(DataConfig, k)})
    task = get_task(task_name(given.data))
    TaskConfig(options={name: of_one_kind.get(name) for name in task.data_options}).checked(task)
    nouns = kind_of_spec(resolve(given.data)[0].name).nouns
    with _watching(nouns) as progress:
        options = Options(time_steps=given.time_steps, **of_one_kind)
        report = check(given.data, options, progress=progress)
    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    if target is not None:
        write_text(target, text + "\n")
    if given.json:
        console.say(text)
    else:
        _print_report(report)
    return 0 if report.fit else 1


def _shard_parser() -> VerbParser:
    made = VerbParser(
        prog="keymix data shard",
        description="Write a data set of images with a class each as shards: encoded images as "
        "they are, split by split, training images in a random order.",
        epilog="examples:\n  keymix data shard folder:photos --out shards\n"
        "  keymix data shard imagenet:ILSVRC --out shards --format webdataset --shard-size 500\n",
    )
    made.add_argument("data", metavar="DATA", help="a path, or a spec (`keymix list data`)")
    made.add_argument(
        "--format",
        choices=("parquet", "webdataset"),
        default="parquet",
        help="format of shards: parquet, as Hugging Face's, or webdataset, tar (default: parquet)",
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--shard-size", type=float, metavar="MB", help="megabytes of a shard (default: 256)"
    )
    size.add_argument("--images-per-shard", type=int, metavar="N", help="images of a shard")
    made.add_out("the shards", required=True)
    made.add_imports()
    made.add_json()
    return made


def _shard(argv: list[str]) -> int:
    given = _shard_parser().parse_args(argv)
    VerbParser.run_imports(given)
    for name in ("shard_size", "images_per_shard"):
        if (value := getattr(given, name)) is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number above 0.")

    from keymix.data.check import resolve
    from keymix.data.sharding import SHARD_MB, write_shards
    from keymix.data.shards import INDEX
    from keymix.train.files import checked_output, write_error

    out = checked_output(Path(given.out), manifest=INDEX, what="shards", overwrite=given.overwrite)
    entry, argument = resolve(given.data)
    spec = f"{entry.name}:{argument}" if argument else entry.name
    try:
        with _watching("images", "written") as progress:
            made = write_shards(
                spec,
                out,
                layout=given.format,
                images=given.images_per_shard,
                megabytes=given.shard_size or SHARD_MB,
                progress=progress,
            )
    except OSError as error:
        raise write_error(out, error) from error
    images = {split: sum(each.images for each in of) for split, of in made.splits.items()}
    shards = {split: len(of) for split, of in made.splits.items()}
    if given.json:
        console.say(json.dumps({"folder": given.out, "images": images, "shards": shards}))
        return 0
    parts = [f"{images[split]:,} {split} images in {shards[split]}" for split in images]
    console.say(
        f"wrote {', '.join(parts)} {made.layout} shards; next: keymix train RECIPE --data "
        f"{shlex.quote(f'stream:{given.out}')}"
    )
    return 0


_VERBS = {"check": _check, "shard": _shard}


@contextmanager
def _watching(items: str, done_with: str = "checked") -> Iterator[Progress]:
    """Show progress on standard error: a bar at a terminal, else a line now and then."""
    if not console.err.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _SILENCE:
                last = time.monotonic()
                console.note(f"{done} of {total} {items} {done_with}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), items, TimeRemainingColumn())
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task(items, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_report(report: Report) -> None:
    """Say the verdict, then the facts, then each finding with what to do about it."""
    _line("verdict", f"{report.spec}: {report.verdict}", style="green" if report.fit else "red")
    for name, text in report.lines:
        _line(name, text)
    if report.findings:
        rows = [
            [f.level, f.what, _places(f), f.remedy or "–", str(f.count)] for f in report.findings
        ]
        console.table(["level", "what", "where", "what to do", "count"], rows, left=4)


def _line(name: str, text: str, *, style: str | None = None) -> None:
    if console.out.is_terminal:
        console.out.print(f"{name:<11}", end="", style="bold")
        console.out.print(one_line(text), markup=False, style=style)
    else:
        console.line((name, text))


def _places(finding: Finding) -> str:
    shown = "; ".join(finding.where[:_SHOWN])
    more = finding.count - _SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown
