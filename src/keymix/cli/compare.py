# SPDX-License-Identifier: Apache-2.0
"""``keymix compare``: several mixers under one recipe, with accuracy, cost and doubt."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from keymix.cli import console
from keymix.cli.comparison import plain, print_open_runs, print_result, watching
from keymix.cli.console import IMPORT_HELP, OPEN_HELP, VerbParser
from keymix.cli.recipe_options import flat, sort_words, typed
from keymix.errors import UserError, whole_number

_SHORT = {
    "--data": "data.spec",
    "--model": "model.name",
    "--epochs": "schedule.epochs",
    "--limit": "data.limit",
}
_OPTIONS = (
    "--mixers",
    "--seeds",
    "--recipe",
    "--match",
    "--out",
    "--baseline",
    "--margin",
    "--tune",
    "--minutes",
    "--processes",
    "--import",
)
_FLAGS = (
    *("--plan", "--no-flip", "--no-controls", "--no-reference"),
    *("--ann", "--overwrite", "--images", "--no-images", "--json", "--open", "--help"),
)
_DEFAULT_OUT = "keymix-compare"

_DESCRIPTION = """\
Train several token mixers under one recipe, paired by seed, and report the score of the data's task
(accuracy; for masks, their overlap with the truth), the cost, and how certain they are.
Without options: scikit-learn's digits, every dense mixer and the identity control, three seeds.
Run it again on the same folder to resume; further mixers and seeds join the finished runs."""


def main(argv: list[str]) -> int:
    """Run ``keymix compare``: 0, or 1 if some run failed; mistakes are raised as UserError."""
    words = sort_words(
        ["--help" if word == "-h" else word for word in argv],
        options=_OPTIONS,
        flags=_FLAGS,
        short=_SHORT,
        renamed={"--twin": "--ann"},
    )
    if "--help" in words.flags:
        console.say(_help().rstrip())
        return 0
    if words.names:
        raise UserError(
            f"unexpected {' '.join(words.names)!r}. Mixers go behind --mixers, data behind --data."
        )
    imports = words.options.get("--import", [])
    VerbParser.run_files(imports)
    fields = dict(words.fields)
    named = {option: words.last(option) for option in _OPTIONS}
    short: dict[str, Any] = {path: fields.pop(path, None) for path in _SHORT.values()}
    short |= typed({path: text for path, text in short.items() if text is not None})
    overrides = typed(fields)
    if "--no-flip" in words.flags:
        overrides["augment.flip"] = False

    from keymix.compare.run import compare, plan_comparison

    with watching() as watch:
        given: dict[str, Any] = {
            "data": short["data.spec"],
            "model": short["model.name"],
            "epochs": short["schedule.epochs"],
            "limit": short["data.limit"],
            "mixers": named["--mixers"],
            "seeds": _seeds(named["--seeds"]),
            "recipe": named["--recipe"],
            "overrides": overrides,
            "out": named["--out"] or _DEFAULT_OUT,
            "match": named["--match"],
            "baseline": named["--baseline"],
            "controls": "--no-controls" not in words.flags,
            "ann": "--ann" in words.flags,
            "reference": "--no-reference" not in words.flags,
            "margin": _number("--margin", named["--margin"]),
            "tune": named["--tune"],
            "minutes": _number("--minutes", named["--minutes"]),
            "processes": _whole("--processes", named["--processes"]),
            "imports": imports,
            "overwrite": "--overwrite" in words.flags,
            "images": _images(words.flags),
            "command": shlex.join(["keymix", "compare", *argv]),
            "progress": watch,
        }
        if "--plan" in words.flags:
            console.say(plan_comparison(**given))
            return 0
        result = compare(**given)
    if "--json" in words.flags:
        console.say(json.dumps(plain(result), ensure_ascii=False))
        print_open_runs(result)
    else:
        print_result(result)
    if "--open" in words.flags:
        console.open_page(result.report)
    return 1 if result.failed else 0


def _images(flags: Collection[str]) -> bool | None:
    """Whether pictures of the data were asked for, or not to be there; None for neither."""
    asked = {"--images", "--no-images"} & {*flags}
    if len(asked) > 1:
        raise UserError("--images and --no-images exclude each other. Give one of them.")
    return asked == {"--images"} if asked else None


def _whole(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return whole_number(text)
    except ValueError:
        raise UserError(f"option {option} {text!r}: give a whole number.") from None


def _number(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"option {option} {text!r}: give a number.") from None


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


def _help() -> str:
    from keymix.recipes import get

    parser = argparse.ArgumentParser(
        prog="keymix compare",
        usage="keymix compare [--data SPEC] [--mixers LIST] [--seeds N] [options] "
        "[--FIELD VALUE ...]",
        description=_DESCRIPTION,
        epilog=_epilog(flat(get("small_images_vit"))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
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
        "--mixers",
        metavar="LIST",
        help="with commas, options in parentheses: mhsa,'ska(activation=relu)' "
        "(default: every dense mixer, or every spiking one on events and in spiking models)",
    )
    add("--seeds", metavar="N", help="seeds 0 to N-1, or a list such as 0,1,5 (default: 3)")
    add(
        "--recipe",
        metavar="NAME",
        help="a recipe, a YAML or JSON file, or a run's folder "
        "(default: what the data's task has for them: digits_vit for digits, "
        "moving_digits_qkformer for events and spiking mixers, small_masks_setr for images with "
        "masks, else small_images_vit, fitted to the images)",
    )
    add("--epochs", metavar="N", help="passes over the training images, each run")
    add("--limit", metavar="N", help="use only N training images, stratified")
    add("--skip-corrupt", action="store_true", help="leave broken images out and report them")
    add("--no-flip", action="store_true", help="mirror no training images")
    add("--match", metavar="params", help="widen each mixer to the baseline's parameters")
    add(
        "--baseline",
        metavar="M",
        help="what the others are compared with (default: softmax, or ssa)",
    )
    add(
        "--plan",
        action="store_true",
        help="print what would be done and how long it would take, and train nothing",
    )
    add("--no-controls", action="store_true", help="leave the identity control out")
    add(
        "--no-reference",
        action="store_true",
        help="leave out the points of reference: largest class, logistic regression, plain network",
    )
    add(
        "--margin",
        metavar="X",
        help="differences up to this are equal, in points of a fraction (default: 2)",
    )
    add(
        "--tune",
        metavar="lr",
        help="choose the learning rate among three on validation, at a seed of its own",
    )
    add(
        "--minutes",
        metavar="N",
        help="fit updates, and mixers and seeds that are not named, into about N minutes",
    )
    add("--ann", action="store_true", help="spiking models: the baseline's ANN counterpart joins")
    add("--processes", metavar="N", help="runs side by side (default: one per core, on a GPU one)")
    add("--import", metavar="FILE.py", help=IMPORT_HELP)
    add("--out", metavar="DIR", help=f"folder of the comparison (default: {_DEFAULT_OUT})")
    add("--overwrite", action="store_true", help="replace another comparison in that folder")
    add(
        "--no-images",
        action="store_true",
        help="leave every picture of the data out of the report, now and when the command runs "
        "again; --images brings them back",
    )
    add("--json", action="store_true", help="print the result as JSON")
    add("--open", action="store_true", help=OPEN_HELP)
    return parser.format_help()


def _epilog(fields: Mapping[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for path in fields:
        if path not in ("name", "seed", "model.mixer", *_SHORT.values()):
            groups.setdefault(path.partition(".")[0] if "." in path else "", []).append(path)
    lines = ["recipe fields, shared by all runs (`keymix train --help` explains them):"]
    for paths in groups.values():
        line = " "
        for path in paths:
            if len(line) + len(path) > 94:
                lines.append(line)
                line = " "
            line += f" --{path}"
        lines.append(line)
    return (
        "\n".join(lines)
        + """

examples:
  keymix compare
  keymix compare --data folder:photos --mixers mhsa,ska,cska --seeds 5 --out photos-cmp
  keymix compare --data parquet:cifar10 --limit 10000 --epochs 6 --optim.lr 1e-3
  keymix compare --data moving_digits
  keymix compare --data uwgi:PATH --mixers "mhsa,kv,kv(pos_dim=50)"
  keymix compare --mixers qkta,ssa --ann --data parquet:cifar10
  keymix compare --import my_mixer.py --mixers mhsa,name_in_that_file
"""
    )
