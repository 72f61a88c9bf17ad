# SPDX-License-Identifier: Apache-2.0
"""The job that runs the tests: what it counts, keeps of failures, and ends."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from dry import context

from commands import wait_for
from gpu_queue.job import Context
from gpu_queue.jobs import test_suite as job

pytestmark = pytest.mark.slow
MADE = """
import pytest

@pytest.mark.parametrize("n", range(22))
def test_wrong(n):
    assert n < 0, "\\n".join(["much " * 100] * 30) + f" number {n}"

def test_right(): pass

@pytest.mark.skip(reason="no device")
def test_left_out(): pass

@pytest.fixture
def broken():
    raise OSError("no such place")

def test_never_begun(broken): pass
"""

SLOW = """
import os, pathlib, time

def test_slow():
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(100)
"""


def written(folder: Path, text: str, name: str = "test_made.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def result(**changes: Any) -> dict[str, Any]:
    return {"passed": 5, "failed": 0, "skipped": 2, "seconds": 9.6, "failures": [], **changes}


def test_dry_run_measures_the_contract_and_reports_its_files(tmp_path: Path) -> None:
    (step,) = job.JOB.steps(True)
    found = step.measure(context(tmp_path))
    assert found["failed"] == 0, found["failures"]
    assert found["passed"] > 0
    assert {
        "tests/conftest.py",
        "tests/contract/conftest.py",
        "tests/contract/test_mixer_dtypes.py",
        "tests/mixer_cases.py",
        "src/keymix/mixers/identity.py",
        "benchmarks/gpu_queue/jobs/test_suite.py",
    } <= set(found["_files"])
    said = job.JOB.section({step.name: found})
    assert said.startswith(f"All {found['passed']} tests that ran pass. Not measured yet: ")
    assert "`contract/float32`" in said.splitlines()[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_outcomes_are_counted_and_errors_cut_short(tmp_path: Path, workers: int) -> None:
    made, unread = written(tmp_path, MADE), written(tmp_path, "import nowhere", "test_unread.py")
    found = job.run_tests([made, unread], workers, context(tmp_path / "work"))
    # a file that cannot be loaded is reported by every worker, and once by the run
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 24, 1)
    assert found["reasons"] == {"no device": 1}
    assert len(found["failures"]) == job.MOST
    for failure in found["failures"]:
        lines = failure["error"].splitlines()
        assert 0 < len(lines) <= job.LINES
        assert max(map(len, lines)) <= job.WIDTH
    said = job.section({"gpu_marked": found})
    assert said.startswith("**24 tests fail:** 24 in `gpu_marked`.")
    assert "`gpu_marked`: 4 more." in said


class Late(Context):
    """Of a step whose time is up when its test has begun."""

    def left(self) -> float:
        wait_for((self.work.with_name("pid")).exists)
        return 0.0


def test_tests_that_do_not_end_are_ended(tmp_path: Path) -> None:
    made = written(tmp_path, SLOW)
    with pytest.raises(TimeoutError, match="had not ended"):
        job.run_tests([made], 0, Late(**vars(context(tmp_path / "work"))))
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_tests_end_with_a_step_that_is_reported_to_end(tmp_path: Path) -> None:
    made = written(tmp_path, SLOW)
    fork = multiprocessing.get_context("fork")
    step = fork.Process(target=job.run_tests, args=([made], 0, context(tmp_path / "work")))
    step.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert step.is_alive()
        time.sleep(0.1)
    step.terminate()
    step.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_pytest_refuses_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 4:\n(.|\n)*--nonsense"):
        job.run_tests(["--nonsense"], 0, context(tmp_path))


def test_files_with_marked_tests_are_found() -> None:
    marked = job.marked()
    assert {"tests/train/test_engine.py", "tests/ops/test_neuron_paths.py"} <= set(marked)
    assert "tests/contract/test_mixer_contract.py" not in marked


def test_every_precision_is_a_step() -> None:
    names = [step.name for step in job.JOB.steps(False)]
    assert names == [
        "gpu_marked",
        *(f"contract/{name}" for name in ("float64", "float32", "bf16", "fp16", "compiled")),
    ]


def test_section_answers_first() -> None:
    whole = {step.name: result() for step in job.steps(False)}
    assert job.section(whole).startswith("All 30 tests that ran pass.\n")
    none = {"gpu_marked": result(passed=0)}
    assert job.section(none).startswith("No test ran: all were skipped. Not measured yet: ")
    said = job.section({**none, "contract/bf16": result()})
    assert said.startswith("All 5 tests that ran pass. In `gpu_marked` none ran. Not measured yet")
    failure = {"test": "tests/a.py::test_b[c]", "error": "assert 1 == 2"}
    said = job.section({**whole, "contract/fp16": result(failed=1, failures=[failure])})
    assert said.startswith("**1 tests fail:** 1 in `contract/fp16`.\n")
    assert "`contract/fp16`: `tests/a.py::test_b[c]`\n\n```text\nassert 1 == 2\n```" in said
    assert "| `contract/fp16` | 5 | 1 | 2 | 10 |" in said
