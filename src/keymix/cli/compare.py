# SPDX-License-Identifier: Apache-2.0
"""``keymix compare``: several mixers under one recipe, with accuracy, cost and doubt."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from keymix.cli import console
from keymix.cli.comparison import plain, print_open_runs, print_result, watching
from keymix.cli.console import VerbParser
from keymix.cli.recipe_options import (
    DEFAULT,
    PER_RUN,
    SHORT,
    Words,
    add_fields,
    sort_words,
    typed,
)
from keymix.errors import UserError, whole_number
from keymix.recipes import resolve

if TYPE_CHECKING:
    from keymix.train.recipe import Recipe

_SHORT = {name: path for name, path in SHORT.items() if path not in PER_RUN}
_NAMED = ("data.spec", "model.name", "schedule.epochs", "data.limit")
"""Fields that a comparison takes as arguments of their own."""
_TEXTS = ("mixers", "recipe", "match", "baseline", "tune", "on")
"""Options whose words are taken as they are."""
_DEFAULT_OUT = "keymix-compare"
T = TypeVar("T")

_DESCRIPTION = """\
Train several token mixers under one recipe, paired by seed, and report the
score of the data's task (accuracy; for masks, their overlap with the truth),
the cost, and how certain they are. Without options: softmax, static keys and
the identity control on scikit-learn's digits, three seeds, three minutes on
two cores. Run it again to resume; further mixers and seeds join the runs."""

_EXAMPLES = """\
Fields of the recipe are options too, for all runs alike: --optim.lr 1e-3.

examples:
  keymix compare
  keymix compare --data folder:photos --mixers mhsa,ska,cska --seeds 5
  keymix compare --data parquet:cifar10 --limit 10000 --optim.lr 1e-3
  keymix compare --from my-run --data folder:photos --mixers mhsa,ska
  keymix compare --data uwgi:PATH --mixers "mhsa,kv,kv(pos_dim=50)"
  keymix compare --mixers qkta,ssa --ann --data parquet:cifar10
  keymix compare --import my_mixer.py --mixers mhsa,name_in_that_file
"""


def main(argv: list[str]) -> int:
    """Run ``keymix compare``: 0, or 1 if some run failed; mistakes are raised as UserError."""
    argv = ["--help" if word == "-h" else word for word in argv]
    words = sort_words(argv, _own(), short=_SHORT)
    if {"--help", "--help-all"} & words.flags:
        everything = "--help-all" in words.flags
        recipe = resolve(words.last("--recipe") or DEFAULT) if everything else None
        console.say(parser(recipe, everything=everything).format_help().rstrip())
        return 0
    if words.names:
        raise UserError(
            f"unexpected {' '.join(words.names)!r}. Mixers go behind --mixers, data behind --data."
        )
    imports = words.options.get("--import", [])
    VerbParser.run_files(imports)
    fields = typed(words.fields)
    data, model, epochs, limit = (fields.pop(path, None) for path in _NAMED)
    if "--no-flip" in words.flags:
        fields["augment.flip"] = False

    number = _number("--run", words, whole_number)
    part = "--plan" if "--plan" in words.flags else "--run" if number is not None else ""
    if part and words.last("--on") is not None:
        raise UserError(f"{part} and --on exclude each other: --on trains all runs.")
    if part and "--overwrite" in words.flags:
        raise UserError(f"{part} and --overwrite exclude each other: plan or train first.")
    if part == "--plan" and number is not None:
        raise UserError("--plan and --run exclude each other: --plan numbers the runs.")

    from keymix.compare.question import Question
    from keymix.compare.run import answer, plan_comparison, train_one

    given: dict[str, Any] = {name: words.last(f"--{name}") for name in _TEXTS}
    question = Question(
        **given,
        data=data,
        model=model,
        start=words.last("--from"),
        layers=words.last("--layers"),
        epochs=epochs,
        limit=limit,
        overrides=fields,
        seeds=_seeds(words.last("--seeds")),
        out=words.last("--out") or _DEFAULT_OUT,
        controls="--no-controls" not in words.flags,
        ann="--ann" in words.flags,
        reference="--no-reference" not in words.flags,
        margin=_number("--margin", words, float),
        minutes=_number("--minutes", words, float),
        processes=_number("--processes", words, whole_number),
        gpus_per_run=_number("--gpus-per-run", words, float),
        imports=imports,
        overwrite="--overwrite" in words.flags,
        images=_images(words.flags),
        command=shlex.join(["keymix", "compare", *_of_all_runs(argv)]),
    )
    with watching() as watch:
        if "--plan" in words.flags:
            console.say(plan_comparison(question, progress=watch))
            return 0
        if number is not None:
            return 0 if train_one(question, number, progress=watch) else 1
        result = answer(question, progress=watch)
    if "--json" in words.flags:
        console.say(json.dumps(plain(result), ensure_ascii=False))
        print_open_runs(result)
    else:
        print_result(result)
    if "--open" in words.flags:
        console.open_page(result.report)
    return 1 if result.failed else 0


def _of_all_runs(argv: list[str]) -> list[str]:
    """Return the words that repeat a comparison as a whole, whatever part of it was asked for."""
    rest = [word for word in argv if word != "--plan" and not word.startswith("--run=")]
    if "--run" in rest:
        place = rest.index("--run")
        del rest[place : place + 2]
    return rest


def _images(flags: Collection[str]) -> bool | None:
    """Whether pictures of the data were asked for, or not to be there; None for neither."""
    asked = {"--images", "--no-images"} & {*flags}
    if len(asked) > 1:
        raise UserError("--images and --no-images exclude each other. Give one of them.")
    return asked == {"--images"} if asked else None


def _number(option: str, words: Words, read: Callable[[str], T]) -> T | None:
    """Read an option's number; None if it was not given."""
    text = words.last(option)
    try:
        return None if text is None else read(text)
    except ValueError:
        kind = "number" if read is float else "whole number"
        raise UserError(f"option {option} {text!r}: give a {kind}.") from None


def _seeds(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [whole_number(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(
            f"option --seeds {text!r}: give a number of seeds, or seeds with commas (0,1,5)."
        ) from None
    return numbers[0] if "," not in text and numbers else numbers


def parser(recipe: Recipe | None = None, *, everything: bool = True) -> VerbParser:
    """Return the parser of the command line, with the recipe's fields if it has `everything`."""
    made = _own()
    if everything:
        add_fields(made, recipe, everything=True, without=PER_RUN)
    return made


def _own() -> VerbParser:
    """Return the parser of the verb's own options."""
    made = VerbParser(
        prog="keymix compare",
        usage="keymix compare [--data SPEC] [--mixers LIST] [--seeds N] [--FIELD VALUE]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    add("--help-all", action="store_true", help="show every field of the recipe too")
    add(
        "--data",
        metavar="SPEC",
        help="digits, folder:PATH or another of `keymix list data` (default: digits)",
    )
    add(
        "--model",
        metavar="NAME",
        help="a keymix model, or timm's ViT, CaiT, Swin or MetaFormer (default: the recipe's)",
    )
    add(
        "--from",
        metavar="MODEL",
        help="a trained model that all runs start from, mixers swapped in",
    )
    add("--layers", metavar="LIST", help="of that model; e.g. 4-11 (default: all that attend)")
    made.add_mixers(
        "with commas: mhsa,'ska(activation=relu)' (default: all that fit the model)",
    )
    add("--seeds", metavar="N", help="seeds 0 to N-1, or a list such as 0,1,5 (default: 3)")
    add(
        "--recipe",
        metavar="NAME",
        help="a recipe, YAML or JSON file, or run's folder (default: fitted to the data)",
    )
    add("--epochs", metavar="N", help="passes over the training images, each run")
    add("--limit", metavar="N", help="at most N training and N test images")
    made.add_image_size("fitted")
    add("--skip-corrupt", action="store_true", help="leave what is broken out and report it")
    add("--no-flip", action="store_true", help="mirror no training images")
    add("--match", choices=("params",), help="widen each mixer to the baseline's parameters")
    add(
        "--baseline",
        metavar="M",
        help="compared with all others (default: softmax or ssa)",
    )
    add(
        "--plan",
        action="store_true",
        help="list the runs and how long they take, train nothing",
    )
    add("--run", metavar="K", help="train run K of those that --plan lists, and end")
    add("--no-controls", action="store_true", help="leave the identity control out")
    add(
        "--no-reference",
        action="store_true",
        help="leave the points of reference out",
    )
    add(
        "--margin",
        metavar="X",
        help="differences that count as equal, points (default: 2)",
    )
    add(
        "--tune",
        metavar="lr",
        help="choose the learning rate among three on validation",
    )
    add(
        "--minutes",
        metavar="N",
        help="about how long it may take (default: 30 for data of your own)",
    )
    add("--ann", action="store_true", help="spiking models: the baseline's ANN counterpart joins")
    add("--processes", metavar="N", help="runs side by side (default: one per core; GPU: one)")
    add("--on", metavar="ray", help="train runs as Ray tasks, here or on ray://HOST:PORT")
    add("--gpus-per-run", metavar="X", help="on Ray, such as 0.5 (default: 1 if it has GPUs)")
    made.add_imports()
    made.add_out("the comparison", default=_DEFAULT_OUT, resumes=True)
    add(
        "--images",
        action=argparse.BooleanOptionalAction,
        help="pictures of test images (default: as last time)",
    )
    made.add_json()
    made.add_open()
    return made
