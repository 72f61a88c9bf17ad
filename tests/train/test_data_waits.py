# SPDX-License-Identifier: Apache-2.0
"""The first signal ends a wait for data, whoever waits, and what was done before is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_resume import traces

from commands import PATIENCE, Command
from keymix.data import decode, loaders
from keymix.errors import Interrupted, UserError
from keymix.tasks.classification.training import ClassificationTask
from keymix.train.callbacks import Callback
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.recipe import Recipe


def hang() -> None:
    """Let the check of a folder wait for an image in every thread."""

    def waiting(*_: object) -> None:
        Path("waits").touch()
        Path("pipe").read_text()

    decode.Encoded.open = waiting  # type: ignore[assignment]


def photos(root: Path) -> Path:
    for shade in (40, 200):
        (root / str(shade)).mkdir(parents=True)
        for i in range(40):
            picture = Image.new("L", (100, 100), shade)
            picture.paste(shade // 2 + i, (i, i, i + 30, i + 40))
            picture.save(root / str(shade) / f"{i:02d}.png")
    return root


@contextmanager
def signalled_once(waits: Path, pipe: Path, trained: Path) -> Iterator[list[str]]:
    """Send this process SIGINT when it waits; if that ends nothing, end the wait and say so."""
    waited: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not (waits.exists() and trained.exists()) and not ended.wait(0.02):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(PATIENCE):
            waited.append("the wait went on")
            waits.unlink()
            pipe.write_text("")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield waited
    finally:
        ended.set()
        watcher.join()


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_batch_and_the_run_resumes_to_the_bit(
    vary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = vary(
        {
            "data.spec": f"folder:{photos(tmp_path / 'images')}",
            "data.limit": None,
            "data.image_size": 150,
            "data.val_fraction": 0.2,
            "data.batch_size": 10,
            "data.workers": 2,
            "augment.crop_padding": 0,
            "augment.flip": True,
            "model.options.patch_size": 25,
            "schedule.epochs": 2,
        }
    )
    train(recipe, tmp_path / "whole")
    waits, pipe, trained = (tmp_path / name for name in ("waits", "pipe", "trained"))
    os.mkfifo(pipe)
    make, step = loaders._made, ClassificationTask.training_step
    served: list[int] = []

    def slow(split: Any, augment: Any, seed: int, order: loaders.Order) -> Any:
        served.append(order[0])
        if augment is not None and order[0] == 1 and served.count(1) == 2:
            waits.touch()
            pipe.read_text()
        return make(split, augment, seed, order)

    def trains(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1:
            trained.touch()
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(loaders, "_made", slow)
        patched.setattr(ClassificationTask, "training_step", trains)
        with signalled_once(waits, pipe, trained) as waited, pytest.raises(Interrupted) as stopped:
            train(recipe, tmp_path / "cut")
    assert not waited
    newest = checkpoints(tmp_path / "cut")[0]
    assert newest.steps > 0
    assert repr(str(newest.path)) in str(stopped.value)
    train(recipe, tmp_path / "cut")
    assert traces(tmp_path / "cut") == traces(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_ends_a_check_whose_threads_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "images")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    words = ["data", "check", "folder:images"]
    command = Command(*words, folder=tmp_path / "said", before=hang)
    try:
        command.until((tmp_path / "waits").exists)
        assert command.ended(signal.SIGINT) == 130
    finally:
        command.kill()
    assert command.err.startswith("keymix: ")
    assert command.err.count("\n") == 1


def started_since(before: Sequence[Any]) -> list[Any]:
    """Children of this process that were not there before."""
    return [each for each in torch.multiprocessing.active_children() if each not in before]


class KillReader(Callback):
    """Kills a process that reads data after a step, once there is a checkpoint to resume from."""

    def __init__(self, run: Path) -> None:
        self.run, self.before = run, torch.multiprocessing.active_children()

    def on_step_end(self, done: int, loss: float) -> None:
        if not checkpoints(self.run):
            return
        for child in started_since(self.before)[:1]:
            os.kill(child.pid or 0, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["after a step", "while its batch is opened"])
def test_a_process_that_reads_data_and_dies_is_said_and_the_run_resumes(
    vary: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr("keymix.data.loading.CACHE_SIDE", 1)  # images are read as they are served
    recipe = vary(
        {
            "data.spec": f"folder:{photos(tmp_path / 'photos')}",
            "data.image_size": 12,
            "data.batch_size": 4,
            "data.workers": 1,
            "augment.crop_padding": 0,
            "schedule.epochs": 1,
        }
    )
    callback: Callback = KillReader(tmp_path / "run")
    connect = resource_sharer._ResourceSharer.get_connection
    before = torch.multiprocessing.active_children()

    @staticmethod
    def lost(ident: Any) -> Any:
        if checkpoints(tmp_path / "run"):
            (child,) = started_since(before)
            os.kill(child.pid or 0, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (child.pid, signal.SIGKILL)).start()
            raise ConnectionResetError  # before the signal of its end arrives
        return connect(ident)

    with monkeypatch.context() as patched:
        if killed == "while its batch is opened":
            callback = Callback()
            patched.setattr(resource_sharer._ResourceSharer, "get_connection", lost)
        with pytest.raises(UserError, match=r"--data\.workers") as stopped:
            train(recipe, tmp_path / "run", progress=callback, checkpoint_minutes=0)
    assert "\n" not in str(stopped.value)
    assert checkpoints(tmp_path / "run")
    assert train(recipe, tmp_path / "run").done
