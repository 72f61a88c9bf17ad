# SPDX-License-Identifier: Apache-2.0
"""The lock of a folder: whom it names, when it is renewed, and who may take it over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from keymix.errors import KeymixWarning, WriteError
from keymix.train import files
from keymix.train.files import InUse, Lock, locked, write_text

OTHER = "filelock/2\npid={pid}\nhost={host}\nmode=lease\ntoken=abc\nduration=0.6\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LEASE", 0.6)
    monkeypatch.setattr(files, "LOOK", 0.05)


@pytest.fixture(params=["exchange", "no exchange"])
def _disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that can exchange two names at once, or not, as NFS."""
    if request.param == "no exchange":
        used = "filelock._soft._exclusive._recovery.exchange_names"
        monkeypatch.setattr(used, lambda *names: False)


def held_by(folder: Path, *, host: str, pid: int) -> Path:
    folder.mkdir()
    path = folder / files.LOCK
    path.write_text(OTHER.format(host=host, pid=pid))
    return path


def dead() -> int:
    """The number of a process that has ended."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.usefixtures("_disk")
def test_a_dead_process_of_this_machine_gives_its_folder_at_once(tmp_path: Path) -> None:
    mine = Lock(tmp_path)
    assert mine.tried()
    assert mine.owner is not None
    host = mine.owner.hostname  # of this machine, as locks name it
    mine.release()
    path = held_by(tmp_path / "run", host=host, pid=dead())
    before = time.monotonic()
    with locked(tmp_path / "run", "run"):
        assert f"pid={os.getpid()}\n" in path.read_text()
    assert time.monotonic() - before < 0.5
    assert not path.exists()


@pytest.mark.usefixtures("_disk")
def test_a_lock_of_another_machine_that_is_not_renewed_is_taken_over(tmp_path: Path) -> None:
    path = held_by(tmp_path / "run", host="elsewhere", pid=1)
    before = time.monotonic()
    lock = locked(tmp_path / "run", "run")
    with pytest.warns(KeymixWarning, match=r"process 1 on elsewhere's: free if .* 0\.6 s"):
        lock.__enter__()
    assert time.monotonic() - before > 0.5
    assert f"pid={os.getpid()}\n" in path.read_text()
    lock.__exit__(None, None, None)
    assert [*(tmp_path / "run").iterdir()] == []


@pytest.fixture
def renewed() -> Iterator[Callable[[Path], None]]:
    """Renew a lock's file until the test ends."""
    ended, threads = Event(), list[Thread]()

    def start(path: Path) -> None:
        def renew() -> None:
            while not ended.wait(0.1):
                path.touch()

        threads.append(Thread(target=renew))
        threads[0].start()

    yield start
    ended.set()
    threads[0].join()


@pytest.mark.filterwarnings("ignore::keymix.errors.KeymixWarning")
def test_a_renewed_lock_of_another_machine_is_refused_by_its_process(
    tmp_path: Path, renewed: Callable[[Path], None]
) -> None:
    path = held_by(tmp_path / "run", host="elsewhere", pid=12)
    renewed(path)
    refused = pytest.raises(InUse, match=r"process 12 on elsewhere.*remove .*run/\.lock")
    with refused, locked(tmp_path / "run", "run"):
        pass
    lock, until = Lock(tmp_path / "run"), time.monotonic() + 1
    while time.monotonic() < until:
        assert not lock.free()
        time.sleep(0.05)


def test_it_is_renewed_while_it_is_held(tmp_path: Path) -> None:
    with locked(tmp_path, "run"):
        first = (tmp_path / files.LOCK).stat().st_mtime_ns
        time.sleep(0.5)
        assert (tmp_path / files.LOCK).stat().st_mtime_ns > first


def test_who_lost_its_lock_writes_nothing_more(tmp_path: Path) -> None:
    """Such as a machine that slept for longer than the lock is good for."""
    path = tmp_path / "run" / files.LOCK
    with locked(tmp_path / "run", "run"):
        write_text(tmp_path / "run" / "a", "mine")
        path.unlink()
        path.write_text(OTHER.format(host="elsewhere", pid=12))
        with pytest.raises(InUse, match="process 12 on elsewhere has taken"):
            write_text(tmp_path / "run" / "checkpoints" / "b", "mine")
        write_text(tmp_path / "c", "not there")
    assert path.exists()
    assert [each.name for each in (tmp_path / "run").glob("[!.]*")] == ["a"]


def test_a_folder_that_vanishes_ends_in_one_line(tmp_path: Path) -> None:
    with locked(tmp_path / "run", "run"):
        (tmp_path / "run").rename(tmp_path / "gone")
        with pytest.raises(WriteError, match="cannot write"):
            write_text(tmp_path / "run" / "a", "mine")
