# SPDX-License-Identifier: Apache-2.0
"""One comparison by several processes: the plan, its numbers, single runs, and those elsewhere."""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import PATIENCE, Command, wait_for
from costs import cheap_costs
from keymix.cli import main
from keymix.compare import folder, worker
from keymix.compare.budget import Trial
from keymix.compare.events import Event
from keymix.compare.execute import train_runs
from keymix.compare.runs import ERROR
from keymix.data import load
from keymix.errors import UserError
from keymix.recipes import resolve
from keymix.train.engine import train
from keymix.train.files import LOCK, SUMMARY, Lock, write_json
from keymix.train.recipe import Recipe, replace_path

TINY = ["--mixers", "mhsa,ska", "--no-controls", "--no-reference", "--processes", "1"]
QUICK = [*TINY, "--limit", "60", "--epochs", "1"]
MEASURED = ("latency_ms", "images_per_s", "peak_mib")


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A comparison of softmax, static keys and identity; two runs of softmax are not done."""
    there = Path(shutil.copytree(finished, tmp_path / "out"))
    shutil.rmtree(there / "runs/softmax")
    return there


def trained(out: Path, on_wait: Callable[[], None]) -> list[Event]:
    """Train what is left while the first run is another process's, until it is waited for."""
    plan, events = folder.read(out).plan, list[Event]()
    (out / "runs/softmax/seed0").mkdir(parents=True)
    lock = Lock(out / "runs/softmax/seed0")
    assert lock.tried()

    def watch(event: Event) -> None:
        events.append(event)
        if event.text.startswith("waiting for"):
            on_wait()
            lock.release()

    train_runs(plan, load("digits", limit=100), watch=watch)
    lock.release()
    return [event for event in events if event.kind != "epoch"]


def test_a_run_of_another_process_is_waited_for_when_the_others_are_done(
    out: Path, finished: Path
) -> None:
    def finish() -> None:
        assert (out / "runs/softmax/seed1" / SUMMARY).exists()
        there = finished / "runs/softmax/seed0"
        shutil.copytree(there, out / "runs/softmax/seed0", dirs_exist_ok=True)

    plan, *events = trained(out, finish)
    assert (plan.done, plan.total) == (4, 6)
    assert [(each.kind, each.seed) for each in events] == [
        ("start", 1), ("done", 1), ("note", 0), ("start", 0), ("done", 0),
    ]  # fmt: skip
    assert events[2].text == "waiting for runs that other processes train: softmax, seed 0"


def test_a_run_that_failed_elsewhere_is_not_tried_again(out: Path) -> None:
    place = out / "runs/softmax/seed0"
    *_, failed = trained(out, lambda: (place / ERROR).write_text("no luck\n") and None)
    assert (failed.kind, failed.text) == ("failed", "no luck")
    assert not (place / SUMMARY).exists()


def test_overwrite_deletes_nothing_below_a_process(out: Path) -> None:
    (out / "runs/softmax/seed0").mkdir(parents=True)
    lock = Lock(out / "runs/softmax/seed0")
    assert lock.tried()
    plan = folder.read(out)
    again = replace(plan.plan, question=replace(plan.plan.question, overwrite=True))
    with pytest.raises(UserError, match=rf"process {os.getpid()} on \S+ trains the run .*seed0"):
        folder.claim(again, load("digits", limit=100).record())
    lock.release()
    assert (out / "runs/static_key/seed0" / SUMMARY).exists()


def rows_of(printed: str) -> list[list[str]]:
    """The table of ``--plan``, without its head."""
    lines = [line.split() for line in printed.splitlines() if "runs/" in line]
    assert [int(number) for number, *_ in lines] == [*range(len(lines))]
    return lines


def test_the_plan_numbers_the_runs_and_gives_way_until_one_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["compare", *QUICK, "--seeds", "2", "--out", str(out)]
    assert main([*words, "--optim.lr", "0.001", "--plan"]) == 0
    assert main([*words, "--plan"]) == 0  # another learning rate
    assert [path.name for path in out.iterdir()] == ["plan.json"]
    capsys.readouterr()
    assert main([*words, "--run", "4"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "keymix: error: --run 4: the runs are 0 to 3; see --plan."
    assert main([*words, "--run", "1"]) == 0
    (out / "runs/softmax/seed1").mkdir(parents=True)
    (out / "runs/softmax/seed1" / ERROR).write_text("no luck")
    (out / "runs/static_key/seed1").mkdir(parents=True)
    lock = Lock(out / "runs/static_key/seed1")
    assert lock.tried()
    capsys.readouterr()
    assert main([*words, "--plan"]) == 0
    lock.release()
    assert rows_of(capsys.readouterr().out) == [
        ["0", "softmax", "0", "runs/softmax/seed0", "left"],
        ["1", "static_key", "0", "runs/static_key/seed0", "done"],
        ["2", "softmax", "1", "runs/softmax/seed1", "failed"],
        ["3", "static_key", "1", "runs/static_key/seed1", "running"],
    ]
    assert main([*words, "--optim.lr", "0.001", "--plan"]) == 2
    assert "holds another comparison" in capsys.readouterr().err
    command = json.loads((out / "plan.json").read_text())["plan"]["question"]["command"]
    assert command == " ".join(["keymix", *words])


def test_a_run_that_is_done_returns_without_a_look_at_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["compare", *QUICK, "--seeds", "1", "--out", str(tmp_path), "--run=0"]
    assert main(words) == 0
    monkeypatch.setattr("keymix.compare.run._planned", pytest.fail)
    assert main(words) == 0


def test_a_report_of_some_runs_names_those_that_are_missing(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(out)]) == 0
    said = capsys.readouterr().err
    assert "softmax, seed 0" in said
    assert "softmax, seed 1" in said
    with (out / "results.csv").open(newline="") as stream:
        assert {row["mixer"] for row in csv.DictReader(stream)} == {"static_key", "identity"}
    assert "it has not started" in (out / "report.html").read_text()


# ---- processes ------------------------------------------------------------------------------


_kept = list[Any]()  # what is patched in a process until it ends


def _noted(place: Path) -> None:
    """Let every process time other steps, and note who times them and which runs it trains."""

    def timed(*_: Any, **__: Any) -> Trial:
        (place / f"timed{os.getpid()}").touch()
        return Trial(step=0.7 + os.getpid() % 16 / 100, image=1e-4)

    def noted(recipe: Recipe, out: Path, **more: Any) -> Any:
        with (place / "trained").open("a") as log:
            log.write(f"{out.parent.name} {out.name}\n")
        return train(recipe, out, **more)

    patch = pytest.MonkeyPatch()
    patch.setattr("keymix.compare.budget.timed", timed)
    patch.setattr(worker, "train", noted)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start commands that end with the test."""
    started: list[Command] = []

    def command(*words: str, before: Callable[[], object]) -> Command:
        place = tmp_path / f"said{len(started)}"
        started.append(Command(*words, folder=place, before=before))
        return started[-1]

    yield command
    for each in started:
        each.kill()


def table(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(newline="") as stream:
        rows = [*csv.DictReader(stream)]
    return [{key: row[key] for key in row if key not in MEASURED} for row in rows]


@pytest.mark.slow
def test_four_processes_train_what_one_would(tmp_path: Path, start: Callable[..., Command]) -> None:
    """One of them decides how many epochs fit into the minutes; the others follow it."""
    recipe = tmp_path / "recipe.json"
    write_json(recipe, replace_path(resolve("digits_vit"), {"schedule.epochs": 2}).to_dict())
    out = tmp_path / "out"
    words = ["compare", *TINY, "--seeds", "2", "--limit", "100", "--recipe", str(recipe)]
    asked = [*words, "--minutes", "1", "--out", str(out)]
    before = partial(_noted, tmp_path)
    four = [start(*asked, "--run", str(number), before=before) for number in range(4)]
    assert [each.ended() for each in four] == [0] * 4, [each.err for each in four]
    assert len([*tmp_path.glob("timed*")]) == 1
    runs = (tmp_path / "trained").read_text().splitlines()
    assert sorted(runs) == [f"{m} seed{s}" for m in ("softmax", "static_key") for s in (0, 1)]
    assert not [*out.rglob(f"{LOCK}*")]
    schedule = folder.read(out).plan.recipe.schedule
    assert 2 < schedule.epochs < 20
    same = ["--epochs", str(schedule.epochs)]
    same += ["--schedule.warmup_epochs", str(schedule.warmup_epochs)]
    alone = tmp_path / "alone"
    with cheap_costs():
        assert main(asked) == 0
        assert main([*words, *same, "--out", str(alone)]) == 0
    assert table(out) == table(alone)
    assert len(table(out)) > 8


def _asleep(place: Path) -> None:
    """Let one of the processes sleep in its first run of softmax, and say which."""
    _kept.append(cheap_costs())
    _kept[0].__enter__()

    def sleeping(recipe: Recipe, out: Path, **more: Any) -> Any:
        def sleep(line: object) -> None:
            if out.parent.name == "softmax" and not (place / "asleep").exists():
                (place / "asleep").write_text(str(os.getpid()))
                time.sleep(PATIENCE)

        return train(recipe, out, **more | {"progress": sleep})

    patch = pytest.MonkeyPatch()
    patch.setattr("keymix.compare.budget.timed", lambda *_, **__: Trial(step=1, image=1))
    patch.setattr(worker, "train", sleeping)


@pytest.mark.slow
def test_two_comparisons_in_one_folder_share_the_runs_and_one_may_be_killed(
    finished: Path, tmp_path: Path, start: Callable[..., Command]
) -> None:
    words = ["compare", *TINY, "--seeds", "2", "--limit", "100", "--epochs", "2"]
    words.remove("--no-controls")
    out, before = tmp_path / "out", partial(_asleep, tmp_path)
    two = [start(*words, "--out", str(out), before=before) for _ in range(2)]
    wait_for(lambda: "waiting for runs" in two[0].err + two[1].err)
    assert len([*out.glob(f"runs/*/*/{SUMMARY}")]) == 5
    asleep = int((tmp_path / "asleep").read_text())
    (other,) = (each for each in two if each.pid != asleep)
    assert "waiting for runs that other processes train: softmax, seed" in other.err
    (killed,) = (each for each in two if each is not other)
    killed.kill()
    assert other.ended() == 0, other.err
    assert (out / "report.html").exists()
    assert table(out) == table(finished)
