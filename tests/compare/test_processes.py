# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own: killed, orphaned, stopped, slow to stop, and alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from few_digits import brittle, small

from commands import PATIENCE, forkserver, wait_for
from keymix.compare import execute, folder
from keymix.compare.events import Event
from keymix.compare.execute import train_runs
from keymix.compare.runs import ERROR, log_of, read_error
from keymix.data import load
from keymix.errors import Interrupted, KeymixWarning
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.files import Lock

pytestmark = pytest.mark.slow
# processes import it first: steps of the second epoch wait for as long as there is a file "wait"
SLOW = """
import os
import time
from pathlib import Path

import torch

backward, steps = torch.Tensor.backward, 0


def waiting(*args, **kwargs):
    global steps
    steps += 1
    while steps > 3 and Path(__file__).with_name("wait").exists():
        Path(__file__).with_name(f"waits{os.getpid()}").touch()
        time.sleep(0.1)
    return backward(*args, **kwargs)


torch.Tensor.backward = waiting
"""
RUNS = ("runs/softmax/seed0", "runs/static_key/seed0")


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A comparison of which the first runs of two mixers are not done."""
    there = Path(shutil.copytree(finished, tmp_path / "out"))
    for name in RUNS:
        shutil.move(there / name, there / f"{name}.whole")
    (tmp_path / "slow.py").write_text(SLOW)
    return there


def train(out: Path, watch: Any = lambda event: None) -> None:
    plan = folder.read(out).plan
    question = replace(plan.question, imports=(out.with_name("slow.py"),))
    plan = replace(plan, processes=2, question=question)
    folder.keep(replace(folder.read(out), plan=plan))
    train_runs(plan, load("digits", limit=100), watch=watch)


def whole(out: Path, name: str) -> bool:
    """Whether a run has the weights of the one that was not disturbed."""
    weights = files.weights_file("last")
    return (out / name / weights).read_bytes() == (out / f"{name}.whole" / weights).read_bytes()


def waiting(out: Path) -> list[int]:
    return [int(path.name.removeprefix("waits")) for path in out.parent.glob("waits*")]


def gone(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{each}").exists() for each in processes)


def test_a_killed_run_fails_alone_and_resumes(out: Path) -> None:
    """The warning of its damage, made in its process, reaches the user."""
    first, second = (out / name for name in RUNS)
    events: list[Event] = []
    out.with_name("wait").touch()

    def watch(event: Event) -> None:
        events.append(event)
        if (event.kind, event.mixer, event.epoch) == ("epoch", "softmax", 1):
            wait_for(lambda: len(waiting(out)) == 2)
            os.kill(Lock(first).pid, signal.SIGKILL)
            out.with_name("wait").unlink()

    train(out, watch)
    (failed,) = [event for event in events if event.kind == "failed"]
    assert failed.mixer == "softmax"
    assert "signal 9" in failed.text
    assert failed.text == read_error(first)
    assert (second / files.SUMMARY).exists()
    newest = checkpoints(first)[0].path
    newest.write_bytes(b"")
    with pytest.warns(KeymixWarning, match="is damaged") as said:
        train(out)
    assert str(newest) in str(said[0].message)
    assert not (first / ERROR).exists()
    assert not log_of(first).exists()
    assert all(whole(out, name) for name in RUNS)


def test_a_mixer_that_ends_its_process_fails_alone(tmp_path: Path) -> None:
    path = brittle(tmp_path, "exits", "import os; os.write(2, b'last words'); os._exit(7)")
    mixers = "brittle_exits,mhsa,ska"
    out = tmp_path / "out"
    result = small(out, mixers=mixers, controls=False, imports=[path], processes=2)
    (failed,) = result.failed
    assert failed.mixer == "brittle_exits"
    assert "code 7" in failed.reason
    log = out / failed.folder
    assert log.with_name(f"{log.name}.log").read_text() == "last words"
    assert [row.scores["top1"].n for row in result.record.outcome.last] == [0, 1, 1]


class Parent:
    """A process with two runs that are at rest in their second epoch.

    Args:
        out: The folder of the comparison.
        grace: How long it waits for runs that it asked to save, in seconds.
    """

    def __init__(self, out: Path, grace: float) -> None:
        self._said = out.with_name("said")
        self.process = forkserver().Process(target=_parent, args=(out, grace, self._said))
        self.process.start()

    def ended(self) -> tuple[int, str]:
        """Wait for the end; the exit code and what it said."""
        self.process.join(PATIENCE)
        return self.process.exitcode, self._said.read_text()


def _parent(out: Path, grace: float, said: Path) -> None:
    execute.GRACE = grace
    try:
        train(out)
    except Interrupted as stop:
        said.write_text(f"{stop}\n")
        sys.exit(stop.exit_code)


@pytest.fixture
def parent(out: Path, request: pytest.FixtureRequest) -> Iterator[Parent]:
    """See `Parent`; the parameter is its grace."""
    out.with_name("wait").touch()
    made = Parent(out, request.param)
    try:
        wait_for(lambda: len(waiting(out)) == 2, made.process.is_alive)
        yield made
    finally:
        made.process.kill()
        made.process.join()


@pytest.mark.parametrize("parent", [10.0], indirect=True)
def test_a_killed_comparison_leaves_no_process(parent: Parent, out: Path) -> None:
    parent.process.kill()
    parent.process.join()
    wait_for(lambda: gone(waiting(out)))


@pytest.mark.parametrize("parent", [10 * PATIENCE], indirect=True)
def test_a_second_ctrl_c_kills_runs_that_are_slow_to_stop(parent: Parent, out: Path) -> None:
    os.kill(parent.process.pid, signal.SIGINT)
    parent.process.join(1)
    assert parent.process.is_alive()  # it waits for its runs
    os.kill(parent.process.pid, signal.SIGINT)
    code, said = parent.ended()
    assert code == 130
    assert said.count("\n") == 1
    assert str(out) in said
    wait_for(lambda: gone(waiting(out)))


@pytest.mark.parametrize("parent", [0.5], indirect=True)
def test_runs_have_a_while_to_save_and_are_killed_then(parent: Parent, out: Path) -> None:
    os.kill(parent.process.pid, signal.SIGTERM)
    assert parent.ended()[0] == 143
    wait_for(lambda: gone(waiting(out)))


SCRIPT = """
import sys
print("once")
import keymix
from keymix.analysis.memory import Peak
from keymix.compare import costs
peak = Peak(inference_mib=1.0, training_mib=2.0, note="not measured")
costs.peak_memory, costs.BUDGET_SECONDS = lambda builds, *_, **__: dict.fromkeys(builds, peak), 0.1
found = keymix.compare(
    data="digits", mixers="mhsa,ska", seeds=1, limit=60, epochs=1, processes=2, reference=False,
    controls=False, images=False, out=sys.argv[1],
)
assert not found.failed, found.failed
"""


def test_a_script_without_a_guard_is_run_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once"]
