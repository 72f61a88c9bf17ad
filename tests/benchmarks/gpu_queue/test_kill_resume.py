# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import resumes
from dry import context

from commands import forkserver
from gpu_queue.jobs import kill_resume
from gpu_queue.jobs.kill_resume import AS_FAR, EQUAL, JOB, LOSES, REFUSED, conclude

Result = dict[str, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What a process of its own measured, by the fault that was planted."""
    out = tmp_path_factory.mktemp("results") / "cases.json"
    process = forkserver().Process(target=resumes.main, args=(tmp_path_factory.mktemp("work"), out))
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads(out.read_text())


@pytest.mark.slow
def test_resumed_run_is_equal_to_the_bit_on_a_cpu(cases: dict[str, Result]) -> None:
    result = cases["everything"]["result"]
    assert conclude(result) == EQUAL
    assert result["killed_at"] == [1, 1]
    assert result["resumed_at"] == [1, 0]  # two steps are one update
    assert result["repeated"] == {"steps": 2, "first_differs_by": 0.0}
    assert result["switches"]["deterministic algorithms"] is True
    assert result["switches"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "in 1 of 1 settings" in JOB.section({"a": result})


@pytest.mark.slow
def test_nothing_asks_for_cuda_and_no_file_is_left(cases: dict[str, Result]) -> None:
    assert len(cases) == 4
    for case in cases.values():
        assert case["asked"] == 0  # a process that asks cannot fork others that use CUDA
        assert case["left"] == []


@pytest.mark.slow
def test_batch_that_a_resume_leaves_out_is_found(cases: dict[str, Result]) -> None:
    result = cases["skips"]["result"]
    assert conclude(result) == LOSES
    assert "resume loses something**, in 1 of 1" in JOB.section({"32": result})


@pytest.mark.slow
@pytest.mark.parametrize(("case", "end"), [("disturbed", AS_FAR), ("disturbed, skips", LOSES)])
def test_device_that_does_not_repeat_itself_is_no_fault_of_the_resume(
    case: str, end: str, cases: dict[str, Result]
) -> None:
    result = cases[case]["result"]
    assert conclude(result) == end
    assert "the device does not repeat itself" in JOB.section({"32": result})


def test_steps_that_were_computed_again_are_compared_with_those_before_the_kill() -> None:
    before = [(1, 0, 0.5), (1, 1, 0.25)]
    again = kill_resume._repeated(before, [(1, 1, 0.125), (1, 2, 0.0)])
    assert again == {"steps": 1, "first_differs_by": 0.125}
    assert kill_resume._repeated(before, [(1, 2, 0.0)]) == {"steps": 0, "first_differs_by": None}


def made(relative: list[float], resumed: list[float], gap: float | None = 0.0) -> Result:
    """Make a result from relative distances."""

    def far(value: float) -> Result:
        other = {"largest": value, "lines": 2, "images": 9, "answers": 0, "first": [0, 4]}
        same = {"largest": 0.0, "lines": 0, "images": 9, "answers": 0, "first": None}
        differing = 5 if value else 0
        return {"values": 9, "relative": value, "differing": differing} | (other if value else same)

    facts = {"precision": "bf16", "deterministic": False, "everything": False, "device": "cuda"}
    facts |= {"recipe": "r", "images": 9, "batch": 3, "epochs": 3, "steps_per_epoch": 3}
    facts |= {"killed_at": [1, 1], "resumed_at": [1, 1], "first_losses": 1}
    repeated = {"steps": 1, "first_differs_by": gap}
    distances = {"apart": [far(v) for v in relative], "resumed": [far(v) for v in resumed]}
    entries = {"operations": ["index_add_cuda_ does not have a deterministic implementation"]}
    switches = {"CUBLAS_WORKSPACE_CONFIG": None}
    return facts | distances | entries | {"repeated": repeated, "switches": switches}


@pytest.mark.parametrize(
    ("result", "end"),
    [
        (made([0, 0, 0], [0, 0, 0]), EQUAL),
        (made([0, 0, 0], [1e-9, 1e-9, 1e-9]), LOSES),
        (made([1e-3, 2e-3, 1e-3], [2e-2, 1e-3, 5e-2]), AS_FAR),
        (made([1e-3, 2e-3, 1e-3], [3e-2, 1e-3, 3e-2]), LOSES),
        (made([1e-3, 2e-3, 1e-3], [1e-3, 1e-3, 1e-3], gap=1e-6), LOSES),
        (made([1e-3, 2e-3, 1e-3], [1e-3, 1e-3, 1e-3], gap=None), LOSES),
        (made([1e-3], [1e-3], gap=1e-6) | {"first_losses": 2}, AS_FAR),
        ({"refused": "RuntimeError: no deterministic form"}, REFUSED),
    ],
)
def test_conclusion_follows_from_the_distances(result: Result, end: str) -> None:
    assert conclude(result) == end


def test_section_says_why_runs_differ() -> None:
    free, strict = made([1e-3], [1e-3]), made([0], [0]) | {"deterministic": True}
    strict |= {"operations": [], "switches": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}
    refused = made([], []) | {"precision": "16", "deterministic": True, "refused": "No: nll_loss"}
    text = JOB.section({"bf16": free, "bf16,deterministic": strict, "16,deterministic": refused})
    assert "bit-equal to one that was not in 1 of 3 settings (bfloat16, deterministic)" in text
    assert "in 1 of 1 settings, from step 5 of epoch 1 on: the device" in text
    assert "- index_add_cuda_" in text
    assert "were equal to the bit in 1 of 1 settings (CUBLAS_WORKSPACE_CONFIG :4096:8)" in text
    assert "float16 with loss scaling, deterministic: No: nll_loss" in text
    assert text.count("\n| bfloat16") == 2


def test_refused_runs_alone_make_a_section() -> None:
    assert "refused in 1 of 1" in JOB.section({"a": made([], []) | {"refused": "No: nll_loss"}})


def test_run_that_fails_for_another_reason_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"look: exit code 1, not 0: .*'16' needs a CUDA device"):
        kill_resume.measure(context(tmp_path), precision="16", deterministic=True)
