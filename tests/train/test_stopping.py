# SPDX-License-Identifier: Apache-2.0
"""Signals through the real command: what is saved, what is said, which code comes back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_resume import during

from commands import Command
from keymix.cli import main
from keymix.compare.budget import Trial
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import files
from keymix.train.checkpoints import checkpoints

SMALL = ["--limit", "80", "--epochs", "3", "--data.batch_size", "16"]
LONG = ["--limit", "400", "--epochs", "10000", "--data.batch_size", "16"]
# Imported by a comparison's workers: a step of the second epoch waits for a signal.
WAITING = """
import os
import signal
from pathlib import Path

from keymix.tasks.classification.training import ClassificationTask

train = ClassificationTask.training_step


def training_step(task, batch, batch_idx):
    if (task.current_epoch, batch_idx) == (1, 1):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        Path(__file__).with_name(f"waits_{task.recipe.model.mixer}").touch()
        os.read(reading, 1)
    return train(task, batch, batch_idx)


ClassificationTask.training_step = training_step
"""


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


def last_line(text: str) -> str:
    """The one line that keymix said at the end; there is no traceback."""
    lines = text.splitlines()
    assert "Traceback" not in text, text
    said = [line for line in lines if line.startswith("keymix: ")]
    assert len(said) == 1, text
    assert lines[-1] == said[0]
    return said[0]


@pytest.mark.slow
def test_train_keeps_its_folder_to_itself_and_saves_at_ctrl_c(
    commands: list[Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "digits_vit", *LONG, "--out", str(out)]
    command = Command(*words, folder=tmp_path / "said")
    commands.append(command)
    command.until(lambda: checkpoints(out))
    assert main(words) == 2
    assert "another run is at work" in last_line(capsys.readouterr().err)
    assert command.alive
    assert command.ended(signal.SIGINT) == 130
    newest = checkpoints(out)[0]
    line = last_line(command.err)
    assert "SIGINT" in line
    assert repr(str(newest.path)) in line
    assert "same command" in line
    assert not list(out.rglob("*.part"))
    assert not (out / ".lock").exists()


def test_sigterm_is_reported_by_its_own_name_and_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits_vit", *SMALL, "--out", str(tmp_path / "run")]
    with during(7, signal.SIGTERM):
        assert main(words) == 143
    line = last_line(capsys.readouterr().err)
    assert "SIGTERM" in line
    assert repr(str(checkpoints(tmp_path / "run")[0].path)) in line


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once_and_breaks_no_file(
    commands: list[Command], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = Command("train", "digits_vit", *LONG, "--out", str(out), folder=tmp_path / "said")
    commands.append(command)
    command.until(lambda: checkpoints(out))
    assert command.ended(signal.SIGINT, signal.SIGINT) == 130
    last_line(command.err)
    assert not list(out.rglob("*.part"))
    files.read_weights(out / "weights_best.safetensors")
    assert [line.epoch for line in files.read_metrics(out / files.METRICS)][:1] == [0]


COMPARE = ["compare", *SMALL, "--mixers", "mhsa,ska", "--seeds", "1", "--no-controls"]


def stopped_in_order(out: Path, text: str, signum: int) -> None:
    """A stopped comparison said so in its last line, and its runs are saved."""
    line = last_line(text)
    assert signal.Signals(signum).name in line
    assert repr(str(out)) in line
    assert "same command" in line
    assert not list(out.rglob("*.part"))
    assert not list(out.rglob(".lock"))
    assert not list(out.rglob("*.log")), [log.read_text() for log in out.rglob("*.log")]


def test_a_folder_that_vanishes_ends_the_run_which_resumes_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a disk of the network that is unmounted."""
    out, away = tmp_path / "run", tmp_path / "away"
    words = ["train", "digits_vit", *SMALL, "--out", str(out)]
    step = ClassificationTask.training_step

    def vanishing(task: Any, batch: Any, *index: int) -> Any:
        if task.current_epoch == 1 and out.exists():
            out.rename(away)
        return step(task, batch, *index)

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTask, "training_step", vanishing)
        assert main(words) == 2
    line = last_line(capsys.readouterr().err)
    assert f"cannot write '{out}" in line
    assert "No such file" in line
    assert not out.exists()
    away.rename(out)
    (out / files.LOCK).unlink()  # of this process, which has not ended
    assert main(words) == 0


def test_a_comparison_in_one_process_saves_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keymix.compare.budget.timed", lambda *_, **__: Trial(step=1, image=1))
    out = tmp_path / "comparison"
    with during(7, signal.SIGTERM):
        assert main([*COMPARE, "--processes", "1", "--out", str(out)]) == 143
    stopped_in_order(out, capsys.readouterr().err, signal.SIGTERM)
    assert [path.name for path in out.rglob("*_step_*.ckpt")] == ["epochs_00001_step_000003.ckpt"]


@pytest.mark.slow
def test_a_comparison_of_several_processes_saves_their_runs(
    commands: list[Command], tmp_path: Path
) -> None:
    out = tmp_path / "comparison"
    (tmp_path / "waiting.py").write_text(WAITING)
    more: list[Any] = ["--processes", "2", "--import", tmp_path / "waiting.py", "--out", out]
    command = Command(*COMPARE, *map(str, more), folder=tmp_path / "said")
    commands.append(command)
    command.until(lambda: len(list(tmp_path.glob("waits_*"))) == 2)
    assert command.ended(signal.SIGINT) == 130
    stopped_in_order(out, command.err, signal.SIGINT)
    assert len(list(out.rglob("*_step_*.ckpt"))) == 2
