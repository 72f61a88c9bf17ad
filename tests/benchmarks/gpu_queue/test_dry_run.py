# SPDX-License-Identifier: Apache-2.0
"""The queue as its command runs it, on the CPU at the smallest sizes; killed and resumed."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from commands import forkserver, wait_for
from gpu_queue import store
from gpu_queue.job import Step
from gpu_queue.jobs import jobs

RUN = Path(__file__).parents[3] / "benchmarks" / "gpu_queue" / "run.py"
# a quick one of each job, and of the spiking one a step that needs SpikingJelly and one that does
# not; the tests of each job measure the others, and those of `test_suite` its only one
ONLY = (
    "mixers/ceilings",
    "mixers/softmax",
    "throughput/imagenet/*",
    "epoch_profile/profile/*",
    "cifar10/vit_small/softmax/0",
    "spiking/neurons/tokens",
    "spiking/memory",
    "depth/*softmax*",
    "kill_resume/32",
    "attention_kernels/static_key/errors",
)
FIRST = ("mixers/ceilings", "spiking/*", "depth/*softmax*")  # of these, in the queue that is killed
LACKS = "spiking/neurons/tokens"


def run_queue(words: Sequence[str], said: Path) -> None:
    """Run the command, as if SpikingJelly were not installed, in a process that is forked."""
    stream = os.open(said, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(stream, number)
    find = PathFinder.find_spec

    def hidden(name: str, *more: Any) -> Any:
        return None if name == "spikingjelly" else find(name, *more)

    with mock.patch.object(PathFinder, "find_spec", hidden), mock.patch("sys.argv", [*words]):
        runpy.run_path(words[0], run_name="__main__")


class Ran:
    """What became of the queue that was killed, and of the one that went on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.killed_after = self._killed()
        self.kept = self.steps()
        self.left = _processes(folder)
        self.too_few_minutes = self.command("--minutes", "0.3")
        self.second = self.command("--minutes", "60")

    def words(self, only: Sequence[str], *more: str) -> list[str]:
        places = ["--results", str(self.results), "--work", str(self.folder / "work")]
        return [str(RUN), "--dry-run", *places, "--only", *only, *more]

    def command(self, *more: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # not installed, so to say
        return subprocess.run(
            [sys.executable, *self.words(ONLY, *more)],
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )

    def _killed(self) -> str:
        """Kill the queue, which lacks a package, while its third step runs; what it printed."""
        steps = [name for name in every_step(FIRST) if name in every_step(ONLY)]
        said = self.folder / "said"
        process = forkserver().Process(
            target=run_queue, args=(self.words(steps, "--minutes", "60"), said)
        )
        process.start()
        wait_for(lambda: said.exists() and said.read_text().count(": about") == 3, process.is_alive)
        process.kill()
        process.join()
        return said.read_text()

    def steps(self) -> dict[str, dict[str, Any]]:
        return {
            f"{job.name}/{name}": step
            for job in jobs()
            if (self.results / job.file).is_file()
            for name, step in json.loads((self.results / job.file).read_text())["steps"].items()
        }


def _processes(folder: Path) -> list[int]:
    """Processes that print into a folder, once those that end have had time to do so."""
    found = []
    for _ in range(2500):
        found = [
            int(path.parents[1].name)
            for path in Path("/proc").glob("[0-9]*/fd/1")
            if str(folder) in _target(path)
        ]
        if not found:
            break
        time.sleep(0.1)
    return found


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # it ended meanwhile, or is another's
        return ""


def every_step(only: Sequence[str]) -> dict[str, Step]:
    """The steps that some patterns name."""
    steps = {f"{job.name}/{step.name}": step for job in jobs() for step in job.steps(True)}
    return {n: step for n, step in steps.items() if any(fnmatch(n, each) for each in only)}


@pytest.mark.slow
def test_the_queue_is_killed_and_run_again(tmp_path: Path) -> None:
    ran = Ran(tmp_path)
    kept = ran.kept

    # killed while its third step ran
    assert len(kept) == 2
    assert ran.left == []  # what measured has ended with it, and left nothing
    for name, step in kept.items():
        assert ran.steps()[name] == step
        assert f"{name}: about" not in ran.second.stdout
    for name in every_step(ONLY).keys() - kept.keys():
        assert f"{name}: about" in ran.second.stdout

    # a missing package kept back what needs it, and nothing else before or after
    needing = {n for n, step in every_step(ONLY).items() if "spikingjelly" in step.packages}
    assert needing == {LACKS}
    said = ran.killed_after.splitlines()
    assert "spikingjelly" in next(line for line in said if "missing" in line)
    assert [line.split()[1] for line in said if ": about" in line] == [
        "mixers/ceilings:",
        "spiking/memory:",
        *(f"{name}:" for name in every_step(["depth/*softmax*"])),
    ]

    # too few minutes for the next step
    assert ran.too_few_minutes.returncode == 0
    assert ": about" not in ran.too_few_minutes.stdout
    assert ran.too_few_minutes.stdout.splitlines()[-1].startswith("next: mixers/softmax")

    # in the end every step has a result, of which its job can tell
    assert ran.second.returncode == 0, ran.second.stdout + ran.second.stderr
    steps = ran.steps()
    assert steps.keys() == every_step(ONLY).keys()
    assert {step["state"] for step in steps.values()} == {"done"}
    assert ran.second.stdout.splitlines()[-1].startswith("next: nothing")
    measured = [job for job in jobs() if (ran.results / job.file).exists()]
    assert len(measured) == 8
    for job in measured:
        results = {
            name: stored.result or {} for name, stored in store.read(ran.results)[job.name].items()
        }
        assert job.section(results).strip()
        whole = json.loads((ran.results / job.file).read_text())
        codes = {
            step["code"] for n, step in whole["steps"].items() if f"{job.name}/{n}" not in kept
        }
        files = {name for code in codes for name in whole["code"][code]["files"]}
        assert f"benchmarks/gpu_queue/jobs/{Path(job.source).name}" in files
        assert any(name.startswith("src/keymix/") for name in files)
        assert not any("gpu_queue/store" in name for name in files)


def test_the_queue_lists_what_is_left_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "--list"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for job in jobs():
        assert f"{job.number} {job.name}" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "0"],
        ["--minutes", "5"],  # without --results
        ["--dry-run", "--results", "R", "--only", "nosuch"],
        ["--list", "--data", "no such folder"],
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_written_to_are_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    for places in ({"--results": "file", "--work": "w"}, {"--results": "r", "--work": "file"}):
        words = [word for pair in places.items() for word in pair]
        done = subprocess.run(
            [sys.executable, str(RUN), "--dry-run", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "file" in done.stderr
        assert ": about" not in done.stdout
