# SPDX-License-Identifier: Apache-2.0
"""``keymix push``: a trained run on the Hugging Face Hub, or in a folder of the same layout."""

from __future__ import annotations

from pathlib import Path

from keymix.cli import console
from keymix.cli.console import VerbParser

EXAMPLES = """\
examples:
  keymix push my-run my-name/my-model --license apache-2.0
  keymix push my-run --to folder
  keymix predict folder some-image.png

Written are timm's config.json and model.safetensors, and a model card. timm must
rebuild the same model from them before anything is put in place. Inside are
classes, preprocessing and scores, and no path, name of a file or image."""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix push",
        description="Push a trained run to the Hugging Face Hub, or into a folder.",
        epilog=EXAMPLES,
    )
    made.add_run()
    made.add_argument("name", metavar="OWNER/NAME", nargs="?", help="the model on the Hub")
    made.add_argument("--to", metavar="DIR", help="a folder, in place of the Hub")
    made.add_argument(
        "--overwrite", action="store_true", help="replace what was pushed into the folder before"
    )
    made.add_argument(
        "--license",
        metavar="NAME",
        help="licence of the weights in the Hub's words, such as apache-2.0 (default: none named)",
    )
    made.add_argument(
        "--private", action="store_true", help="make a new model on the Hub a private one"
    )
    made.add_json()
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix push``."""
    given = parser().parse_args(argv)
    VerbParser.run_imports(given)

    from keymix.export.push import push

    found = push(
        Path(given.run),
        given.name,
        to=given.to,
        which=given.weights,
        license=given.license,
        private=given.private,
        overwrite=given.overwrite,
    )
    if given.json:
        console.say_json({"place": found})
    else:
        console.prose(f"{found}: timm rebuilds the same model, with equal weights and outputs")
    return 0
