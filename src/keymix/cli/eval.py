# SPDX-License-Identifier: Apache-2.0
"""``keymix eval``: a trained run on its test split or on other data with the same classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from keymix.cli import console, scores
from keymix.cli.console import VerbParser, image_size_of, overlap_of
from keymix.data.specs import kind_of_spec, task_name
from keymix.records import from_json
from keymix.task import get_task
from keymix.train.record import Evaluation

EXAMPLES = """\
examples:
  keymix eval my-run
  keymix eval my-run --data parquet:more --split val
  keymix eval my-run --image-size 48 --resize interpolate
  keymix eval my-run --image-size 32,48 --resize pool_values --json
  keymix eval my-spiking-run --time-steps 2
  keymix eval my-masks-run --window 512 --overlap 0.5 --flips horizontal

A run sees images of another size through the model's set_input_size: position embeddings are
resampled. Mixers that learned something per position (static_key, conv_static_key, key_value with
pos_dim) follow --resize: 'interpolate' resamples their keys to the new grid, 'pool_values' keeps
the keys and averages the values onto their grid.

The weights of a spiking model hold for any number of time steps T. A run on still images shows each
one T times; a run on recordings of events makes T frames of each."""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix eval",
        description="Evaluate a trained run on its test split, or on other data.",
        epilog=EXAMPLES,
    )
    made.add_run()
    made.add_argument("--data", metavar="SPEC", help="other data with the run's classes")
    made.add_argument(
        "--split",
        choices=("test", "val", "train"),
        default="test",
        help="split of the data (default: test)",
    )
    made.add_image_size_of_run()
    made.add_time_steps("as it was trained")
    made.add_json()
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix eval``."""
    given = parser().parse_args(argv)
    VerbParser.run_imports(given)

    size = image_size_of(given)

    from keymix.train.runs import evaluate

    found = evaluate(
        Path(given.run),
        given.data,
        which=given.weights,
        split=given.split,
        image_size=size,
        resize=given.resize,
        time_steps=given.time_steps,
        overlap=overlap_of(given),
        flips=given.flips,
    )
    if given.json:
        console.say(json.dumps(found))
        return 0
    row = [found["data"], found["split"], found["weights"]]
    heads = ["data", "split", "weights"]
    if size is not None:
        heads.append("pixels" if given.window is None else "window")
        row.append(f"{size[0]}x{size[1]}")
    if given.time_steps is not None:
        heads.append("T")
        row.append(str(found["time_steps"]))
    left, task = len(heads), get_task(task_name(found["data"]))
    kind = replace(task, scores=tuple(score for score in task.scores if score.key in found))
    row += [str(found["images"]), *scores.cells(found, kind)]
    heads += [kind_of_spec(found["data"]).nouns, *scores.heads(kind)]
    console.table(heads, [row], left=left)
    scores.print_details(
        from_json(Evaluation, found, where="the evaluation").of(kind),
        kind,
        f"{found['weights']} epoch, {found['split']}",
    )
    return 0
