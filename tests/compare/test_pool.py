# SPDX-License-Identifier: Apache-2.0
"""Training processes that are killed, orphaned, stopped or slow to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import PATIENCE, wait_for
from keymix.compare.pool import Event, Job, run_side_by_side
from keymix.errors import KeymixWarning, WriteError
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, ScheduleConfig
from keymix.train.recipe import replace_path as replaced

RECIPE = Recipe(
    name="pooled",
    data=DataConfig(spec="digits", limit=80, batch_size=16, eval_batch_size=64),
    model=ModelConfig(name="vit_nano_p2_12", options={"depth": 1, "embed_dim": 16, "num_heads": 2}),
    schedule=ScheduleConfig(epochs=4),
)
# workers run it first: a step waits for as long as there is a file "wait" beside it
SLOW = """
import time
from pathlib import Path

from keymix.train.task import ClassificationTask

train = ClassificationTask.training_step


def training_step(task, batch, batch_idx):
    while Path(__file__).with_name("wait").exists() and task.current_epoch:
        Path(__file__).with_name(f"waits{task.recipe.seed}").touch()
        time.sleep(0.1)
    return train(task, batch, batch_idx)


ClassificationTask.training_step = training_step
"""
PARENT = """
import sys
from pathlib import Path

sys.path[:0] = map(str, Path(sys.argv[1]).parents[:2])
import test_pool
from keymix.compare import pool
from keymix.errors import Interrupted

if __name__ == "__main__":
    pool.GRACE = float(sys.argv[3])
    try:
        test_pool.pooled(Path(sys.argv[2]))
    except Interrupted as stop:
        print(stop, flush=True)
        sys.exit(stop.exit_code)
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


def pooled(
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


@pytest.mark.slow
def test_killed_worker_is_a_failed_run_and_resumes_with_a_warning_of_its_damage(
    tmp_path: Path,
) -> None:
    killed: list[int] = []

    def watch(event: Event) -> None:
        if event.kind == "epoch" and event.seed == 0 and not killed:
            killed.append(worker_of(tmp_path, tmp_path / "runs" / "0"))
            os.kill(killed[0], signal.SIGKILL)

    failures = pooled(tmp_path, watch)
    assert list(failures) == [("softmax", 0)]
    assert "ended by signal 9" in failures["softmax", 0]
    assert (tmp_path / "runs" / "1" / files.SUMMARY).exists()
    newest = checkpoints(tmp_path / "runs" / "0")[0].path
    newest.write_bytes(b"")
    with pytest.warns(KeymixWarning, match="is damaged") as said:  # of the worker's process
        assert pooled(tmp_path, processes=1) == {}
    assert str(newest) in str(said[0].message)
    assert (tmp_path / "runs" / "0" / files.SUMMARY).exists()
    assert not list((tmp_path / "runs").glob("*.log"))


def worker_of(out: Path, folder: Path) -> int:
    """The process that holds a run's folder."""
    inode = (folder / ".lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        found = re.search(r"FLOCK +ADVISORY +WRITE (\d+) \S+:(\d+) ", line)
        if found and int(found[2]) == inode:
            return int(found[1])
    raise AssertionError(f"nobody holds {folder} of {out}")


@pytest.fixture
def parent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the pool, its workers at rest in their second epoch.

    The parameter is how long it waits for workers that it asked to end, in seconds.
    """
    (tmp_path / "wait").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, __file__, str(tmp_path), str(request.param)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(
            lambda: len(list(tmp_path.glob("waits*"))) == len(jobs(tmp_path)),
            lambda: process.poll() is None,
        )
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("parent", [10.0], indirect=True)
def test_runs_of_a_killed_parent_go_on_in_the_next(
    parent: subprocess.Popen[str], tmp_path: Path
) -> None:
    workers = [worker_of(tmp_path, job.folder) for job in jobs(tmp_path)]
    (tmp_path / "wait").unlink()
    parent.kill()  # the workers are at rest and notice it at once, or while the next one waits
    parent.wait()
    assert pooled(tmp_path, processes=1) == {}
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    for job in jobs(tmp_path):
        train(job.recipe, tmp_path / "whole" / str(job.seed))
        name = files.weights_file("last")
        whole = (tmp_path / "whole" / str(job.seed) / name).read_bytes()
        assert (job.folder / name).read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("parent", [10 * PATIENCE], indirect=True)
def test_second_ctrl_c_kills_workers_that_are_slow_to_stop(
    parent: subprocess.Popen[str], tmp_path: Path
) -> None:
    workers = [worker_of(tmp_path, job.folder) for job in jobs(tmp_path)]
    parent.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for its workers
        parent.wait(1)
    parent.send_signal(signal.SIGINT)
    said, _ = parent.communicate(timeout=PATIENCE)
    assert parent.returncode == 130
    assert said.count("\n") == 1
    assert str(tmp_path) in said
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize("parent", [0.5], indirect=True)
def test_workers_have_a_while_to_save_and_are_killed_then(
    parent: subprocess.Popen[str], tmp_path: Path
) -> None:
    parent.send_signal(signal.SIGTERM)
    said, _ = parent.communicate(timeout=PATIENCE)
    assert parent.returncode == 143
    assert "0 of 2 runs under way ended in order" in said


def test_log_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs" / "worker0.log").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"worker0\.log"):
        pooled(tmp_path)


def test_process_that_dies_within_a_line_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved = tmp_path / "halved"
    halved.write_text('#!/bin/sh\nread job\nprintf \'{"kind": "ep\'\nkill -9 $$\n')
    halved.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(halved))
    job = Job(mixer="softmax", seed=0, recipe=RECIPE, folder=tmp_path / "run")
    failures = run_side_by_side(
        [job],
        processes=1,
        threads=1,
        imports=[],
        logs=tmp_path / "runs",
        watch=lambda event: None,
    )
    assert "by signal 9" in failures["softmax", 0]
