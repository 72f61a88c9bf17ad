# SPDX-License-Identifier: Apache-2.0
"""``keymix eval``: a trained run on its test split or on other data with the same classes."""

from __future__ import annotations

import json
from pathlib import Path

from keymix.cli import console
from keymix.cli.parser import VerbParser


def main(argv: list[str]) -> int:
    """Run ``keymix eval``.

    Args:
        argv: The words after the verb.

    Returns:
        0; mistakes are raised as UserError.
    """
    parser = VerbParser(
        prog="keymix eval",
        description="Evaluate a trained run on its test split, or on other data.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder given as --out to train")
    parser.add_argument("--data", metavar="SPEC", help="other data with the run's classes")
    parser.add_argument(
        "--split", choices=("test", "val", "train"), default="test", help="default: test"
    )
    parser.add_argument(
        "--weights", choices=("last", "best"), default="last", help="of which epoch; default: last"
    )
    parser.add_argument("--json", action="store_true", help="tell the result as JSON")
    parser.add_imports()
    given = parser.parse_args(argv)
    parser.run_imports(given)

    from keymix.train.runs import evaluate

    scores = evaluate(Path(given.run), given.data, which=given.weights, split=given.split)
    if given.json:
        console.say(json.dumps(scores))
        return 0
    top5 = "–" if scores["top5"] is None else f"{100 * scores['top5']:.2f}"
    row = [scores["data"], scores["split"], scores["weights"], str(scores["images"])]
    row += [f"{scores['loss']:.4f}", f"{100 * scores['top1']:.2f}", top5]
    console.table(["data", "split", "weights", "images", "loss", "top1 %", "top5 %"], [row], left=3)
    return 0
