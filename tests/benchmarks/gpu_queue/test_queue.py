# SPDX-License-Identifier: Apache-2.0
"""The queue on jobs that measure nothing: what it runs, skips, resumes, keeps and says."""

from __future__ import annotations

import itertools
import json
import math
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_jobs

from gpu_queue import child, machine, schedule, store
from gpu_queue.job import Job, Step
from gpu_queue.schedule import Queue

pytestmark = pytest.mark.slow
Make = Callable[..., Queue]


def step(name: str, measure: Any = toy_jobs.quick, **more: Any) -> Step:
    return Step(name=name, measure=measure, **{"seconds": 2.0, **more})


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    machine.preload()


class Clock:
    """The queue's clock, which jumps over an hour when a step has come to some place."""

    def __init__(self) -> None:
        self.at: Path | None = None

    def monotonic(self) -> float:
        jumps = self.at is not None and self.at.exists()
        return time.monotonic() + (3600.0 if jumps else 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(schedule, "time", made)
    return made


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Make a queue of some jobs; another one on the same folders resumes there."""
    monkeypatch.setattr(schedule, "GRACE", 5.0)
    monkeypatch.setattr(schedule, "_WRITE", 0.0)
    monkeypatch.setattr(schedule, "_LOOK", 0.05)

    def make(*made: Job, seconds: float = 1000.0, device: str = "toy", **more: Any) -> Queue:
        for module in (schedule, child):
            monkeypatch.setattr(module, "jobs", lambda: list(made))
        now = time.monotonic()
        folders = {"results": tmp_path / "results", "work": tmp_path / "work"}
        options = {"tiny": True, "data": None, **folders, **more}
        made_queue = Queue(start=now, end=now + seconds + schedule.GRACE, **options)
        made_queue.machine = {"device": device, "dry_run": True}
        return made_queue

    return make


def standing(queue: Queue) -> dict[str, str]:
    return {
        f"{job.name}/{one.name}": queue.standing(job, one)
        for job in queue.jobs
        for one in queue.steps[job.name]
    }


def results(tmp_path: Path, job: Job) -> Any:
    return json.loads((tmp_path / "results" / job.file).read_text())


def test_what_ran_is_kept_and_not_run_again(
    queue: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a"), step("b/c"))
    assert queue(alpha).run()
    kept = results(tmp_path, alpha)
    assert set(kept["steps"]) == {"a", "b/c"}
    assert kept["steps"]["a"]["result"] == {"value": 1.0}
    assert "tests/benchmarks/gpu_queue/toy_jobs.py" in kept["code"][0]["files"]
    with zipfile.ZipFile(tmp_path / "results" / store.ARCHIVE) as archive:
        assert set(archive.namelist()) == {"alpha/a/log.txt", "alpha/b/c/log.txt"}
    again = queue(alpha)
    assert again.waiting() == []
    capsys.readouterr()
    again.summary()
    assert "next: nothing" in capsys.readouterr().out
    # also where only the result files are left, as on another machine
    assert queue(alpha, work=tmp_path / "elsewhere").waiting() == []
    assert len(queue(alpha, again=["alpha/b*"]).waiting()) == 1


def test_a_failure_is_a_result_and_the_others_go_on(queue: Make, tmp_path: Path) -> None:
    alpha = toy_jobs.job(
        1, "alpha", step("raises", toy_jobs.broken), step("dies", toy_jobs.crashing), step("works")
    )
    assert not queue(alpha).run()
    kept = results(tmp_path, alpha)["steps"]
    assert "no such kernel" in kept["raises"]["error"]
    assert [kept[name]["state"] for name in kept] == ["failed", "failed", "done"]
    assert queue(alpha).waiting() == []  # the same code would fail again


def test_a_step_that_hangs_is_ended_and_has_failed(
    queue: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_LEAST", 0.5)
    one = queue(toy_jobs.job(1, "alpha", step("hangs", toy_jobs.hanging, seconds=0.1), step("b")))
    assert not one.run()
    assert standing(one) == {"alpha/hangs": "failed", "alpha/b": "done"}


def test_a_training_stops_in_time_and_goes_on_where_it_stopped(
    queue: Make, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(step=100.0)  # every start takes 100 seconds
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    counts = toy_jobs.job(1, "counts", step("x", toy_jobs.counting, resumable=True, least=0.5))
    one = queue(counts)
    clock.at = one.folder(counts, one.steps["counts"][0]) / "count"
    assert one.run()
    clock.at = None
    part = results(tmp_path, counts)["steps"]["x"]
    assert (part["state"], part["seconds"]) == ("partial", 100.0)
    after = queue(counts)
    # what is left by the share that is done
    assert after.seconds(counts, after.steps["counts"][0]) == pytest.approx(100.0 * 5 / 3)
    assert after.run()
    whole = results(tmp_path, counts)["steps"]["x"]
    assert whole["state"] == "done"
    assert whole["result"] == {"counted": 8, "from": 3}
    assert whole["seconds"] == 200.0
    assert not after.folder(counts, after.steps["counts"][0]).exists()


def test_a_measurement_that_was_cut_short_is_given_more_time(queue: Make, clock: Clock) -> None:
    alpha = toy_jobs.job(1, "alpha", step("slow", toy_jobs.hanging, seconds=900.0))
    one = queue(alpha)
    clock.at = one.folder(alpha, one.steps["alpha"][0]) / "begun"
    assert one.run()  # no fault of its own
    clock.at = None
    after = queue(alpha)
    slow = after.steps["alpha"][0]
    assert after.standing(alpha, slow) == "partial"
    assert after.seconds(alpha, slow) >= 1.5 * 3600


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (3, 3)])
def test_trainings_share_the_gpu_as_their_job_says(
    queue: Make, slots: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_jobs, "TOGETHER", slots)
    runs = [step(name, toy_jobs.meeting, resumable=True) for name in "xyz"]
    counts = toy_jobs.job(1, "counts", *runs, side_by_side=lambda results: slots)
    one = queue(counts, toy_jobs.job(2, "alone", step("a")))
    others: list[int] = []
    following = one.following

    def watched(running: Sequence[Any]) -> Any:
        others.append(len(running))
        assert len({r.job.name for r in running}) <= 1
        return following(running)

    monkeypatch.setattr(one, "following", watched)
    assert one.run()
    assert max(others) == most
    assert set(standing(one).values()) == {"done"}


def test_trainings_share_the_gpu_with_nothing_else(queue: Make) -> None:
    run = step("run", toy_jobs.counting, resumable=True)
    first, second = (
        toy_jobs.job(i, name, step("a"), run, side_by_side=lambda results: 3)
        for i, name in enumerate(("first", "second"))
    )
    one = queue(first, second, only=["*/run"])
    assert one.following([]) == (first, run)
    for others in ((second, run), (first, step("a")), (second, step("a"))):
        busy = SimpleNamespace(job=others[0], step=others[1])
        assert one.following([busy]) is None


def test_only_what_fits_is_started(queue: Make, capsys: pytest.CaptureFixture[str]) -> None:
    long = toy_jobs.job(1, "long", step("a", seconds=600.0))
    short = toy_jobs.job(2, "short", step("b", seconds=3.0))
    one = queue(long, short, seconds=60.0)
    assert one.run()
    assert standing(one) == {"long/a": "not measured", "short/b": "done"}
    capsys.readouterr()
    one.summary()
    needs = (600 + schedule.GRACE) / 60
    assert f"next: long/a, needs {needs:.1f} minutes" in capsys.readouterr().out


def test_a_training_that_cannot_end_before_the_machine_goes_is_not_started(queue: Make) -> None:
    run = step("x", toy_jobs.counting, resumable=True, seconds=900.0, least=1.0)
    counts = toy_jobs.job(1, "counts", run)
    assert queue(counts, seconds=60.0).following([]) is not None
    soon = queue(counts, seconds=60.0, lease=time.monotonic() + 800)
    assert soon.following([]) is None


def test_a_training_that_is_cut_by_commands_needs_more_of_the_lease(queue: Make) -> None:
    run = step("x", toy_jobs.counting, resumable=True, seconds=100.0, least=1.0)
    counts = toy_jobs.job(1, "counts", run)
    for lease, fits in ((170.0, False), (300.0, True)):
        one = queue(counts, seconds=60.0, lease=time.monotonic() + lease)
        assert one.fits(counts, run) is fits


def test_a_half_done_training_counts_though_earlier_code_has_a_result(
    queue: Make, clock: Clock, tmp_path: Path
) -> None:
    counts = toy_jobs.job(1, "counts", step("x", toy_jobs.counting, resumable=True, least=0.5))
    old = stored(machine={"device": "toy", "dry_run": True}, seconds=700.0)
    store.write(tmp_path / "results", [counts], {"counts": {"x": old}})
    one = queue(counts)
    clock.at = one.folder(counts, one.steps["counts"][0]) / "count"
    assert one.run()
    clock.at = None
    after = queue(counts)
    run = after.steps["counts"][0]
    assert after.standing(counts, run) == "partial"
    assert after.seconds(counts, run) < 100.0


def test_results_of_this_machine_are_written_again_where_they_are_gone(
    queue: Make, tmp_path: Path
) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a"))
    assert queue(alpha).run()
    queue(alpha, results=tmp_path / "new").publish_here()
    assert set(store.read(tmp_path / "new")["alpha"]) == {"a"}
    assert (tmp_path / "new" / store.ARCHIVE).is_file()


def test_what_a_step_lacks_keeps_it_alone_back(
    queue: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha = toy_jobs.job(
        1,
        "alpha",
        step("package", packages=("no_such_package",)),
        step("data", data=("cifar10",)),
        step("memory", gpu_gib=100.0),
        step("works"),
    )
    one = queue(alpha, tiny=False)
    one.free_gib = 50.0
    steps = one.steps["alpha"]
    assert [one.lacks(s) for s in steps] == [
        ["package no_such_package"],
        ["data cifar10"],
        ["100 GiB of GPU memory (50 free)"],
        [],
    ]
    assert one.following([]) == (alpha, steps[3])
    (tmp_path / "cifar10").mkdir()
    assert queue(alpha, tiny=False, data=tmp_path).lacks(steps[1]) == ["data cifar10"]  # empty
    (tmp_path / "cifar10" / "train.parquet").touch()
    assert queue(alpha, tiny=False, data=tmp_path).lacks(steps[1]) == []
    capsys.readouterr()
    assert queue(alpha).packages()
    said = capsys.readouterr().out
    assert "no_such_package" in said.splitlines()[0]
    assert "pip download" in said
    assert "-d WHEELS no_such_package" in said
    assert one.run()  # that the others wait is no failure
    assert [*standing(one).values()] == [*["not measured"] * 3, "done"]


def test_results_of_earlier_code_come_last(
    queue: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a"))
    beta = toy_jobs.job(2, "beta", step("b"))
    assert queue(alpha, beta, only=["alpha"]).run()
    first = results(tmp_path, alpha)["steps"]["a"]
    code = results(tmp_path, alpha)["code"][0]
    monkeypatch.setattr(store, "digest_of", lambda files: "another")
    one = queue(alpha, beta)
    assert standing(one) == {"alpha/a": "earlier code", "beta/b": "not measured"}
    assert [job.name for job, _ in one.waiting()] == ["beta", "alpha"]
    assert one.done(alpha) == {}
    assert one.run()
    assert results(tmp_path, alpha)["code"][0]["digest"] == "another" != code["digest"]
    assert first["state"] == "done"


def test_what_would_hold_up_the_others_waits_for_them(queue: Make) -> None:
    many = toy_jobs.job(1, "many", step("a"), step("b", after_all=True))
    one = queue(many, toy_jobs.job(2, "few", step("c")))
    assert [step.name for _, step in one.waiting()] == ["a", "c", "b"]


def test_a_step_that_fails_because_it_was_asked_to_end_has_not_failed(
    queue: Make, clock: Clock
) -> None:
    upset = toy_jobs.job(1, "upset", step("a", toy_jobs.upset, resumable=True, least=0.5))
    one = queue(upset)
    clock.at = one.folder(upset, one.steps["upset"][0]) / "begun"
    assert one.run()
    assert standing(one) == {"upset/a": "partial"}


def test_estimates_follow_what_was_measured_on_the_same_device(queue: Make) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a", seconds=50.0))
    assert queue(alpha, device="one").run()
    for device, seconds in (("one", 5.0), ("two", 50.0)):
        later = queue(alpha, device=device)
        assert later.seconds(alpha, later.steps["alpha"][0]) <= seconds
    assert later.seconds(alpha, later.steps["alpha"][0]) == 50.0
    result = toy_jobs.job(2, "result", step("a"), estimate=lambda step, results: 7.0)
    assert queue(result).minutes(result, result.steps(True)) == pytest.approx(7 / 60)


def test_what_a_dry_run_measured_is_no_result(queue: Make, tmp_path: Path) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a"))
    assert queue(alpha).run()
    assert standing(queue(alpha, tiny=False)) == {"alpha/a": "not measured"}
    with pytest.raises(ValueError, match="dry run"):
        store.came_back(tmp_path / "results", [alpha], commit=None)


def test_a_training_that_failed_goes_on_when_it_is_asked_for_again(queue: Make) -> None:
    falls = toy_jobs.job(1, "falls", step("x", toy_jobs.falling, resumable=True))
    assert not queue(falls).run()
    again = queue(falls, again=["falls"])
    assert again.run()
    assert again.done(falls) == {"x": {"from": 3}}


def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(
    queue: Make, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    alpha = toy_jobs.job(1, "alpha", step("a"))
    with pytest.raises(OSError, match="file"):
        queue(alpha, results=tmp_path / "file").publish_here()


def test_a_fault_of_the_queue_ends_what_runs(queue: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = toy_jobs.job(1, "hangs", step("x", toy_jobs.hanging))
    one = queue(hangs)
    begun: list[Any] = []
    begin = one._begin

    def full(running: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(one, "_begin", lambda *pair: begun.append(begin(*pair)) or begun[-1])
    monkeypatch.setattr(one, "_watch", full)
    with pytest.raises(OSError, match="disk full"):
        one.run()
    begun[0].process.join(60)
    assert begun[0].process.exitcode is not None


def test_an_unknown_pattern_is_refused(queue: Make) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a"))
    for option in ("only", "again"):
        with pytest.raises(ValueError, match="nosuch"):
            queue(alpha, **{option: ["nosuch/*"]})


def test_a_machine_whose_gpu_does_not_work_is_reported_and_measures_nothing(
    queue: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(device: str) -> None:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(machine, "look", look)
    monkeypatch.setattr(schedule, "_METHODS", ("fork",))
    assert not queue(toy_jobs.job(1, "alpha", step("a")), tiny=False).check()
    said = capsys.readouterr().err
    assert "driver initialization" in said
    assert "Nothing was measured" in said


# ---- results on disk ---------------------------------------------------------------------------


def stored(**more: Any) -> store.Stored:
    plain = {"state": "done", "seconds": 1.0, "finished": "2026-01-02", "machine": {"device": "x"}}
    return store.Stored(**{**plain, "command": "run", **more})


def test_result_files_keep_all_that_is_known(tmp_path: Path) -> None:
    alpha = toy_jobs.job(3, "alpha", step("a"), step("b"))
    records = {
        "alpha": {
            "a": stored(result={"x": math.pi}, files=["LICENSE"], digest="0", commit="abc"),
            "b/c": stored(state="failed", error="why", machine={"device": "y"}),
        }
    }
    store.write(tmp_path, [alpha], records)
    assert store.read(tmp_path) == records
    (tmp_path / "3-alpha.json").write_text('{"job": 1}')
    with pytest.raises(ValueError, match=r"3-alpha\.json"):
        store.read(tmp_path)


def test_the_later_record_counts_and_a_partial_one_only_alone(tmp_path: Path) -> None:
    early, late = stored(seconds=1.0), stored(seconds=2.0, finished="2026-01-03")
    part = stored(state="partial", finished="2026-01-04")

    def merged(*ones: store.Stored) -> store.Stored:
        return store.merge(*({"j": {"s": one}} for one in ones))["j"]["s"]

    assert merged(early, late) == merged(late, early) == late
    assert merged(part, early) == merged(early, part) == early
    assert merged(part) == part
    files = ["LICENSE"]
    good = stored(files=files, digest=store.digest_of(files))
    failed = stored(state="failed", finished="2026-01-05")
    assert merged(good, failed) == merged(failed, good) == good  # of the present code
    assert merged(early, failed) == merged(failed, early) == failed
    path = store.record_file(tmp_path, "j", "s/t")
    store.write_record(path, late)
    (tmp_path / "j" / "damaged.json").write_text('{"state": "do')
    assert store.read_records(tmp_path) == {"j": {"s/t": late}}


def test_what_came_back_is_distinguished_from_what_did_not(tmp_path: Path) -> None:
    alpha = toy_jobs.job(1, "alpha", step("a"), step("b"))
    files = ["LICENSE"]
    now = stored(finished="2026-02-01", files=files, digest=store.digest_of(files))
    store.write(tmp_path, [alpha], {"alpha": {"a": stored(), "b": now}})
    came = store.came_back(tmp_path, [alpha], commit="abc")["alpha"]
    assert (came["a"].commit, came["b"].commit) == (None, "abc")
    with pytest.raises(ValueError, match="alpha"):
        store.came_back(tmp_path, [toy_jobs.job(1, "beta", step("a"))], commit=None)
    with pytest.raises(ValueError, match="nowhere"):
        store.came_back(tmp_path / "nowhere", [alpha], commit=None)
    (tmp_path / store.ARCHIVE).write_text("no zip")
    with pytest.raises(ValueError, match=store.ARCHIVE):
        store.came_back(tmp_path, [alpha], commit=None)


def test_small_files_of_two_machines_come_together(tmp_path: Path) -> None:
    archive = tmp_path / "came" / store.ARCHIVE
    store.pack(tmp_path / "nothing", archive)
    assert not archive.exists()
    for machine_name in ("one", "two"):
        kept = tmp_path / machine_name / "alpha" / machine_name
        kept.mkdir(parents=True)
        (kept / "metrics.jsonl").write_text(machine_name)
        store.pack(tmp_path / machine_name, archive)
    with zipfile.ZipFile(archive, "a") as files:
        files.writestr("../1-alpha.json", "{}")
        files.writestr("other/x", "")
    target = tmp_path / "target"
    store.unpack(tmp_path / "came", [toy_jobs.job(1, "alpha", step("a"))], target)
    found = {p.relative_to(tmp_path).as_posix() for p in target.rglob("*") if p.is_file()}
    assert found == {f"target/alpha/{name}/metrics.jsonl" for name in ("one", "two")}


@pytest.mark.parametrize(
    ("key", "value"), [("state", "odd"), ("seconds", "x"), ("finished", 3), ("machine", [])]
)
def test_a_record_of_another_form_is_none(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=key):
        stored(**{key: value})
    path = store.record_file(tmp_path, "j", "s")
    store.write_text(path, json.dumps({**vars(stored()), key: value}))
    assert store.read_records(tmp_path) == {}


SOURCE = '''"""Module."""
import os  # why


def f(a):
    """Say it.

    At length, with a "quote" and a # sign.
    """
    text = "# no comment"  # one
    return f"{a} # {text}"


class C:
    """Nothing else."""
'''


def test_a_fingerprint_follows_what_code_does() -> None:
    same = SOURCE.replace("Say it.", "Say another thing.\n\n    Longer.").replace("# why", "")
    same = same.replace("\n\n\nclass", "\n# a comment\n\nclass").replace("Nothing else", "Ä")
    assert store.bare(same) == store.bare(SOURCE)
    for old, new in (("import os", "import re"), ('"# no', '"# a'), ("{a} #", "{a} ##")):
        assert store.bare(SOURCE.replace(old, new)) != store.bare(SOURCE)
    compile(store.bare(SOURCE), "bare", "exec")
    assert store.digest_of(["README.md"]) != store.digest_of(["LICENSE"])
    assert store.digest_of(["LICENSE", "README.md"]) == store.digest_of(["README.md", "LICENSE"])
    assert store.digest_of(["no such file"]) != store.digest_of([])
