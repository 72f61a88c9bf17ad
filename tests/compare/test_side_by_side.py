# SPDX-License-Identifier: Apache-2.0
"""Training processes that are killed, orphaned, stopped or slow to stop."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import PATIENCE, fork_workers, forkserver, server_address, wait_for
from keymix.compare import execute
from keymix.compare.events import Event
from keymix.compare.execute import run_side_by_side
from keymix.compare.plan import Job
from keymix.errors import Interrupted, KeymixWarning, WriteError
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, ScheduleConfig
from keymix.train.recipe import replace_path as replaced

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
RECIPE = Recipe(
    name="side_by_side",
    data=DataConfig(spec="digits", limit=80, batch_size=16, eval_batch_size=64),
    model=ModelConfig(name="vit_nano_p2_12", options={"depth": 1, "embed_dim": 16, "num_heads": 2}),
    schedule=ScheduleConfig(epochs=4),
)
# workers run it first: steps of the second epoch wait for as long as there is a file "wait"
SLOW = """
import os
import time
from pathlib import Path

import torch

backward, steps = torch.Tensor.backward, 0


def waiting(*args, **kwargs):
    global steps
    steps += 1
    while steps > 5 and Path(__file__).with_name("wait").exists():
        Path(__file__).with_name(f"waits{os.getpid()}").touch()
        time.sleep(0.1)
    return backward(*args, **kwargs)


torch.Tensor.backward = waiting
"""


def jobs(out: Path) -> list[Job]:
    return [
        Job(
            mixer="softmax",
            seed=seed,
            recipe=replaced(RECIPE, {"seed": seed}),
            folder=out / "runs" / str(seed),
        )
        for seed in (0, 1)
    ]


def run(
    out: Path, watch: Any = lambda event: None, processes: int = 2
) -> dict[tuple[str, int], str]:
    (out / "slow.py").write_text(SLOW)
    return run_side_by_side(
        jobs(out),
        processes=processes,
        threads=1,
        imports=[str(out / "slow.py")],
        logs=out / "runs",
        watch=watch,
    )


class Parent:
    """A process with two workers that are at rest in their second epoch.

    Args:
        out: The folder of its runs.
        grace: How long it waits for workers that it asked to end, in seconds.
    """

    def __init__(self, out: Path, grace: float) -> None:
        self._said = out / "said"
        arguments = (out, grace, self._said, server_address())
        self.process = forkserver().Process(target=_parent, args=arguments)
        self.process.start()

    def send_signal(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def ended(self) -> tuple[int, str]:
        """Wait for the end; the exit code and what it said."""
        self.process.join(PATIENCE)
        return self.process.exitcode, self._said.read_text()


def _parent(out: Path, grace: float, said: Path, server: dict[str, Any]) -> None:
    fork_workers(server)
    execute.GRACE = grace
    try:
        run(out)
    except Interrupted as stop:
        said.write_text(f"{stop}\n")
        sys.exit(stop.exit_code)


def test_killed_worker_is_a_failed_run_and_the_others_go_on(tmp_path: Path) -> None:
    """The run resumes, and the warning of its damage, made in a worker, reaches the user."""
    killed: list[int] = []

    def watch(event: Event) -> None:
        if event.kind == "epoch" and event.seed == 0 and event.epoch == 2:
            killed.append(worker_of(tmp_path / "runs" / "0"))
            os.kill(killed[0], signal.SIGKILL)

    failures = run(tmp_path, watch)
    assert list(failures) == [("softmax", 0)]
    assert "ended by signal 9" in failures["softmax", 0]
    assert (tmp_path / "runs" / "1" / files.SUMMARY).exists()
    newest = checkpoints(tmp_path / "runs" / "0")[0].path
    newest.write_bytes(b"")
    with pytest.warns(KeymixWarning, match="is damaged") as said:
        assert run(tmp_path, processes=1) == {}
    assert str(newest) in str(said[0].message)
    assert (tmp_path / "runs" / "0" / files.SUMMARY).exists()
    assert not list((tmp_path / "runs").glob("*.log"))


def worker_of(folder: Path) -> int:
    """The process that has locked a run's folder."""
    inode = (folder / ".lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        found = re.search(r"FLOCK +ADVISORY +WRITE (\d+) \S+:(\d+) ", line)
        if found and int(found[2]) == inode:
            return int(found[1])
    raise AssertionError(f"nobody has locked {folder}")


def workers_at_rest(out: Path) -> list[int]:
    return [int(path.name.removeprefix("waits")) for path in out.glob("waits*")]


def gone(workers: list[int]) -> bool:
    return not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.fixture
def parent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Parent]:
    """See `Parent`; the parameter is its grace."""
    (tmp_path / "wait").touch()
    made = Parent(tmp_path, request.param)
    try:
        wait_for(lambda: len(workers_at_rest(tmp_path)) == 2, made.process.is_alive)
        yield made
    finally:
        made.process.kill()
        made.process.join()


@pytest.mark.parametrize("parent", [10.0], indirect=True)
def test_runs_of_a_killed_parent_go_on_in_the_next(parent: Parent, tmp_path: Path) -> None:
    workers = workers_at_rest(tmp_path)
    (tmp_path / "wait").unlink()
    parent.process.kill()  # the workers are at rest and notice it at once, or while the next waits
    parent.process.join()
    assert run(tmp_path, processes=1) == {}
    wait_for(lambda: gone(workers))
    for job in jobs(tmp_path):
        train(job.recipe, tmp_path / "whole" / str(job.seed))
        name = files.weights_file("last")
        whole = (tmp_path / "whole" / str(job.seed) / name).read_bytes()
        assert (job.folder / name).read_bytes() == whole


@pytest.mark.parametrize("parent", [10 * PATIENCE], indirect=True)
def test_second_ctrl_c_kills_workers_that_are_slow_to_stop(parent: Parent, tmp_path: Path) -> None:
    workers = workers_at_rest(tmp_path)
    parent.send_signal(signal.SIGINT)
    parent.process.join(1)
    assert parent.process.is_alive()  # it waits for its workers
    parent.send_signal(signal.SIGINT)
    code, said = parent.ended()
    assert code == 130
    assert said.count("\n") == 1
    assert str(tmp_path) in said
    assert gone(workers)


@pytest.mark.parametrize("parent", [0.5], indirect=True)
def test_workers_have_a_while_to_save_and_are_killed_then(parent: Parent, tmp_path: Path) -> None:
    workers = workers_at_rest(tmp_path)
    parent.send_signal(signal.SIGTERM)
    code, said = parent.ended()
    assert code == 143
    assert "0 of 2 runs under way ended in order" in said
    assert gone(workers)


def test_log_that_cannot_be_made_ends_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "runs" / "worker0.log").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"worker0\.log"):
        run(tmp_path)
