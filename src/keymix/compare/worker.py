# SPDX-License-Identifier: Apache-2.0
"""A training process: ``python -m keymix.compare.worker FOLDER K`` trains run K of a stored plan.

K counts the runs of the folder's plan from 0, one seed of all mixers after the other. The exit code
is 0 for a finished run, 1 for one that failed (``error.txt`` in its folder says why), `NO_DISK`
where the disk takes no file, and 128 + N of a run that saved at signal N.

Without arguments it is the process from which a comparison forks its runs, so that PyTorch is
imported and the data are loaded once, and never the user's script. It reads requests as JSON lines
from standard input; when that ends, as it does with the comparison, it kills the runs under way.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from keymix.compare import folder
from keymix.compare.runs import DAMAGED, ERROR, log_of
from keymix.data.dataset import ImageData
from keymix.errors import FAILURES, Interrupted, KeymixWarning, UserError, WriteError, reason
from keymix.mixers.registry import import_file
from keymix.train.checkpoints import DamagedRun
from keymix.train.engine import train
from keymix.train.files import locked, make_folder, write_error, write_text
from keymix.train.model import load_data, model_for
from keymix.train.recipe import from_dict

NO_DISK = 74  # EX_IOERR
PATIENCE = 10.0
"""Seconds that a run's folder may stay with a process whose comparison was killed."""
_LONGEST = 500  # characters of a message: its line enters a pipe at once or not at all

Send = Callable[..., None]
"""Sends a message to the comparison, its values by name."""


def run(
    out: Path,
    number: int,
    *,
    data: ImageData | None = None,
    on_epoch: Callable[[], None] | None = None,
) -> int:
    """Train a run of a folder's plan and return 0, or 1 where it failed.

    What is raised ends more than this run: `Interrupted`, and `WriteError`.
    """
    plan = folder.read(out).plan
    mixer, seed = plan.pairs[number]
    place = plan.folder(mixer, seed)
    trained = partial(
        train,
        plan.recipe_for(mixer, seed),
        place,
        progress=None if on_epoch is None else lambda line: on_epoch(),
        data=data,
        threads=plan.threads,
    )
    with suppress(OSError):
        (place / ERROR).unlink()
    try:
        if place.exists():
            with locked(place, "run", patience=PATIENCE):
                pass  # a process whose comparison was killed a moment ago has let go of the run
        try:
            trained()
        except DamagedRun as error:
            move_away(place, error)
            trained()
    except WriteError:
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


# ---- the process that is forked --------------------------------------------------------------


class Lines:
    """JSON lines that come through a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.ended, self._rest = pipe, False, b""

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come, or wait for some."""
        content = os.read(self.pipe, 2**16)
        self.ended = not content
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [json.loads(line) for line in lines]


def serve() -> None:
    """Fork a process for every request; the first line says what all of them share."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # they are the comparison's to handle
    requests, replies = Lines(os.dup(0)), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what libraries print is no message
    woken, wake = os.pipe()  # by the end of a child
    for end in (woken, wake):
        os.set_blocking(end, False)

    def send(**message: Any) -> None:
        os.write(replies, json.dumps(message).encode() + b"\n")

    shared, *waiting = requests.read()
    out = Path(shared["out"])
    try:
        data = _prepared(shared)
    except FAILURES as error:  # of a file of the user's that runs here alone
        send(failed=reason(error)[:_LONGEST])
        return
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while not requests.ended:
        for request in waiting:
            if request.get("stop"):
                for child in children:
                    os.kill(child, signal.SIGTERM)  # it saves
            else:
                number = request["run"]
                child = os.fork() or _child(out, number, data, partial(send, run=number))
                children[child] = number
        ready, _, _ = select.select([requests.pipe, woken], [], [])
        waiting = requests.read() if requests.pipe in ready else []
        if woken in ready:
            os.read(woken, 4096)
        for child, status in _ended(children):
            send(run=children.pop(child), code=os.waitstatus_to_exitcode(status))
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)


def _prepared(shared: Mapping[str, Any]) -> ImageData | None:
    """Do once what every run needs: the user's files, the data, and the libraries of a model.

    Nothing here starts threads or touches CUDA, which a forked process could not use then.
    """
    for path in shared["imports"]:
        import_file(path)
    torch.set_num_threads(1)
    recipe = from_dict(shared["recipe"])
    data = None
    with suppress(*FAILURES):  # each run says what is wrong
        data = load_data(recipe.data)
        with torch.device("meta"):
            model_for(recipe, data.record())
    gc.freeze()
    return data


def _ended(children: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the children that have ended, with their status."""
    found = [os.waitpid(child, os.WNOHANG) for child in children]
    return [(child, status) for child, status in found if child]


def _child(out: Path, number: int, data: ImageData | None, send: Send) -> NoReturn:
    """Train a run in a forked process, and end it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, KeymixWarning):
            send(warning=str(message)[:_LONGEST])  # for the user
        else:
            log(message, category, *place, **more)

    log, warnings.showwarning = warnings.showwarning, show
    code = 70  # EX_SOFTWARE
    try:
        plan = folder.read(out).plan
        _write_to(log_of(plan.folder(*plan.pairs[number])))
        code = run(out, number, data=data)
    except WriteError as error:
        send(no_disk=str(error)[:_LONGEST])
        code = NO_DISK
    except Interrupted as stop:
        code = stop.exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else code
    except FAILURES:
        traceback.print_exc()
    finally:  # a forked process never returns into its parent's code
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _write_to(log: Path) -> None:
    """Let a file take what this process says."""
    make_folder(log.parent)
    try:
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError as error:
        raise write_error(log, error) from error
    for number in (1, 2):
        os.dup2(stream, number)


def main(argv: list[str]) -> int:
    """Train the run that is named, or serve."""
    if not argv:
        serve()
        return 0
    try:
        return run(Path(argv[0]), int(argv[1]))
    except (UserError, Interrupted) as error:
        sys.stderr.write(f"{error}\n")
        return NO_DISK if isinstance(error, WriteError) else getattr(error, "exit_code", 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
