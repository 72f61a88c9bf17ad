# SPDX-License-Identifier: Apache-2.0
"""The processes of a comparison: ``python -m keymix.compare.worker FOLDER [IMPORT ...]``.

It reads a plan, a line of JSON on standard input, and trains what is left of it in the folder, in
a process forked for every run: PyTorch is imported and the data are loaded once, and never the
user's script. SIGTERM lets the runs save. When standard input ends, as it does with the comparison,
the runs are killed. Standard output has JSON lines: a run that starts, ends or is another process's
after all, that all left are, a warning, an error that ends it all.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from keymix.compare.question import Plan
from keymix.compare.runs import DAMAGED, ERROR, NAMED, Left, log_of
from keymix.data.dataset import ImageData
from keymix.errors import FAILURES, Interrupted, KeymixWarning, UserError, WriteError, reason
from keymix.mixers.registry import import_file
from keymix.records import from_json
from keymix.train.checkpoints import DamagedRun
from keymix.train.engine import train
from keymix.train.files import InUse, make_folder, write_error, write_text
from keymix.train.model import load_data, model_for

POLL = 0.05
"""Seconds between two looks at the processes of the runs under way."""
ELSEWHERE = 75
"""Exit code of a run's process that found another one at work on it (EX_TEMPFAIL)."""
_LONGEST = 500  # characters of a message: its line enters a pipe at once or not at all

Send = Callable[..., None]
"""Sends a message to the comparison, its values by name."""


def run(
    plan: Plan,
    number: int,
    *,
    data: ImageData | None = None,
    on_epoch: Callable[[], None] | None = None,
) -> int:
    """Train a run of a plan and return 0, or 1 where it failed.

    What is raised says nothing of this run: `Interrupted`, `WriteError`, and `InUse` where another
    process trains it.
    """
    mixer, seed = plan.pairs[number]
    place = plan.folder(mixer, seed)

    def trained() -> None:
        train(
            plan.recipe_for(mixer, seed),
            place,
            progress=None if on_epoch is None else lambda line: on_epoch(),
            data=data,
            threads=plan.threads,
        )

    with suppress(OSError):
        (place / ERROR).unlink()
    try:
        try:
            trained()
        except DamagedRun as error:
            move_away(place, error)
            trained()
    except (WriteError, InUse):
        raise
    except FAILURES as error:  # a mixer of the user's may raise anything
        make_folder(place)
        with suppress(OSError), log_of(place).open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        write_text(place / ERROR, f"{reason(error)}\n")
        return 1
    return 0


def move_away(place: Path, error: DamagedRun) -> None:
    """Rename the folder of a damaged run, so that the run can be done again, and warn."""
    aside = place.with_name(f"{place.name}{DAMAGED}")
    if aside.exists():
        raise UserError(f"move {str(aside)!r} away, which is there from before: {error.cause}")
    place.rename(aside)
    text = f"{error.cause}; the run is moved to {str(aside)!r} and trained again"
    warnings.warn(text, KeymixWarning, stacklevel=3)


# ---- all that are left, side by side -----------------------------------------------------------


class Forks:
    """The runs that are left, each in a process, `plan.processes` at a time."""

    def __init__(self, plan: Plan, send: Send) -> None:
        self._plan, self._send = plan, send
        self._children: dict[int, int] = {}  # their runs
        self._stopping = False

    def train(self, data: ImageData | None) -> None:
        """Train them; SIGTERM ends those under way, and the end of standard input kills them."""
        left, idle = Left(self._plan), False
        signal.signal(signal.SIGTERM, self._save)
        while self._children or (left and not self._stopping):
            while not self._stopping and len(self._children) < self._plan.processes:
                number = left.take()
                if number is None:
                    break
                self._send(start=number)
                if left.failed(number):
                    self._send(end=number)
                else:
                    self._children[os.fork() or self._child(number, data)] = number
            if not idle and left and not self._children:
                self._send(waits=left.numbers[:NAMED], of=len(left))
            idle = not self._children
            if select.select([0], [], [], POLL)[0]:
                self._tell(signal.SIGKILL)
                return
            for child in [*self._children]:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    number = self._children.pop(child)
                    code = os.waitstatus_to_exitcode(status)
                    if code == ELSEWHERE:
                        left.put_back(number)
                        self._send(elsewhere=number)
                    else:
                        self._see_to(number, code)
                        self._send(end=number)

    def _save(self, *_: object) -> None:
        self._stopping = True
        self._tell(signal.SIGTERM)

    def _tell(self, signum: int) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(child, signum)

    def _child(self, number: int, data: ImageData | None) -> NoReturn:
        """Train a run in a forked process, and end it."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, KeymixWarning):
                self._send(warning=str(message))  # for the user
            else:
                log(message, category, *where, **more)

        log, warnings.showwarning = warnings.showwarning, show
        code = 70  # EX_SOFTWARE
        try:
            _write_to(log_of(self._plan.folder(*self._plan.pairs[number])))
            code = run(self._plan, number, data=data)
        except WriteError as error:
            self._send(error=str(error))  # no other run would fare better
            code = 1
        except InUse:
            code = ELSEWHERE
        except Interrupted as stop:
            code = stop.exit_code
        except (*FAILURES, SystemExit):
            traceback.print_exc()
        finally:  # a forked process never returns into its parent's code
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _see_to(self, number: int, code: int) -> None:
        """Leave the reason in the folder of a run whose process died, and no empty log."""
        place = self._plan.folder(*self._plan.pairs[number])
        log = log_of(place)
        with suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()
        if code not in (0, 1, 128 + signal.SIGTERM, -signal.SIGTERM):
            how = f"with code {code}; see {log.name}"
            if code < 0:
                memory = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
                how = f"by signal {-code}{memory}"
            make_folder(place)
            write_text(place / ERROR, f"the training process ended {how}\n")


def _prepared(plan: Plan) -> ImageData | None:
    """Do once what every run needs: the data, and the libraries of a model.

    Nothing here starts threads or touches CUDA, which a forked process could not use then.
    """
    torch.set_num_threads(1)
    data = None
    with suppress(*FAILURES):  # each run says what is wrong
        data = load_data(plan.recipe.data)
        with torch.device("meta"):
            model_for(plan.recipe, data.record())
    gc.freeze()
    return data


def _write_to(log: Path) -> None:
    """Let a file take what this process says."""
    make_folder(log.parent)
    try:
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError as error:
        raise write_error(log, error) from error
    for number in (1, 2):
        os.dup2(stream, number)


def _send(pipe: int, **message: Any) -> None:
    short = {k: v[:_LONGEST] if isinstance(v, str) else v for k, v in message.items()}
    os.write(pipe, json.dumps(short).encode() + b"\n")


def main(argv: Sequence[str], *, messages: int = 1) -> int:
    """Train all runs that are left, with messages to a file descriptor."""
    send = partial(_send, messages)
    out, *imports = argv
    try:
        for path in imports:
            import_file(path)
        plan = from_json(Plan, json.loads(sys.stdin.readline()), where="the plan")
        plan = replace(plan, out=Path(out))
        Forks(plan, send).train(_prepared(plan))
    except UserError as error:
        send(error=str(error))
        return 2
    return 0


if __name__ == "__main__":
    pipe = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no message
    sys.exit(main(sys.argv[1:], messages=pipe))
