# SPDX-License-Identifier: Apache-2.0
"""What a comparison's executor calls: a training run, a trial of one, and the set-up of a worker.

Loaded data stay for the next run of the same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.compare.estimate import Trial
from keymix.compare.executor import FAILURES, CallError, WorkerEnded
from keymix.errors import UserError
from keymix.train.recipe import DataConfig, Recipe

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_PATIENCE = 10.0  # seconds


def reason(error: BaseException) -> str:
    """Write an error as one line of at most 300 characters."""
    words = " ".join(str(error).split())
    kind = type(error).__name__
    whole = isinstance(error, UserError | CallError | WorkerEnded)
    line = words if whole else f"{kind}: {words}" if words else kind
    return line if len(line) <= 300 else line[:299] + "…"


class Runner:
    """Train runs one after another in this process, with the data loaded once.

    Args:
        data: The images and the part of a recipe that they were loaded for.
        on_epoch: Called after every epoch.
    """

    def __init__(
        self,
        data: tuple[DataConfig, ImageData] | None = None,
        *,
        on_epoch: Callable[[], None] | None = None,
    ) -> None:
        self._data, self._on_epoch = data, on_epoch

    def train(self, recipe: Recipe, folder: str) -> None:
        """Train one run.

        Raises:
            Interrupted: On SIGTERM, and on SIGINT where it is not ignored.
            UserError: And whatever else ends the run.
        """
        from keymix.train.engine import train

        images = self._images(recipe)
        _wait_for(Path(folder))
        told = self._on_epoch
        train(recipe, folder, progress=None if told is None else lambda line: told(), data=images)

    def try_out(self, recipe: Recipe, runs: float) -> Trial | None:
        """Time a few steps of a recipe, for so many runs in a row; None if they fail."""
        from keymix.compare.estimate import try_out

        try:
            return try_out(recipe, self._images(recipe), runs=runs)
        except FAILURES:  # as the run will
            return None

    def _images(self, recipe: Recipe) -> ImageData:
        from keymix.train.model import load_data

        if self._data is None or self._data[0] != recipe.data:
            self._data = (recipe.data, load_data(recipe.data))
        return self._data[1]


def _wait_for(folder: Path) -> None:
    """Wait for a worker to let go of a run whose parent was killed a moment ago."""
    from keymix.train.files import InUse, locked

    deadline = time.monotonic() + _PATIENCE
    while folder.exists():
        try:
            with locked(folder, "run"):
                return
        except InUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


_runner = Runner()  # of a worker process


def set_up(imports: tuple[str, ...], threads: int) -> None:
    """Make a worker process ready: import the files that register things, limit its threads."""
    import torch

    from keymix.mixers.registry import import_file

    torch.set_num_threads(threads)
    for path in imports:
        import_file(path)


def train_run(recipe: Recipe, folder: str) -> None:
    """Train one run in a worker process: see `Runner.train`."""
    _runner.train(recipe, folder)


def try_run(recipe: Recipe, runs: float) -> Trial | None:
    """Time a few steps in a worker process: see `Runner.try_out`."""
    return _runner.try_out(recipe, runs)
