# SPDX-License-Identifier: Apache-2.0
"""Calls in worker processes: their results and errors, and workers that die or are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_calls
from toy_calls import Pair

from commands import wait_for
from keymix.compare.executor import CallError, SynchronousExecutor, WorkerEnded, WorkerExecutor
from keymix.errors import Interrupted, UserError, WriteError

Make = Callable[..., WorkerExecutor]
PARENT = """
import sys
from pathlib import Path

import toy_calls
from keymix.compare.executor import WorkerExecutor

out = Path(sys.argv[1])
executor = WorkerExecutor(2, logs=out, warn=print)
for name in "ab":
    executor.submit(toy_calls.wait_in, str(out), name, "ignore")
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[WorkerExecutor] = []

    def make(workers: int = 1, **more: Any) -> WorkerExecutor:
        made.append(WorkerExecutor(workers, **{"logs": tmp_path / "logs", "warn": print, **more}))
        return made[-1]

    yield make
    for executor in made:
        executor.kill_workers()


def started(folder: Path, *names: str) -> list[int]:
    """The processes that wait, once they do."""
    paths = [folder / name for name in names]
    wait_for(lambda: all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def test_records_travel_as_json_and_come_back(make: Make) -> None:
    future = make().submit(toy_calls.turned, pair=Pair(left=3, right=("a", "b")))
    assert future.result() == Pair(left=-3, right=("b", "a"))


def test_a_worker_stays_for_further_calls_and_is_set_up_once(make: Make) -> None:
    with make(initializer=toy_calls.set_up, initargs=("ready",)) as executor:
        futures = [executor.submit(toy_calls.seen) for _ in range(3)]
    seen = {future.result() for future in futures}
    assert len(seen) == 1
    assert [each[:-1] for each in seen] == [("ready",)]


def test_workers_import_nothing_that_their_calls_do_not_need(make: Make) -> None:
    assert make().submit(toy_calls.libraries).result() == ()


def test_workers_have_an_environment_of_their_own(make: Make) -> None:
    executor = make(environment={"OMP_NUM_THREADS": "7"})
    assert executor.submit(toy_calls.environment, "OMP_NUM_THREADS").result() == "7"


@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_threads_of_workers_wait_without_spinning_unless_the_user_says_how(
    make: Make, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    found = make().submit(toy_calls.environment, "OMP_WAIT_POLICY").result()
    assert found == (own or "PASSIVE")


@pytest.mark.parametrize(
    ("kind", "expected", "logged"),
    [("user", UserError, True), ("write", WriteError, False), ("lookup", CallError, True)],
)
def test_errors_of_a_call_are_raised_and_the_worker_stays(
    make: Make, tmp_path: Path, kind: str, expected: type[Exception], logged: bool
) -> None:
    executor = make()
    before = executor.submit(toy_calls.seen).result()
    error = executor.submit(toy_calls.fail, kind).exception()
    assert type(error) is expected
    assert "wrong" in str(error)
    assert executor.submit(toy_calls.seen).result() == before
    executor.shutdown()
    assert (tmp_path / "logs" / "worker0.log").exists() == logged


@pytest.mark.parametrize(
    ("call", "code", "word"),
    [
        ((toy_calls.die, signal.SIGKILL), -signal.SIGKILL, "memory"),
        ((toy_calls.half_a_reply,), -signal.SIGKILL, "signal 9"),
        ((toy_calls.end, 7), 7, "last words"),
    ],
)
def test_a_worker_that_ends_fails_its_call_alone(
    make: Make, call: tuple[Any, ...], code: int, word: str
) -> None:
    executor = make(2, name="toy")
    futures = [executor.submit(*call), *(executor.submit(toy_calls.seen) for _ in range(4))]
    error = futures[0].exception()
    assert isinstance(error, WorkerEnded)
    assert error.exit_code == code
    assert word in str(error)
    assert "toy" in str(error)
    assert all(future.result() for future in futures[1:])


def test_a_worker_that_was_interrupted_says_what_it_did(make: Make, tmp_path: Path) -> None:
    future = make().submit(toy_calls.wait_in, str(tmp_path), "a", "save")
    os.kill(started(tmp_path, "a")[0], signal.SIGTERM)
    error = future.exception()
    assert isinstance(error, WorkerEnded)
    assert error.stopped
    assert str(error) == "saved"


def test_a_worker_that_cannot_be_set_up_fails_its_calls(make: Make) -> None:
    executor = make(initializer=toy_calls.fail_to_set_up)
    errors = [executor.submit(toy_calls.seen).exception() for _ in range(2)]
    assert [type(error) for error in errors] == [UserError, UserError]


def test_a_log_that_cannot_be_made_is_a_write_error(make: Make, tmp_path: Path) -> None:
    (tmp_path / "logs" / "worker0.log").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"worker0\.log"):
        make().submit(toy_calls.seen).result()


def test_warnings_reach_the_caller_and_other_text_the_log(make: Make, tmp_path: Path) -> None:
    said: list[str] = []
    with make(warn=said.append) as executor:
        assert executor.submit(toy_calls.warn, "look").result() == 1
        assert executor.submit(toy_calls.say, "a library prints").result() == 1
    assert said == ["look"]
    log = (tmp_path / "logs" / "worker0.log").read_text()
    assert "for the log" in log
    assert "a library prints" in log
    assert "look" not in log


def test_an_empty_log_is_removed(make: Make, tmp_path: Path) -> None:
    with make() as executor:
        executor.submit(toy_calls.seen).result()
    assert not list((tmp_path / "logs").iterdir())


def test_what_a_worker_cannot_import_is_refused(make: Make) -> None:
    def local(x: int) -> int:
        return x

    executor = make()
    with pytest.raises(TypeError, match="local"):
        executor.submit(local, 1)
    with pytest.raises(TypeError, match="annotations"):
        executor.submit(os.path.join, "a")


def test_shutdown_waits_for_calls_and_takes_no_more(make: Make) -> None:
    executor = make()
    futures = [executor.submit(toy_calls.seen) for _ in range(3)]
    executor.shutdown()
    processes = {future.result()[-1] for future in futures}
    assert all(gone(int(process)) for process in processes)
    with pytest.raises(RuntimeError):
        executor.submit(toy_calls.seen)


def test_shutdown_cancels_what_waits_and_lets_the_rest_save(make: Make, tmp_path: Path) -> None:
    executor = make(2, grace=1000.0)
    busy = [executor.submit(toy_calls.wait_in, str(tmp_path), name, "save") for name in "ab"]
    waiting = executor.submit(toy_calls.seen)
    processes = started(tmp_path, "a", "b")
    executor.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    assert [type(future.exception()) for future in busy] == [WorkerEnded, WorkerEnded]
    assert [str(future.exception()) for future in busy] == ["saved", "saved"]
    assert all(map(gone, processes))


def test_workers_that_do_not_stop_in_time_are_killed(make: Make, tmp_path: Path) -> None:
    executor = make(grace=0.0)
    future = executor.submit(toy_calls.wait_in, str(tmp_path), "a", "ignore")
    (process,) = started(tmp_path, "a")
    executor.shutdown(cancel_futures=True)
    error = future.exception()
    assert isinstance(error, WorkerEnded)
    assert error.exit_code == -signal.SIGKILL
    assert not error.stopped
    assert gone(process)


def test_killed_workers_stay_dead(make: Make, tmp_path: Path) -> None:
    executor = make(2)
    futures = [executor.submit(toy_calls.wait_in, str(tmp_path), name, "ignore") for name in "abc"]
    processes = started(tmp_path, "a", "b")
    executor.kill_workers()
    assert all(map(gone, processes))
    assert futures.pop().cancelled()
    assert [type(future.exception()) for future in futures] == [WorkerEnded, WorkerEnded]
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    places = os.pathsep.join([str(Path(toy_calls.__file__).parent), os.environ["PYTHONPATH"]])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], env=os.environ | {"PYTHONPATH": places}
    )
    processes = started(tmp_path, "a", "b")
    parent.kill()
    parent.wait()
    wait_for(lambda: all(map(gone, processes)))


def test_a_synchronous_executor_makes_calls_at_once_in_this_process(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    with SynchronousExecutor(log) as executor:
        assert executor.submit(toy_calls.seen).result()[-1] == str(os.getpid())
        assert not log.exists()
        error = executor.submit(toy_calls.fail, "lookup").exception()
        assert isinstance(error, KeyError)
        assert "KeyError: 'wrong'" in log.read_text()


def test_ctrl_c_passes_a_synchronous_executor(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise Interrupted(signal.SIGINT, "stopped")

    with pytest.raises(Interrupted):
        SynchronousExecutor(tmp_path / "log").submit(interrupted)


def test_a_call_that_reads_standard_input_gets_nothing(make: Make) -> None:
    executor = make()
    with pytest.raises(CallError, match="EOFError"):
        executor.submit(toy_calls.ask).result()
    assert executor.submit(toy_calls.say, "on").result() == 1


def test_a_dead_worker_is_seen_while_a_process_that_it_forked_lives(
    make: Make, tmp_path: Path
) -> None:
    child, end = tmp_path / "child", tmp_path / "end"
    future = make().submit(toy_calls.die_and_leave_a_child, str(child), str(end))
    try:
        with pytest.raises(WorkerEnded):
            future.result(timeout=60)
        assert not gone(int(child.read_text()))
    finally:
        end.touch()


def test_the_exit_message_has_no_line_of_an_earlier_worker(make: Make) -> None:
    executor = make()
    with pytest.raises(WorkerEnded, match="last words"):
        executor.submit(toy_calls.end, 3).result()
    with pytest.raises(WorkerEnded) as ended:
        executor.submit(toy_calls.leave, 4).result()
    assert "last words" not in str(ended.value)
