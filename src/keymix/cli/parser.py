# SPDX-License-Identifier: Apache-2.0
"""argparse for the small verbs: a mistake is one line, with the nearest option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from keymix.errors import UserError, unknown, whole_number

IMPORT_HELP = "a file that registers your own mixers, tasks or data sources"
MOST_PIXELS = 2**20
"""Of a side: more than any image has that a model is shown."""


class VerbParser(argparse.ArgumentParser):
    """An argument parser that raises UserError where argparse prints its usage and exits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("type", int, _whole)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line in one line."""
        raise UserError(f"{message}. `{self.prog} --help` says how to use it.")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse, and name the nearest option for an unknown one."""
        given, rest = self.parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-"):
                raise unknown("option", word.partition("=")[0], self._option_string_actions)
        if rest:
            raise UserError(f"unexpected {' '.join(rest)!r}. `{self.prog} --help` says more.")
        return given

    def add_imports(self) -> None:
        """Add ``--import FILE.py``, which registers a user's own mixers, tasks or sources."""
        self.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="FILE.py",
            help=IMPORT_HELP,
        )

    def add_image_size(self) -> None:
        """Add ``--image-size`` and ``--resize`` of a trained run; `image_size_of` reads them."""
        self.add_argument(
            "--image-size",
            metavar="S or H,W",
            help="pixels of the images that the run is shown; default: as it was trained",
        )
        self.add_argument(
            "--resize",
            choices=("interpolate", "pool_values"),
            help="what mixers with learned positions do at another size; default: as trained",
        )

    def add_time_steps(self, default: str) -> None:
        """Add ``--time-steps`` of a spiking model.

        Args:
            default: What holds where it is not given.
        """
        self.add_argument(
            "--time-steps",
            type=int,
            metavar="T",
            help=f"steps T of a spiking model; default: {default}",
        )

    @classmethod
    def run_imports(cls, given: argparse.Namespace) -> None:
        """Run the files given with ``--import``, before anything names what they register."""
        cls.run_files(given.imports)

    @staticmethod
    def run_files(files: Sequence[str]) -> None:
        """Run files that register mixers, tasks or data sources."""
        if files:
            from keymix.mixers.registry import import_file

            for file in files:
                import_file(file)


def _whole(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def image_size_of(given: argparse.Namespace) -> tuple[int, int] | None:
    """Read ``--image-size``; None if it was not given.

    Raises:
        UserError: If it is no size, or ``--resize`` stands alone.
    """
    if given.image_size is not None:
        return parse_size(given.image_size)
    if given.resize is not None:
        raise UserError(f"--resize {given.resize} acts at another size: give --image-size too")
    return None


def parse_size(text: str, option: str = "--image-size") -> tuple[int, int]:
    """Read a side, or height and width, in pixels: ``48`` or ``32,48``.

    Raises:
        UserError: If it is anything else.
    """
    try:
        sides = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UserError(f"{option} {text}: give a side in pixels, such as 48, or height,width")
    if max(sides) > MOST_PIXELS:
        raise UserError(f"{option} {text}: a side has at most {MOST_PIXELS:,} pixels")
    return sides[0], sides[-1]
