# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped within an epoch ends as one that was not, to the bit."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from settings import EVERYTHING

from keymix.cli import main
from keymix.data import load
from keymix.errors import Interrupted, UserError
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import engine, files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.files import InUse, locked
from keymix.train.loop import EpochRecord
from keymix.train.recipe import Recipe
from keymix.train.record import WeightsFacts
from keymix.train.resume import Progress
from keymix.train.runs import load_run

Vary = Callable[[dict[str, Any]], Recipe]
STEPS = 5  # an epoch of the tiny run


def traces(folder: Path) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    """The weights' files and the metrics without times."""
    lines = load_run(folder).metrics()
    for line in lines:
        del line["seconds"], line["images_per_s"]
    last, best = ((folder / files.weights_file(which)).read_bytes() for which in ("last", "best"))
    return last, best, lines


@contextmanager
def during(step: int, *signals: int, method: str = "training_step") -> Iterator[None]:
    """Send signals to this process within a step of the run, counted over its epochs.

    Steps of a validation have no number: its first is that of the epoch's first training step.
    """
    original = getattr(ClassificationTask, method)

    def signalled(self: ClassificationTask, batch: Any, *index: int) -> Any:
        if self.current_epoch * STEPS + sum(index) == step:
            for signum in signals:
                os.kill(os.getpid(), signum)
        return original(self, batch, *index)

    setattr(ClassificationTask, method, signalled)
    try:
        yield
    finally:
        setattr(ClassificationTask, method, original)


@pytest.fixture(scope="module")
def whole(tiny_run: Path) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    return traces(tiny_run)


@pytest.mark.parametrize(
    ("step", "signum", "code", "name"),
    [
        (1, signal.SIGINT, 130, "epochs_00000_step_000002.ckpt"),
        (7, signal.SIGTERM, 143, "epochs_00001_step_000003.ckpt"),
        (9, signal.SIGTERM, 143, "epochs_00001.ckpt"),  # an epoch's last step is saved at its end
        (13, signal.SIGINT, 130, "epochs_00002_step_000004.ckpt"),
    ],
)
def test_signal_saves_the_step_and_the_run_goes_on_to_the_bit(
    tiny: Recipe, tmp_path: Path, whole: Any, step: int, signum: int, code: int, name: str
) -> None:
    with during(step, signum), pytest.raises(Interrupted) as stopped:
        train(tiny, tmp_path / "run")
    assert stopped.value.exit_code == code
    newest = checkpoints(tmp_path / "run")[0]
    assert newest.path.name == name
    assert repr(str(newest.path)) in str(stopped.value)
    assert signal.Signals(signum).name in str(stopped.value)
    train(tiny, tmp_path / "run")
    assert traces(tmp_path / "run") == whole


def test_accumulated_gradients_are_not_cut(vary: Vary, tmp_path: Path) -> None:
    recipe = vary(EVERYTHING)
    train(recipe, tmp_path / "whole")
    for step, name in ((5, "epochs_00001_step_000002.ckpt"), (8, "epochs_00001_step_000004.ckpt")):
        with during(step, signal.SIGINT), pytest.raises(Interrupted):
            train(recipe, tmp_path / "cut")
        assert checkpoints(tmp_path / "cut")[0].path.name == name
    train(recipe, tmp_path / "cut")
    assert traces(tmp_path / "cut") == traces(tmp_path / "whole")


def test_checkpoints_within_an_epoch_follow_the_clock(
    tiny: Recipe, tmp_path: Path, whole: Any
) -> None:
    kept: list[list[str]] = []

    def look(line: Any) -> None:
        kept.append([checkpoint.path.name for checkpoint in checkpoints(tmp_path / "run")])

    train(tiny, tmp_path / "run", checkpoint_minutes=0, progress=look)
    assert kept[1] == ["epochs_00002.ckpt", "epochs_00001_step_000004.ckpt"]
    assert traces(tmp_path / "run") == whole
    with pytest.raises(UserError, match="checkpoint_minutes"):
        train(tiny, tmp_path / "other", checkpoint_minutes=-1)


def test_training_clock_waits_for_the_steps_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def wait(device: torch.device) -> None:
        now[0] += 3.0

    monkeypatch.setattr("keymix.train.loop.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    record = EpochRecord(tmp_path, images=9, facts=Mock(), before=Progress())
    for device, seconds in (("cpu", 0.0), ("cuda", 3.0)):
        record.trained(torch.device(device))
        assert record._trained == seconds


def test_second_signal_ends_at_once(tiny: Recipe, tmp_path: Path, whole: Any) -> None:
    with during(7, signal.SIGINT, signal.SIGINT), pytest.raises(Interrupted) as stopped:
        train(tiny, tmp_path / "run")
    assert stopped.value.exit_code == 130
    assert checkpoints(tmp_path / "run")[0].path.name == "epochs_00001.ckpt"
    assert "epochs_00001.ckpt" in str(stopped.value)
    train(tiny, tmp_path / "run")
    assert traces(tmp_path / "run") == whole


def test_signal_in_a_validation_names_what_stands(tiny: Recipe, tmp_path: Path, whole: Any) -> None:
    with (
        during(STEPS, signal.SIGTERM, method="validation_step"),
        pytest.raises(Interrupted, match=r"epochs_00001\.ckpt' is saved"),
    ):
        train(tiny, tmp_path / "run")
    train(tiny, tmp_path / "run")
    assert traces(tmp_path / "run") == whole


def test_signal_in_the_final_test_ends_at_once(
    tiny: Recipe, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        pytest.fail("the test went on")

    monkeypatch.setattr(engine, "score_split", signalled)
    with pytest.raises(Interrupted, match=r"epochs_00003\.ckpt"):
        train(tiny, tmp_path / "run")
    monkeypatch.undo()
    train(tiny, tmp_path / "run")
    assert traces(tmp_path / "run") == whole


def test_signal_before_the_first_step_leaves_nothing(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(config: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(engine, "load_data", signalled)
    with pytest.raises(Interrupted, match="the same command starts from the beginning"):
        train(tiny, tmp_path / "runs" / "one")
    assert not (tmp_path / "runs").exists()


def test_ignored_signal_stays_ignored(vary: Vary, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with during(1, signal.SIGINT, signal.SIGINT):
            train(vary({"schedule.epochs": 1}), tmp_path / "run")
    except Interrupted:
        pytest.fail("the signal was taken")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(checkpoint.steps for checkpoint in checkpoints(tmp_path / "run"))


def test_damaged_checkpoint_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "digits_vit", "--limit", "80", "--epochs", "2", "--data.batch_size", "32"]
    words += ["--schedule.warmup_epochs", "1", "--optim.lr", "4e-3"]  # else it learns nothing
    assert main([*words, "--out", str(out)]) == 0
    (out / files.SUMMARY).unlink()
    newest = checkpoints(out)[0].path
    newest.write_bytes(b"")
    capsys.readouterr()
    assert main([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr().err.splitlines()
    plan = [line for line in printed if " to train on, " in line]
    assert len(plan) == 1
    assert [line for line in printed if not line.startswith("epoch ") and line not in plan] == [
        f"keymix: warning: the checkpoint {str(newest)!r} is damaged (File is not a zip file); "
        "resuming from epochs_00001.ckpt"
    ]


def test_run_killed_while_it_throws_another_away_can_be_repeated(
    vary: Vary, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    def kill(*args: Any) -> None:
        raise Killed

    out = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    (out / "notes.txt").write_text("mine")
    monkeypatch.setattr(files, "write_json", kill)
    other = vary({"schedule.epochs": 1, "seed": 4})
    with pytest.raises(Killed):
        train(other, out, overwrite=True)
    monkeypatch.undo()
    assert not (out / files.SUMMARY).exists()
    assert train(other, out, overwrite=True).summary.seed == 4


def test_stopped_overwrite_goes_on_without_the_flag(tiny: Recipe, tmp_path: Path) -> None:
    said = "the same command without --overwrite resumes"
    with during(7, signal.SIGINT), pytest.raises(Interrupted, match=said):
        train(tiny, tmp_path / "run", overwrite=True)


def test_run_killed_before_its_first_file_starts(vary: Vary, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()
    os.utime(out / ".lock", (0, 0))
    (out / ".recipe.json.part").write_text("{")
    train(vary({"schedule.epochs": 1}), out)
    assert not list(out.glob(".*"))


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(InUse, match="another run is at work")
    with locked(tmp_path / "run", "run"), refused, locked(tmp_path / "run", "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_lock_of_a_killed_process_is_not_left_to_its_children(tmp_path: Path) -> None:
    out = tmp_path / "run"
    reading, writing = os.pipe()
    holder = os.fork()
    if not holder:
        with locked(out, "run"):
            child = os.fork()
            if not child:
                os.write(writing, b"forked")
                time.sleep(60)
                os._exit(0)
            os.write(writing, str(child).encode().rjust(10))
            time.sleep(60)
    received = b""
    while len(received) < 16:
        received += os.read(reading, 16)
    child = int(received.replace(b"forked", b""))
    with pytest.raises(InUse), locked(out, "run"):
        pass
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        assert (out / ".lock").exists()
        with locked(out, "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_equal_weights_make_equal_files(tiny: Recipe, tmp_path: Path) -> None:
    state = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64)}
    facts = WeightsFacts(recipe=replace(tiny, name="é"), data=load("digits", limit=40).record())
    made = set()
    for i in range(20):  # the order of two keys is a coin
        files.write_weights(tmp_path / f"{i}", state, facts)
        made.add((tmp_path / f"{i}").read_bytes())
    assert len(made) == 1
    read, recorded = files.read_weights(tmp_path / "0")
    assert recorded == facts
    assert all(torch.equal(read[name], state[name]) for name in state)
