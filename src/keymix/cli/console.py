# SPDX-License-Identifier: Apache-2.0
"""What the verbs share: how they speak, how their options are read, and where their results go.

Tables are drawn for a person at a terminal, and clean tab-separated lines in a pipe. A mistake in
options is one line, with the nearest option.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rich.cells import cell_len
from rich.console import Console

from keymix.errors import UserError, one_line, shown, unknown, whole_number
from keymix.records import to_json
from keymix.report.tables import Table, text_table

out = Console(soft_wrap=True, highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)


def say(text: str = "") -> None:
    """Write lines of the command's result to standard output; names in them drive no terminal."""
    out.print(shown(text), markup=False)


def prose(text: str, *, hang: str = "") -> None:
    """Write a sentence of the result, broken between words at a terminal, one line in a pipe."""
    say(_fitted(shown(text), out, hang))


def say_json(record: object) -> None:
    """Write a record as one line of JSON."""
    say(json.dumps(to_json(record), ensure_ascii=False))


def note(text: str) -> None:
    """Write a line for the person, not for a script, to standard error."""
    err.print(_fitted(shown(text), err), markup=False, style="dim")


def warn(text: str) -> None:
    """Write a line that matters to standard error."""
    err.print(_fitted(one_line(text), err), markup=False)


def _fitted(text: str, where: Console, hang: str = "") -> str:
    """Break lines between words at a terminal; in a pipe they stay as they are."""
    if not where.is_terminal:
        return text
    return "\n".join(
        each for line in text.split("\n") for each in wrapped(line, where.width, hang=hang)
    )


def wrapped(text: str, width: int, *, hang: str = "") -> list[str]:
    """Break a text between words; a word wider than the terminal stays whole.

    Lines after the first begin with `hang`.
    """
    lines, line = list[str](), ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and cell_len(longer) > width:
            lines.append(line)
            longer = hang + word
        line = longer
    return [*lines, line]


def line(cells: Iterable[str]) -> None:
    """Write cells as a tab-separated line of the result, for a script."""
    out.file.write("\t".join(map(one_line, cells)) + "\n")  # rich would turn tabs into spaces


@contextmanager
def working(line: Callable[[str, float], None]) -> Iterator[Callable[[str, float], None]]:
    """Show what is being done, and the share that is done: a bar at a terminal, else by `line`."""
    if not err.is_terminal:
        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=24), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, completed=share, description=one_line(text))


def report_broken(reasons: Iterable[str]) -> int:
    """Name the images that could not be read; return the exit code, 2 if there are any."""
    different = dict.fromkeys(reasons)
    for why in different:
        warn(f"keymix: error: {why}")
    return 2 if different else 0


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 1,
) -> None:
    """Print cells that are text, the first `left` columns left-aligned; see `show`."""
    show(text_table(columns, rows, title=title or "", left=left))


def show(made: Table) -> None:
    """Print a table: drawn with its title at a terminal, tab-separated with a header when piped."""
    if out.is_terminal:
        out.print(made.drawn(out.width), soft_wrap=False)
        return
    for row in (made.headings(), *made.cells()):
        line(row)


# ---- options --------------------------------------------------------------------------------


OUT_RULE = "; an existing one is refused"
RESUME_RULE = "; the same work resumes there"
OVERLAP = 0.5
MOST_PIXELS = 2**20
"""Of a side: more than any image has that a model is shown."""


def help_lines(prog: str) -> argparse.HelpFormatter:
    """Format the help of a verb: text as it is written, and room for the names of options."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30)


class VerbParser(argparse.ArgumentParser):
    """An argument parser that raises UserError where argparse prints its usage and exits.

    The methods ``add_…`` add the options that several verbs have, so that they are named,
    explained and read in one way.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=help_lines, **options)
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
            raise UserError(f"unexpected {' '.join(rest)!r}. `{self.prog} --help` shows more.")
        return given

    def own_options(self) -> tuple[list[str], list[str]]:
        """Name the options that take a value, and those that take none."""
        found = self._option_string_actions.items()
        bare = [name for name, action in found if action.nargs == 0]
        return [name for name, _ in found if name not in bare], bare

    def add_run(self, more: str = "") -> None:
        """Add RUN, the folder of a training, and ``--weights``, which of its two."""
        self.add_argument("run", metavar="RUN", help="the folder given as --out to train" + more)
        self.add_argument(
            "--weights",
            choices=("last", "best"),
            default="last",
            help="weights of the last epoch, or of that best on validation (default: last)",
        )

    def add_imports(self) -> None:
        """Add ``--import FILE.py``, which registers a user's own mixers, tasks or sources."""
        self.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="FILE.py",
            help="registers your own mixers, tasks or data sources",
        )

    def add_open(self) -> None:
        """Add ``--open``; `open_page` does it."""
        self.add_argument("--open", action="store_true", help="open the page in the browser")

    def add_json(self) -> None:
        """Add ``--json``, which prints the result, and nothing else, on standard output."""
        self.add_argument("--json", action="store_true", help="print the result as JSON")

    def add_out(
        self,
        what: str,
        *,
        metavar: str = "DIR",
        default: str = "",
        resumes: bool = False,
        required: bool = False,
    ) -> None:
        """Add ``--out`` and ``--overwrite``: what exists is refused, or resumed by what resumes.

        `what` is written there. Nothing else than a result of the same verb is ever overwritten.
        """
        rule = RESUME_RULE if resumes else OUT_RULE
        where = f" (default: {default})" if default else ""
        self.add_argument(
            "--out", metavar=metavar, required=required, help=f"write {what} there{rule}{where}"
        )
        self.add_argument(
            "--overwrite", action="store_true", help="replace the result that --out has"
        )

    def add_mixers(self, text: str) -> None:
        """Add ``--mixers LIST``, one or several mixers with commas between."""
        self.add_argument("--mixers", metavar="LIST", help=text)

    def add_image_size(self, default: str) -> None:
        """Add ``--image-size S|H,W``; `parse_size` reads it."""
        self.add_argument(
            "--image-size",
            metavar="S|H,W",
            help=f"side or height,width in pixels (default: {default})",
        )

    def add_image_size_of_run(self) -> None:
        """Add how a trained run sees images; `image_size_of` and `overlap_of` read it."""
        self.add_image_size("as it was trained")
        self.add_argument(
            "--resize",
            choices=("interpolate", "pool_values"),
            help="what mixers with learned positions do at another size (default: as trained)",
        )
        self.add_argument(
            "--window",
            metavar="S|H,W",
            help="for masks: slide windows of this size over each image at its own size",
        )
        self.add_argument(
            "--overlap",
            type=float,
            metavar="X",
            help=f"share that neighbouring windows overlap by (default of --window: {OVERLAP})",
        )
        self.add_argument(
            "--flips",
            choices=("horizontal", "both"),
            help="for masks: average the logits of the image and its mirror images",
        )

    def add_time_steps(self, default: str) -> None:
        """Add ``--time-steps`` of a spiking model; `default` says what holds without it."""
        self.add_argument(
            "--time-steps",
            type=int,
            metavar="T",
            help=f"steps T of a spiking model (default: {default})",
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
    """Read ``--window`` or ``--image-size``, None without; ``--resize`` alone is refused."""
    if given.window is not None:
        if given.image_size is not None:
            raise UserError(f"--window {given.window} is the image size: leave --image-size out.")
        return parse_size(given.window, "--window")
    if given.image_size is not None:
        return parse_size(given.image_size)
    if given.resize is not None:
        raise UserError(f"--resize {given.resize} acts at another size: give --image-size too")
    return None


def overlap_of(given: argparse.Namespace) -> float | None:
    """Read ``--overlap``; windows have one."""
    overlap: float | None = given.overlap
    return OVERLAP if overlap is None and given.window is not None else overlap


def parse_size(text: str, option: str = "--image-size") -> tuple[int, int]:
    """Read a side, or height and width, in pixels: ``48`` or ``32,48``."""
    wanted = "give a side in pixels, such as 48, or height,width"
    sides = numbers_of(f"{option} {text}", text, (1, 2), wanted)
    return sides[0], sides[-1]


def numbers_of(given: str, text: str, counts: Container[int], wanted: str) -> tuple[Any, ...]:
    """Read some numbers of pixels with commas or ``x`` between them; what was `given` is named."""
    try:
        numbers = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in counts or not 1 <= min(numbers) <= max(numbers) <= MOST_PIXELS:
        raise UserError(f"{given}: {wanted}, each at most {MOST_PIXELS:,}")
    return numbers


def open_page(page: Path) -> None:
    """Open a page in the browser, as ``--open`` asks; say where it is if there is none."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        warn(f"no browser was found to open {page}")


# ---- where results go -----------------------------------------------------------------------


def checked_file(given: argparse.Namespace) -> Path | None:
    """Check the file given as ``--out``, if any, before any work."""
    if given.out is None:
        return None
    path = Path(given.out)
    if path.exists() and not path.is_file():
        raise UserError(f"--out {given.out!r} is no file. Name one.")
    if path.exists() and not given.overwrite:
        raise UserError(f"--out {given.out!r} exists: name another file or add --overwrite.")
    if not path.parent.is_dir():
        raise UserError(f"--out {given.out!r}: there is no folder {str(path.parent)!r}. Make it.")
    return path


@contextmanager
def made_folder(folder: Path | None, done: Callable[[], bool]) -> Iterator[None]:
    """Make a folder, if any, before the work, and remove it again if nothing is `done` in it."""
    from keymix.train.files import make_folder

    if folder is None:
        yield
        return
    lacking = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield
    finally:
        if not done():
            for path in lacking:
                with suppress(OSError):
                    path.rmdir()
