# SPDX-License-Identifier: Apache-2.0
"""The page says what is measured, what failed and what is not measured, and is up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy_jobs

from gpu_queue import page, store
from gpu_queue.job import Job, Result, Step
from gpu_queue.jobs import jobs
from gpu_queue.store import Stored

MACHINE = {
    "python": "3.12.1",
    "cpu": "Some processor",
    "cores": 16,
    "device": "Some GPU",
    "torch": "2.11.0",
    "triton": None,
    "driver": "550.1",
    "total_gib": 139.8,
}
FILES = ["tests/benchmarks/gpu_queue/toy_jobs.py"]


def record(state: str = "done", **more: Any) -> Stored:
    """What is known of a step."""
    return Stored(
        **{
            "state": state,
            "seconds": 90.0,
            "finished": "2026-11-23T10:00:00+00:00",
            "machine": MACHINE,
            "command": "",
            "files": FILES,
            "digest": store.digest_of(FILES),
            "commit": "0123456789abcdef",
            "result": {"value": 1.0} if state == "done" else None,
            **more,
        }
    )


def job(count: int = 3, **more: Any) -> Job:
    steps = [Step(name=f"s{i}", seconds=60.0, measure=toy_jobs.quick) for i in range(count)]
    return toy_jobs.job(1, "alpha", *steps, **more)


def view(*known: Stored, **more: Any) -> page.View:
    """A job of three steps, of which the first ones are known."""
    return page.View(job(**more), {f"s{i}": stored for i, stored in enumerate(known)})


def test_the_page_is_what_the_results_make() -> None:
    made = page.page(jobs(), store.read(store.RESULTS))
    assert page.PAGE.read_text(encoding="utf-8") == made, (
        f"docs/results/gpu.md is stale: run `{page.COMMAND}` and commit it"
    )


# ---- where a job stands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([], "not measured yet"),
        ([record()] * 3, "measured"),
        ([record()], "1 of 3 steps measured"),
        ([record(), record("failed")], "1 of 3 steps measured, 1 failed"),
        ([record("failed")], "not measured yet, 1 failed"),
        ([record("failed")] * 3, "failed"),
        ([record("partial")], "not measured yet"),
    ],
)
def test_the_state_is_reported(known: list[Stored], expected: str) -> None:
    assert view(*known).state == expected


def test_minutes_are_measured_or_estimated() -> None:
    assert view().minutes == 3.0
    assert view(record(), record("failed")).minutes == 3.5


def test_steps_that_share_the_gpu_share_its_minutes() -> None:
    alone = Step(name="a", seconds=60.0, measure=toy_jobs.quick)
    shared = [
        Step(name=name, seconds=60.0, measure=toy_jobs.quick, resumable=True) for name in "bc"
    ]
    made = toy_jobs.job(1, "alpha", alone, *shared, side_by_side=lambda results: 2)
    assert page.View(made, {}).minutes == 2.0


def test_an_estimate_that_results_correct_is_taken() -> None:
    def twice(step: Step, results: dict[str, Result]) -> float:
        return step.seconds * (1 + len(results))

    assert view(record(), estimate=twice).minutes == (90 + 120 + 120) / 60


# ---- its section ------------------------------------------------------------------------------


def test_a_section_without_results_says_so() -> None:
    text = view().section()
    assert text.startswith("## 1. Alpha\n\nWhat alpha takes.\n\nNot measured yet.\n\n- Command: ")
    assert "Hardware" not in text


def test_a_section_reports_results_machine_versions_and_commit() -> None:
    text = view(record(), record()).section()
    assert "\n\n2 measured.\n\n" in text
    assert text.count("- Hardware: ") == 1
    assert "- Hardware: Some GPU, 139.8 GiB, driver 550.1; Some processor, 16 cores\n" in text
    assert "- Versions: python 3.12.1, torch 2.11.0\n" in text
    assert "[1-alpha.json](gpu/1-alpha.json) (2026-11-23, commit `0123456789ab`)\n" in text
    assert "run.py --only alpha --data DATA --results RESULTS`" in text
    assert "Not measured" not in text


def test_machines_and_commits_that_differ_are_all_reported() -> None:
    other = record(machine={**MACHINE, "device": "Another"}, commit=None)
    text = view(record(), other).section()
    assert text.count("- Hardware: ") == 2
    assert text.count("- Versions: ") == 1
    assert "(2026-11-23, commit `0123456789ab`; 2026-11-23, commit not recorded)" in text


def test_failures_are_shown_by_their_last_line() -> None:
    error = "Traceback\n  File x\nRuntimeError: no `kernel` | here"
    text = view(record("failed", error=error), record("failed", seconds=300.0)).section()
    assert "- `s0` failed after 90 s: `RuntimeError: no 'kernel' | here`\n" in text
    assert "\n\nNot measured yet.\n\n" in text
    assert "- `s1` failed after 5.0 min: `no message`\n" in text


def test_what_was_cut_short_is_shown() -> None:
    text = view(
        record("partial", progress={"epochs": 12, "of": 40}),
        record("partial", progress={"cut short after s": 7}),
    ).section()
    assert "- `s0` was cut short after 90 s: 12 of 40 epochs\n" in text
    assert "- `s1` was cut short after 90 s\n" in text


def test_results_of_steps_that_are_gone_are_counted() -> None:
    gone = page.View(job(1), {"s0": record(), "old": record()})
    assert gone.state == "measured"
    assert "- 1 result of steps that are no longer measured\n" in gone.section()


def test_what_a_job_always_says_is_there_before_any_result() -> None:
    assert "\n\nBy paper: 3.\n\n" in view(always=lambda: "By paper: 3.").section()
    assert "\n\nBy paper: 3.\n\n" in view(record(), always=lambda: "By paper: 3.").section()


# ---- the whole --------------------------------------------------------------------------------


def test_the_first_sentence_says_what_is_known() -> None:
    def first(**known: Stored) -> str:
        text = page.page([job()], {"alpha": known})
        return text.split("\n\n")[2].partition(". ")[0]

    assert first() == "Nothing is measured on a GPU yet"
    assert first(s0=record("failed")) == "Nothing is measured on a GPU yet, 1 failed"
    assert first(s0=record()) == "1 of 3 steps of the queue is measured"
    assert first(s0=record(), s1=record(), s2=record("failed")) == (
        "2 of 3 steps of the queue are measured, 1 failed"
    )
    assert first(**{f"s{i}": record() for i in range(3)}) == "All 3 steps of the queue are measured"


def test_every_job_has_a_row_and_a_section_that_its_row_links_to() -> None:
    beta = toy_jobs.job(2, "beta", Step(name="b", seconds=9.0, measure=toy_jobs.quick))
    text = page.page([job(), beta], {"alpha": {"s0": record()}})
    assert "| [1. Alpha](#1-alpha) | What alpha takes. | 1 of 3 steps measured | 4 |\n" in text
    assert "| [2. Beta](#2-beta) | What beta takes. | not measured yet | 1 |\n" in text
    assert text.index("\n## 1. Alpha\n") < text.index("\n## 2. Beta\n")


def test_the_command_takes_results_in_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    came, kept = tmp_path / "came", tmp_path / "kept"
    monkeypatch.setattr(page, "jobs", lambda: [job()])
    monkeypatch.setattr(page, "_commit", lambda: "feedbeef")
    monkeypatch.setattr(page, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(store, "RESULTS", kept)
    store.write(came, [job()], {"alpha": {"s1": record(commit=None)}})
    store.write(kept, [job()], {"alpha": {"s0": record()}})
    assert page.main(["--take", str(came)]) == 0
    assert "1 step taken" in capsys.readouterr().out
    assert set(json.loads((kept / "1-alpha.json").read_text())["steps"]) == {"s0", "s1"}
    text = (tmp_path / "gpu.md").read_text()
    assert "2 measured." in text
    assert "commit `feedbeef`" in text
    assert page.main([]) == 0
    assert (tmp_path / "gpu.md").read_text() == text
    (came / "1-alpha.json").write_text("{}")
    assert page.main(["--take", str(came)]) == 2
    assert "1-alpha.json" in capsys.readouterr().err
