# SPDX-License-Identifier: Apache-2.0
"""Signals through the real command: what is saved, what is said, which code comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keymix.train import files
from keymix.train.checkpoints import checkpoints

KEYMIX = [sys.executable, "-m", "keymix"]
SMALL = ["--limit", "400", "--epochs", "200", "--data.batch_size", "16"]
PATIENCE = 250  # seconds, on a machine that is busy with other things


class Command:
    """A ``keymix`` command in a process group of its own, its standard error read as it comes."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*KEYMIX, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def until(self, path: Path, pattern: str) -> None:
        """Wait for a file below a folder; three processes may have to import PyTorch first."""
        deadline = time.monotonic() + PATIENCE
        while not any(path.rglob(pattern)):
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    def end(self, signum: int, *, times: int = 1, apart: float = 0.0) -> int:
        """Signal the process and return its exit code."""
        for _ in range(times):
            self.process.send_signal(signum)
            time.sleep(apart)
        code = self.process.wait(timeout=PATIENCE)
        self._reader.join(10)
        return code


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()


def told(command: Command) -> str:
    """The one line that keymix said at the end; there is no traceback."""
    assert not any("Traceback" in line for line in command.lines), command.lines
    said = [line for line in command.lines if line.startswith("keymix: ")]
    assert len(said) == 1, command.lines
    assert command.lines[-1] == said[0]
    return said[0]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_train_saves_and_says_where(
    commands: list[Command], tmp_path: Path, signum: int, code: int
) -> None:
    out = tmp_path / "run"
    command = Command("train", "digits_vit", *SMALL, "--out", str(out))
    commands.append(command)
    command.until(out, "epochs_00001.ckpt")
    assert command.end(signum) == code
    newest = checkpoints(out)[0]
    line = told(command)
    assert signal.Signals(signum).name in line
    assert repr(str(newest.path)) in line
    assert "same command" in line
    assert not list(out.rglob("*.part"))
    assert not (out / ".lock").exists()


def test_second_ctrl_c_ends_at_once_and_breaks_no_file(
    commands: list[Command], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = Command("train", "digits_vit", *SMALL, "--out", str(out))
    commands.append(command)
    command.until(out, "epochs_00001.ckpt")
    start = time.monotonic()
    assert command.end(signal.SIGINT, times=2, apart=0.001) == 130
    assert time.monotonic() - start < 5
    told(command)
    assert not list(out.rglob("*.part"))
    files.read_weights(out / "weights_best.safetensors")
    assert [line.epoch for line in files.read_metrics(out / files.METRICS)][:1] == [0]


@pytest.mark.parametrize(
    ("processes", "signum", "code"), [("1", signal.SIGTERM, 143), ("2", signal.SIGINT, 130)]
)
def test_stopped_comparison_saves_its_runs(
    commands: list[Command], tmp_path: Path, processes: str, signum: int, code: int
) -> None:
    out = tmp_path / "comparison"
    words = ["compare", *SMALL, "--mixers", "mhsa,ska", "--seeds", "1", "--processes", processes]
    words += ["--limit", "1300", "--data.batch_size", "4"]  # epochs of some seconds
    command = Command(*words, "--out", str(out))
    commands.append(command)
    command.until(out, "epochs_00001.ckpt")
    time.sleep(0.5)  # past the end of the epoch, where there is no step to save
    assert command.end(signum) == code
    line = told(command)
    assert signal.Signals(signum).name in line
    assert repr(str(out)) in line
    assert "same command" in line
    if processes == "2":
        assert re.search(r"\d of 2 runs under way ended in order", line)
    assert any("_step_" in path.name for path in out.rglob("*.ckpt")), list(out.rglob("*.ckpt"))
    assert not list(out.rglob("*.part"))
    assert not list(out.rglob(".lock"))
    assert not list(out.rglob("*.log")), [log.read_text() for log in out.rglob("*.log")]


def test_second_train_in_a_folder_is_refused(commands: list[Command], tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = Command("train", "digits_vit", *SMALL, "--out", str(out))
    commands.append(first)
    first.until(out, "epochs_00001.ckpt")
    second = Command("train", "digits_vit", *SMALL, "--out", str(out))
    commands.append(second)
    assert second.process.wait(timeout=PATIENCE) == 2
    second._reader.join(10)
    assert "another run is at work" in told(second)
    assert first.process.poll() is None
    assert first.end(signal.SIGINT) == 130
