# SPDX-License-Identifier: Apache-2.0
"""``keymix report``: make a comparison's page and tables again from its run folders."""

from __future__ import annotations

import argparse
import json

from keymix.cli import console
from keymix.cli.comparison import plain, print_open_runs, print_result, watching
from keymix.cli.console import VerbParser


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix report",
        description="Rebuild report.html, results.csv and results.json of a comparison from its "
        "run folders. Runs that finished since are read, wherever they were trained; nothing is "
        "trained and no cost is measured.",
    )
    made.add_argument("folder", metavar="DIR", help="the folder given as --out to compare")
    made.add_argument(
        "--images",
        action=argparse.BooleanOptionalAction,
        help="pictures of the test images in the report (default: as last time)",
    )
    made.add_json()
    made.add_open()
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix report``; mistakes are raised as UserError."""
    given = parser().parse_args(argv)

    from keymix.compare.run import rebuild

    with watching() as watch:
        result = rebuild(given.folder, imports=given.imports, images=given.images, progress=watch)
    if given.json:
        console.say(json.dumps(plain(result), ensure_ascii=False))
        print_open_runs(result)
    else:
        print_result(result)
    if given.open:
        console.open_page(result.report)
    return 0
