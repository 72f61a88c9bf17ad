# SPDX-License-Identifier: Apache-2.0
"""``keymix train``: one model from a recipe, its fields overridden by options."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from keymix.cli import console, scores
from keymix.cli.console import VerbParser
from keymix.cli.recipe_options import DEFAULT, add_fields, sort_words, typed
from keymix.errors import Interrupted, UserError
from keymix.records import to_json
from keymix.task import LOSS
from keymix.train.recipe import Recipe, from_dict, merge, read_mapping, replace_path

if TYPE_CHECKING:
    from keymix.train.runs import Run

_DESCRIPTION = """\
Train one model. RECIPE is a recipe's name (`keymix list recipes`), a .yaml or
.json file, or a run's folder, which resumes where it stopped."""
_LOOK, _GRACE = 0.1, 20.0
"""Seconds between looks at the processes of a training, and from the first failure to the kill."""
_EPILOG = """\
In brackets: the values of {recipe}. Examples:
  keymix train digits_vit --mixer ska --out ska-digits
  keymix train digits_vit --print-config > mine.yaml; keymix train mine.yaml
"""


def main(argv: list[str]) -> int:
    """Run ``keymix train``."""
    argv = ["--help" if word == "-h" else word for word in argv]
    words = sort_words(argv, _own())
    if len(words.names) > 1:
        raise UserError(f"one RECIPE at a time; got {', '.join(map(repr, words.names))}.")
    named = words.names[0] if words.names else None
    if {"--help", "--help-all"} & words.flags:
        made = parser(_recipe(named or DEFAULT, []), everything="--help-all" in words.flags)
        console.say(made.format_help().rstrip())
        return 0
    VerbParser.run_files(words.options.get("--import", []))
    recipe = _recipe(named, words.options.get("--config", []))
    recipe = replace_path(recipe, typed(words.fields))
    if "--print-config" in words.flags:
        console.say(yaml.safe_dump(recipe.to_dict(), sort_keys=False).rstrip())
        return 0
    out = words.last("--out")
    if out is None:
        out = named if named is not None and Path(named).is_dir() else f"runs/{recipe.name}"
    devices = _devices(words.last("--devices"))
    strategy = words.last("--strategy") or "ddp"
    if strategy not in ("ddp", "fsdp"):
        raise UserError(f"--strategy {strategy}: choose ddp or fsdp.")
    if devices > 1:
        return _launch(argv, devices)
    from keymix.train.engine import train

    overwrite, log = "--overwrite" in words.flags, words.last("--log")
    run = train(recipe, out, overwrite=overwrite, progress="bar", log=log, strategy=strategy)  # type: ignore[arg-type]
    if os.environ.get("RANK", "0") != "0":
        return 0
    _print_run(run, as_json="--json" in words.flags)
    _warn_of_degenerate(run)
    return 0


def parser(recipe: Recipe | None = None, *, everything: bool = True) -> VerbParser:
    """Return the parser of the command line, with every field of a recipe or the common ones."""
    made = _own()
    add_fields(made, recipe, everything=everything)
    made.epilog = _EPILOG.format(recipe=DEFAULT if recipe is None else recipe.name)
    return made


def _own() -> VerbParser:
    """Return the parser of the verb's own options."""
    made = VerbParser(
        prog="keymix train",
        usage="keymix train RECIPE [--out DIR] [--FIELD VALUE ...]",
        description=_DESCRIPTION,
    )
    add = made.add_argument
    add("recipe", metavar="RECIPE", help=argparse.SUPPRESS)
    add("--help-all", action="store_true", help="show every field of a recipe")
    made.add_out("the run", default="runs/RECIPE", resumes=True)
    add("--config", metavar="FILE", help="a YAML or JSON file with some fields")
    made.add_imports()
    made.add_json()
    add("--devices", metavar="N", help="train on N GPUs (or N processes of a CPU) [1]")
    add("--strategy", metavar="S", help="ddp: a copy on each device; fsdp: a part [ddp]")
    add("--log", metavar="NAME", help="log to tensorboard, wandb or mlflow too")
    add("--print-config", action="store_true", help="print the recipe and stop")
    return made


def _devices(given: str | None) -> int:
    if given is None:
        return 1
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"--devices {given}: give how many devices train together, such as 2.")
    if "WORLD_SIZE" in os.environ:
        raise UserError("--devices starts the processes itself: leave it out with torchrun.")
    return int(given)


def _launch(argv: list[str], devices: int) -> int:
    """Run the command in a process per device, as torchrun does, and return how the first ended.

    One that fails ends the others: they notice it by themselves, or are killed. A signal goes to
    all, which save; a second one kills them. torchrun's own launcher would end the first rank while
    it says what was saved, and would have to load PyTorch for this.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    at = argv.index("--devices") if "--devices" in argv else None
    rest = [word for word in argv if not word.startswith("--devices=")]
    if at is not None:
        del rest[at : at + 2]
    shared = {**address, "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices)}
    command = [sys.executable, "-m", "keymix", "train", *rest]
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C reaches them from here
        )
        for rank in range(devices)
    ]
    return watched(running)


def watched(running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for processes that end together, and return the exit code of the first that failed."""
    asked, code, deadline = False, 0, math.inf
    with ExitStack() as stack:
        for process in running:
            stack.callback(process.wait)
            stack.callback(process.kill)
        while time.monotonic() < deadline:
            ended = [process.poll() for process in running]
            code = code or next(filter(None, ended), 0)
            if None not in ended:
                break
            if code and deadline == math.inf:
                deadline = time.monotonic() + _GRACE
            try:
                time.sleep(_LOOK)
            except Interrupted as stop:
                if asked:
                    raise
                asked = True
                for process in running:
                    process.send_signal(stop.signum)
    died = [(number, -code) for number, code in enumerate(ended) if code is not None and code < 0]
    for number, signum in [] if asked else died[:1]:
        raise UserError(
            f"the process of rank {number} of {len(running)} was killed by "
            f"{signal.Signals(signum).name}, and the others were ended. The same command without "
            "--overwrite resumes from the last checkpoint."
        )
    return code if code >= 0 else 128 - code


def _recipe(named: str | None, configs: list[str]) -> Recipe:
    from keymix import recipes

    if named is not None:
        recipe = recipes.resolve(named)
    elif configs:
        recipe = from_dict(read_mapping(configs[0]))
    else:
        raise UserError(
            f"which recipe? Name one of {', '.join(recipes.names())}, or a .yaml file, or a "
            "run's folder."
        )
    for file in configs:
        recipe = merge(recipe, read_mapping(file))
    return recipe


def _print_run(run: Run, *, as_json: bool) -> None:
    summary = run.summary
    if as_json:
        console.say(json.dumps({"folder": str(run.folder), **to_json(summary)}))
        return
    kind = summary.task_kind
    rows = []
    for which, epoch in (("last", summary.last), ("best", summary.best)):
        cells = [which, str(epoch.epoch + 1)]
        rows.append(
            [*cells, *scores.cells(epoch.val, kind), *scores.cells(epoch.test.scores, kind)]
        )
    heads = [f"{split} {head}" for split in ("val", "test") for head in scores.heads(kind)]
    mixer = summary.mixer or "its own mixer"
    title = f"{summary.model}, {mixer}, seed {summary.seed}: {run.folder}"
    console.table(["weights", "epoch", *heads], rows, title=title)
    scores.print_details(summary.last.test, kind, "last epoch, test")


def _warn_of_degenerate(run: Run) -> None:
    """Warn where the answers of the last epoch's weights to the test say nothing of the model."""
    from keymix.train.evaluation import warn_of_degenerate
    from keymix.train.files import PREDICTIONS
    from keymix.train.folder import read_answers

    last, data = run.summary.last.test, run.summary.data
    answers = read_answers(run.folder / PREDICTIONS, data)["last"]
    inputs = f"test {data.kind.nouns}"
    warn_of_degenerate(answers, run.recipe.model, inputs, last.scores.get(LOSS))
