# SPDX-License-Identifier: Apache-2.0
"""The queue as its command runs it, on the CPU at the smallest sizes; killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from gpu_queue import store
from gpu_queue.job import Step
from gpu_queue.jobs import jobs

RUN = Path(__file__).parents[3] / "benchmarks" / "gpu_queue" / "run.py"
# a quick one of each job, and of the spiking one a step that needs SpikingJelly and one that does
# not; the tests of each job measure the others, and those of `test_suite` its only one
ONLY = (
    "mixers/softmax",
    "throughput/imagenet/*",
    "epoch_profile/profile/*",
    "cifar10/vit_small/softmax/0",
    "spiking/neurons/tokens",
    "spiking/memory",
    "depth/*softmax*",
    "kill_resume/32",
)
FIRST = ("mixers/softmax", "spiking/*", "depth/*softmax*")  # of these, in the queue that is killed
LACKS = "spiking/neurons/tokens"
HIDE = """
import importlib.machinery as machinery

find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name == "spikingjelly" else find(name, *more)
)
"""


class Ran:
    """What became of the queue that was killed, and of the one that went on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hidden").mkdir()
        (folder / "hidden" / "sitecustomize.py").write_text(HIDE)
        self.results = folder / "results"
        self.killed_after = self._killed()
        self.kept = self.steps()
        self.left = [pid for pid in _processes(folder) if pid != os.getpid()]
        self.too_few_minutes = self.command("--minutes", "0.3", hide=True)
        self.second = self.command("--minutes", "60")

    def words(self, only: Sequence[str]) -> list[str]:
        places = ["--results", str(self.results), "--work", str(self.folder / "work")]
        return [sys.executable, str(RUN), "--dry-run", *places, "--only", *only]

    def environment(self, *, hide: bool) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # not installed, so to say
        return env | ({"PYTHONPATH": str(self.folder / "hidden")} if hide else {})

    def command(self, *more: str, hide: bool = False) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.words(ONLY), *more],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment(hide=hide),
        )

    def _killed(self) -> list[str]:
        """Kill the queue, which lacks a package, while a training runs; the lines it printed."""
        steps = [name for name in every_step(FIRST) if name in every_step(ONLY)]
        with subprocess.Popen(
            [*self.words(steps), "--minutes", "60"],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(hide=True),
        ) as process:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if sum(": about" in line for line in lines) == 3:
                    break
            process.send_signal(signal.SIGKILL)
        return lines

    def steps(self) -> dict[str, dict[str, Any]]:
        return {
            f"{job.name}/{name}": step
            for job in jobs()
            if (self.results / job.file).is_file()
            for name, step in json.loads((self.results / job.file).read_text())["steps"].items()
        }


def _processes(folder: Path) -> list[int]:
    """Processes of the queue in a folder, once those that end have had time to do so."""
    found = []
    for _ in range(2500):
        found = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if str(folder / "work").encode() in _read(path)
        ]
        if not found:
            break
        time.sleep(0.1)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def every_step(only: Sequence[str]) -> dict[str, Step]:
    """The steps that some patterns name."""
    steps = {f"{job.name}/{step.name}": step for job in jobs() for step in job.steps(True)}
    return {n: step for n, step in steps.items() if any(fnmatch(n, each) for each in only)}


@pytest.mark.slow
def test_the_queue_is_killed_and_run_again(tmp_path: Path) -> None:
    ran = Ran(tmp_path)

    # killed while its third step ran
    assert len(ran.kept) == 2
    assert ran.left == []  # what measured has ended with it
    for name, step in ran.kept.items():
        assert ran.steps()[name] == step
        assert f"{name}: about" not in ran.second.stdout

    # a missing package kept back what needs it, and nothing else before or after
    needing = {n for n, step in every_step(ONLY).items() if "spikingjelly" in step.packages}
    assert needing == {LACKS}
    begun = [line.split()[1] for line in ran.killed_after if ": about" in line]
    assert begun == [
        "mixers/softmax:",
        "spiking/memory:",
        *(f"{name}:" for name in every_step(["depth/*softmax*"])),
    ]
    for said in ("".join(ran.killed_after), ran.too_few_minutes.stdout):
        assert "spikingjelly" in next(line for line in said.splitlines() if "missing" in line)

    # too few minutes for the next step
    assert ran.too_few_minutes.returncode == 0
    assert ": about" not in ran.too_few_minutes.stdout
    assert ran.too_few_minutes.stdout.splitlines()[-1].startswith("next: throughput/imagenet")

    # in the end every step has a result, of which its job can tell
    assert ran.second.returncode == 0, ran.second.stdout + ran.second.stderr
    steps = ran.steps()
    assert steps.keys() == every_step(ONLY).keys()
    assert {step["state"] for step in steps.values()} == {"done"}
    assert ran.second.stdout.splitlines()[-1].startswith("next: nothing")
    measured = [job for job in jobs() if (ran.results / job.file).exists()]
    assert len(measured) == 7
    for job in measured:
        results = {
            name: stored.result or {} for name, stored in store.read(ran.results)[job.name].items()
        }
        assert job.section(results).strip()
        codes = json.loads((ran.results / job.file).read_text())["code"]
        files = {name for code in codes for name in code["files"]}
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
