# SPDX-License-Identifier: Apache-2.0
"""One training run after another; also the program of a worker process.

``python -m keymix.compare.worker`` reads jobs as JSON lines from standard input and answers with
events as JSON lines. A process of its own needs no ``if __name__`` guard in the user's script, and
it may die without taking the comparison with it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from keymix.errors import Interrupted, KeymixWarning, UserError, WriteError

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.train.recipe import DataConfig, Recipe

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What one run may raise, a user's mixer included, without ending the others."""

_PATIENCE = 10.0  # seconds

EpochReport = Callable[[Mapping[str, Any]], None]


def reason(error: BaseException) -> str:
    """Write an error as one line of at most 300 characters."""
    words = " ".join(str(error).split())
    kind = type(error).__name__
    line = words if isinstance(error, UserError) else f"{kind}: {words}" if words else kind
    return line if len(line) <= 300 else line[:299] + "…"


class Runner:
    """Train runs one after another in this process, with the data loaded once.

    Args:
        data: The images and the part of a recipe that they were loaded for.
        log: A file that gets the traceback of a run that fails; standard error if ``None``.
    """

    def __init__(
        self, data: tuple[DataConfig, ImageData] | None = None, *, log: Path | None = None
    ) -> None:
        self._data, self._log = data, log

    def train(self, recipe: Recipe, folder: Path, report: EpochReport) -> str | None:
        """Train one run.

        Returns:
            ``None`` when it is done, else why it is not, in one line.

        Raises:
            WriteError: If the disk does not take a file: no other run would fare better.
            Interrupted: On SIGTERM, and on SIGINT where it is not ignored.
        """
        from keymix.train.engine import train

        try:
            images = self._images(recipe)
            _wait_for(folder)
            train(recipe, folder, progress=report, data=images)
        except WriteError:
            raise
        except FAILURES as error:
            self._write(traceback.format_exc())
            return reason(error)
        return None

    def try_out(self, recipe: Recipe, runs: float) -> dict[str, float] | None:
        """Time a few steps of a recipe, for so many runs in a row.

        Returns:
            The fields of `keymix.compare.estimate.Trial`; ``None`` if they failed, as the run will.
        """
        from keymix.compare.estimate import try_out

        try:
            return try_out(recipe, self._images(recipe), runs=runs).to_dict()
        except FAILURES:
            return None

    def _images(self, recipe: Recipe) -> ImageData:
        from keymix.train.model import load_data

        if self._data is None or self._data[0] != recipe.data:
            self._data = (recipe.data, load_data(recipe.data))
        return self._data[1]

    def _write(self, text: str) -> None:
        if self._log is None:
            sys.stderr.write(text)
            return
        with suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as stream:
                stream.write(text)


def _wait_for(folder: Path) -> None:
    """Wait for a worker to let go of a run whose parent was killed a moment ago."""
    from keymix.train.lock import InUse, locked

    deadline = time.monotonic() + _PATIENCE
    while folder.exists():
        try:
            with locked(folder, "run"):
                return
        except InUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> NoReturn:
    """Serve jobs until standard input ends."""
    from keymix.mixers.registry import import_file
    from keymix.train.recipe import from_dict

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log

    def answer(**event: Any) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, KeymixWarning):
            answer(kind="warning", text=str(message))  # for the parent's user
        else:
            log(message, category, *place, **more)

    log, warnings.showwarning = warnings.showwarning, show

    import torch

    runner = Runner()
    jobs = _listen()
    while True:
        job = jobs.get()
        torch.set_num_threads(job["threads"])
        for path in job["imports"]:
            import_file(path)
        if job["trial"]:
            answer(kind="tried", trial=runner.try_out(from_dict(job["recipe"]), job["trial"]))
            continue

        def report(metrics: Mapping[str, Any]) -> None:
            answer(kind="epoch", metrics=dict(metrics))

        try:
            failure = runner.train(from_dict(job["recipe"]), Path(job["folder"]), report)
        except WriteError as error:
            answer(kind="stopped", reason=str(error))
            os._exit(2)  # an exit in order would wait for the thread that reads standard input
        except Interrupted as stop:
            answer(kind="interrupted", message=str(stop))
            os._exit(stop.exit_code)
        answer(kind="failed", reason=failure) if failure else answer(kind="done")


def _listen() -> queue.SimpleQueue[dict[str, Any]]:
    """Take jobs in a thread that ends the process when the parent is gone, busy or not.

    Otherwise a run whose parent was killed would go on beside the next one in its folder.
    """
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return jobs


if __name__ == "__main__":
    main()
