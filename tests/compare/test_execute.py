# SPDX-License-Identifier: Apache-2.0
"""From runs and what any executor makes of them to events: starts, epochs, ends and failures."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from keymix.compare.eta import Trial

from keymix.compare import execute
from keymix.compare.events import Event
from keymix.compare.execute import NewEpochs, Pending, Schedule, Wait
from keymix.compare.executor import WorkerEnded
from keymix.compare.plan import Job
from keymix.errors import Interrupted, WriteError
from keymix.task import get_task
from keymix.train.files import METRICS
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, ScheduleConfig
from keymix.train.recipe import replace_path as replaced

RECIPE = Recipe(
    name="toy",
    data=DataConfig(spec="digits"),
    model=ModelConfig(name="vit_nano_p2_12"),
    schedule=ScheduleConfig(epochs=3),
)
TRIAL = Trial(step=0.1, image=0.2, epoch=0.3)


def job(out: Path, seed: int, trial: float = 0.0) -> Job:
    recipe = replaced(RECIPE, {"seed": seed})
    return Job(mixer="toy", seed=seed, recipe=recipe, folder=out / str(seed), trial=trial)


def write(path: Path, *epochs: int, time: float = 1.0, rest: str = "") -> None:
    """Replace metrics, as a run does at the end of an epoch."""
    lines = [
        {"epoch": e, "train_loss": 0.5, "val_loss": 0.5, "val_top1": e / 10, "seconds": time}
        for e in epochs
    ]
    part = path.with_suffix(".part")
    path.parent.mkdir(exist_ok=True)
    part.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    part.replace(path)


def summary(events: list[Event]) -> list[tuple[Any, ...]]:
    return [
        (e.kind, e.seed, *((e.epoch, e.epochs, e.value, e.text) if e.kind == "epoch" else ()))
        for e in events
    ]


def epoch(seed: int, number: int) -> tuple[Any, ...]:
    return ("epoch", seed, number, 3, (number - 1) / 10, "accuracy")


def read(epochs: NewEpochs) -> list[int]:
    return [line.epoch for line in epochs.read()]


class ByHand(Executor):
    """Does nothing by itself: a test ends its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append((Future(), args))
        return self.calls[-1][0]


def test_events_of_runs_come_in_order_whatever_the_executor(tmp_path: Path) -> None:
    events: list[Event] = []
    executor = ByHand()
    first, second, third = (job(tmp_path, seed) for seed in (0, 1, 2))

    def finish(number: int, error: Exception | None = None) -> None:
        future = executor.calls[number][0]
        future.set_result(None) if error is None else future.set_exception(error)

    steps: list[Callable[[], None]] = [
        lambda: write(first.folder / METRICS, 0),
        lambda: write(second.folder / METRICS, 0),
        lambda: (write(first.folder / METRICS, 0, 1, 2), finish(0))[-1],
        lambda: finish(1, RuntimeError("a bug")),
        lambda: (write(third.folder / METRICS, 0, 1, 2), finish(2))[-1],
    ]

    def moment(pending: Pending) -> Pending:
        steps.pop(0)()
        return [future for future in pending if future.done()]

    schedule = Schedule([first, second, third], events.append, slots=2, wait=moment)
    failures = schedule.run(executor)
    assert failures == {("toy", 1): "RuntimeError: a bug"}
    assert summary(events) == [
        ("start", 0), ("start", 1), epoch(0, 1), epoch(1, 1), epoch(0, 2), epoch(0, 3), ("done", 0),
        ("start", 2), ("failed", 1), epoch(2, 1), epoch(2, 2), epoch(2, 3), ("done", 2),
    ]  # fmt: skip
    assert [args for _, args in executor.calls] == [
        (each.recipe, str(each.folder)) for each in (first, second, third)
    ]


def test_epochs_are_reported_by_the_score_that_decides(tmp_path: Path) -> None:
    events: list[Event] = []
    balanced = get_task("classification").compared_by("balanced").score
    planned = replace(job(tmp_path, 0), score=balanced)
    path = planned.folder / METRICS
    path.parent.mkdir(parents=True)

    def train(recipe: Recipe, folder: str) -> None:
        values = {"epoch": 0, "train_loss": 0.5, "val_loss": 0.5, "val_top1": 0.72}
        path.write_text(json.dumps({**values, "val_balanced": 0.5}) + "\n")

    Schedule([planned], events.append).run(ThreadPoolExecutor(1), train=train)
    said = next(event for event in events if event.kind == "epoch")
    assert (said.text, said.value) == ("balanced accuracy", 0.5)


def test_threads_give_the_events_that_processes_do(tmp_path: Path) -> None:
    events: list[Event] = []

    def train(recipe: Recipe, folder: str) -> None:
        for last in range(3):
            write(Path(folder) / METRICS, *range(last + 1))

    def try_out(recipe: Recipe, runs: float) -> Trial:
        return TRIAL

    jobs = [job(tmp_path, 0, trial=2.0), *(job(tmp_path, seed) for seed in (0, 1, 2))]
    tried: list[Mapping[str, Trial | None]] = []
    schedule = Schedule(jobs, events.append, slots=2, estimate=tried.append)
    with ThreadPoolExecutor(2) as executor:
        assert schedule.run(executor, train=train, try_out=try_out) == {}
    for seed in (0, 1, 2):
        mine = [each for each in summary(events) if each[1] == seed]
        assert mine == [("start", seed), *(epoch(seed, e) for e in (1, 2, 3)), ("done", seed)]
    assert tried == [{"toy": TRIAL}]


def test_a_process_that_ends_is_a_failed_run(tmp_path: Path) -> None:
    events: list[Event] = []
    executor = ByHand()

    def moment(pending: Pending) -> Pending:
        for future in pending:
            future.set_exception(WorkerEnded("the process ended by signal 9", -9))
        return pending

    schedule = Schedule([job(tmp_path, 0)], events.append, wait=moment)
    assert schedule.run(executor) == {("toy", 0): "the process ended by signal 9"}
    assert [event.kind for event in events] == ["start", "failed"]


def test_a_trial_that_fails_is_no_failed_run(tmp_path: Path) -> None:
    events: list[Event] = []
    executor = ByHand()
    tried: list[Mapping[str, Trial | None]] = []
    schedule = Schedule(
        [job(tmp_path, 0, trial=1.0)],
        events.append,
        wait=lambda pending: pending,
        estimate=tried.append,
    )

    def submit(*call: Any) -> Future[Any]:
        future = ByHand.submit(executor, *call)
        future.set_exception(RuntimeError("it died"))
        return future

    executor.submit = submit  # type: ignore[assignment]
    assert schedule.run(executor) == {}
    assert not events
    assert tried == [{"toy": None}]


def test_a_full_disk_ends_the_schedule(tmp_path: Path) -> None:
    def train(recipe: Recipe, folder: str) -> None:
        raise WriteError("no space")

    schedule = Schedule([job(tmp_path, seed) for seed in (0, 1)], lambda event: None)
    with ThreadPoolExecutor(1) as executor, pytest.raises(WriteError, match="no space"):
        schedule.run(executor, train=train)


class AtRest(ByHand):
    """Stands in for worker processes; nothing runs."""

    def __init__(self, slots: int, **options: Any) -> None:
        super().__init__()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future, _ in self.calls:
            future.cancel()

    def kill_workers(self) -> None:
        assert all(future.done() for future, _ in self.calls), "killed before it was asked to save"


def side_by_side(out: Path, monkeypatch: pytest.MonkeyPatch, moment: Wait) -> None:
    """Train two runs in processes at rest, with a wait of one's own."""
    monkeypatch.setattr(execute, "WorkerExecutor", AtRest)
    monkeypatch.setattr(execute, "wait_a_moment", moment)
    jobs = [job(out, seed) for seed in (0, 1)]
    execute.run_side_by_side(
        jobs, processes=2, threads=1, imports=(), logs=out / "logs", watch=lambda event: None
    )


def test_a_signal_ends_no_wait_for_futures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Raised within, it could leave a future's lock taken for good: it is looked at afterwards.
    waited = []

    def moment(pending: Pending) -> Pending:
        signal.raise_signal(signal.SIGINT)
        waited.append(True)
        return []

    with pytest.raises(Interrupted, match="2 of 2 runs"):
        side_by_side(tmp_path, monkeypatch, moment)
    assert waited == [True]


def test_a_full_disk_in_one_process_lets_the_others_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moment(pending: Pending) -> Pending:
        first = next(iter(pending))
        first.set_exception(WriteError("no space"))
        return [first]

    with pytest.raises(WriteError, match="no space"):
        side_by_side(tmp_path, monkeypatch, moment)


def test_epochs_that_were_there_are_not_new(tmp_path: Path) -> None:
    write(tmp_path / METRICS, 0, 1)
    epochs = NewEpochs(tmp_path / METRICS)
    assert read(epochs) == []
    write(tmp_path / METRICS, 0, 1)  # as a run that resumes begins
    assert read(epochs) == []
    write(tmp_path / METRICS, 0, 1, 2)
    assert read(epochs) == [2]
    assert read(epochs) == []


def test_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    epochs = NewEpochs(tmp_path / METRICS)
    assert read(epochs) == []
    write(tmp_path / METRICS, 0, rest='{"epoch": 1, "train_l')
    assert read(epochs) == [0]
    write(tmp_path / METRICS, 0, 1)
    assert read(epochs) == [1]
    write(tmp_path / METRICS, 0, 1, rest="damage\n")
    assert read(epochs) == []


@pytest.mark.parametrize("seen", [True, False])
def test_epochs_that_a_run_drops_and_trains_again_are_new(tmp_path: Path, seen: bool) -> None:
    write(tmp_path / METRICS, 0, 1, 2)
    epochs = NewEpochs(tmp_path / METRICS)
    write(tmp_path / METRICS, 0)
    if seen:
        assert read(epochs) == []
    write(tmp_path / METRICS, 0)
    with (tmp_path / METRICS).open("a") as stream:
        line = {"epoch": 1, "train_loss": 0.5, "val_loss": 0.5, "val_top1": 0.1, "seconds": 2.0}
        stream.write(json.dumps(line) + "\n")
    assert read(epochs) == [1]
    assert read(epochs) == []


def test_a_run_that_starts_from_the_beginning_reports_all_its_epochs(tmp_path: Path) -> None:
    write(tmp_path / METRICS, 0, 1)
    epochs = NewEpochs(tmp_path / METRICS)
    write(tmp_path / METRICS)
    assert read(epochs) == []
    write(tmp_path / METRICS, 0, 1)
    assert read(epochs) == [0, 1]


def test_a_file_that_is_away_for_a_moment_repeats_nothing(tmp_path: Path) -> None:
    write(tmp_path / METRICS, 0)
    epochs = NewEpochs(tmp_path / METRICS)
    (tmp_path / METRICS).unlink()
    assert read(epochs) == []
    write(tmp_path / METRICS, 0)
    assert read(epochs) == []
