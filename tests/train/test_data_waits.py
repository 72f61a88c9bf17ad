# SPDX-License-Identifier: Apache-2.0
"""The first signal ends a wait for data, whoever waits, and what was done before is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from keymix.data import lazy
from keymix.errors import Interrupted
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train

PATIENCE = 30  # seconds until a wait counts as endless

CHECK = """
import sys
from keymix.cli import main
from keymix.data.sources import folder
def hang(files, i):
    open("waits", "w").close()
    with open("pipe") as pipe:
        pipe.read()
folder.Files.open = hang
sys.exit(main(["data", "check", "folder:images"]))
"""


def photos(root: Path) -> Path:
    for shade in (40, 200):
        (root / str(shade)).mkdir(parents=True)
        for i in range(40):
            picture = Image.new("L", (100, 100), shade)
            picture.paste(shade // 2 + i, (i, i, i + 30, i + 40))
            picture.save(root / str(shade) / f"{i:02d}.png")
    return root


@contextmanager
def signalled_once(waits: Path, pipe: Path) -> Iterator[list[str]]:
    """Send this process SIGINT when it waits; if that ends nothing, end the wait and tell."""
    told: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not waits.exists() and not ended.wait(0.05):
            pass
        time.sleep(1)  # the batches made before are used up
        os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(PATIENCE):
            told.append("the wait went on")
            waits.unlink()
            pipe.write_text("")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield told
    finally:
        ended.set()
        watcher.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_ends_the_wait_for_a_batch_and_the_run_resumes_to_the_bit(
    vary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    recipe = vary(
        {
            "data.spec": f"folder:{photos(tmp_path / 'images')}",
            "data.limit": None,
            "data.image_size": 100,
            "data.val_fraction": 0.2,
            "data.batch_size": 10,
            "data.workers": workers,
            "augment.crop_padding": 0,
            "augment.flip": True,
            "model.options.patch_size": 25,
            "schedule.epochs": 2,
        }
    )
    train(recipe, tmp_path / "whole")
    waits, pipe = tmp_path / "waits", tmp_path / "pipe"
    os.mkfifo(pipe)
    make = lazy._Maker.make
    served: list[int] = []

    def slow(self: Any, order: lazy.Order) -> Any:
        served.append(order[0])
        if self.augment is not None and order[0] == 1 and served.count(1) == 2:
            waits.touch()
            pipe.read_text()
        return make(self, order)

    with monkeypatch.context() as patched:
        patched.setattr(lazy._Maker, "make", slow)
        with signalled_once(waits, pipe) as told, pytest.raises(Interrupted) as stopped:
            train(recipe, tmp_path / "cut")
    assert not told
    newest = checkpoints(tmp_path / "cut")[0]
    assert newest.steps > 0
    assert repr(str(newest.path)) in str(stopped.value)
    train(recipe, tmp_path / "cut")
    for which in ("last", "best"):
        name = files.weights_file(which)
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_check_whose_threads_wait(tmp_path: Path, signum: int, code: int) -> None:
    photos(tmp_path / "images")
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        while not (tmp_path / "waits").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == code
    assert errors.startswith("keymix: ")
    assert errors.count("\n") == 1
