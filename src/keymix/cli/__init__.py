# SPDX-License-Identifier: Apache-2.0
"""The ``keymix`` command: a table of verbs, each of which loads only when it is used."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keymix._version import __version__
from keymix.errors import Interrupted, KeymixWarning, Reported, UserError, one_line, unknown
from keymix.train.signals import interruptible

VERBS = {
    "compare": "train several mixers under one recipe: accuracy, cost and their uncertainty",
    "report": "rebuild the page and tables of a comparison from its runs",
    "train": "train one model from a recipe",
    "eval": "evaluate a trained run on its test split or on other data",
    "predict": "classify images, or predict their masks, with a trained run",
    "export": "write a trained run as a file for ONNX Runtime or PyTorch, checked",
    "push": "push a trained run to the Hugging Face Hub, or into a folder that timm loads",
    "swap": "replace attention in a trained model, keeping its behaviour close",
    "count": "parameters, multiply-adds and activation memory of a model, layer by layer",
    "analyze": "where a model looks, whether its layers collapse, what mixers cost",
    "check-mixer": "run the mixers' contract tests on a file of your own",
    "data": "validate a data set before hours are spent (keymix data check)",
    "list": "list models, mixers, recipes and data sets",
    "completion": "print the script with which a shell completes keymix's commands",
}

_AGAIN = "run the same command again (without --overwrite) to resume"

_TOO_LARGE = "name a smaller image size, batch, number of time steps, or model"

_PACKAGES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""What to install for a module where that is not its name."""

EXAMPLES = """\
examples:
  keymix compare                                   the embedded digits, every dense mixer
  keymix compare --data folder:photos --mixers mhsa,ska,identity --seeds 5 --out photos-cmp
  keymix swap my-run --mixer ska --search --budget 0.5 --out swapped
  keymix analyze attention my-run --images photos  where it looks, as pictures
  keymix data check photos                         broken images, leaks between splits, bad labels
  keymix list mixers
"""


def _help() -> str:
    rows = "\n".join(f"  {verb:<11} {summary}" for verb, summary in VERBS.items())
    return (
        "usage: keymix VERB [options]        keymix VERB --help says how to use a verb\n\n"
        "Which attention should my vision model use, and what does it buy me?\n\n"
        f"verbs:\n{rows}\n\n{EXAMPLES}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb with the words after ``keymix``, the process's own by default.

    Returns 0, or 2 after a mistake of the user's, which is one line on standard error, or 130
    after SIGINT (Ctrl-C), or 143 after SIGTERM.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch loads OpenMP
    if "RANK" in os.environ:  # each rank would warn of a search that costs little
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = [*(sys.argv[1:] if argv is None else argv)]  # keymix.cli.list shadows the builtin
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a dash that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    if words[:1] == ["help"] and len(words) > 1 and not words[1].startswith("-"):
        words = [*words[1:], "--help"]  # `keymix help VERB` is `keymix VERB --help`
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"keymix {__version__}\n")
        return 0
    verb, rest = words[0], words[1:]
    try:
        if verb not in VERBS:
            raise unknown("verb", verb, VERBS)
        with (
            _warnings_in_one_line(),
            interruptible(lambda: _AGAIN),
            _failures_in_one_line(verb),
        ):
            command = importlib.import_module(f"keymix.cli.{verb.replace('-', '_')}")
            return int(command.main(rest))
    except UserError as error:
        if not isinstance(error, Reported):
            sys.stderr.write(f"keymix: error: {one_line(str(error))}\n")
        return 2
    except KeyboardInterrupt as stop:
        text = one_line(str(stop)) or f"interrupted; {_AGAIN}"
        if os.environ.get("RANK", "0") == "0":  # of a training on many devices the first speaks
            sys.stderr.write(f"keymix: {text}\n")
        return stop.exit_code if isinstance(stop, Interrupted) else 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


@contextmanager
def _failures_in_one_line(verb: str) -> Iterator[None]:
    """Say what the machine lacks, wherever a verb does not say it better.

    That is a package, where keymix runs from a checkout; a path, too long or locked; or memory.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = error.name or ""
        within = "." in module or module in sys.stdlib_module_names  # of what is installed
        if not module or within or importlib.util.find_spec(module) is not None:
            raise
        package = _PACKAGES.get(module, module)
        raise UserError(f"package {module!r} is not installed: pip install {package!r}") from error
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES):
            raise
        name = str(error.filename)
        shown = name if len(name) <= 100 else f"{name[:100]}…"
        raise UserError(f"{shown!r}: {error.strerror}. Name another.") from error
    except (MemoryError, RuntimeError) as error:
        from keymix.models.memory import ran_out

        if not ran_out(error):
            raise
        raise UserError(f"out of memory in `keymix {verb}`: {_TOO_LARGE}") from error


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show what keymix or Pillow warns of in one line, once; other warnings come as they do.

    Runs of a comparison warn alike, one after another and side by side. Of very large images keymix
    warns itself, with their names.
    """
    others, shown = warnings.showwarning, set[str]()

    def show(
        message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any
    ) -> None:
        of_pillow = "PIL" in Path(filename).parts
        if of_pillow or issubclass(category, KeymixWarning):
            line = one_line("Pillow: " * of_pillow + str(message))
            if line not in shown:
                sys.stderr.write(f"keymix: warning: {line}\n")
            shown.add(line)
        else:
            others(message, category, filename, *place, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Image size \(\d+ pixels\) exceeds limit of \d+ pixels")
        warnings.simplefilter("always", KeymixWarning)
        warnings.showwarning = show
        yield
