# SPDX-License-Identifier: Apache-2.0
"""Plant the faults of ``tests/faults.md`` in a copy of ``src``, one by one: which tests fail?

    python tests/plant_faults.py                 plant every fault, print a table
    python tests/plant_faults.py --only 3,7-9    plant these
    python tests/plant_faults.py --write         also write into the list what failed
    python tests/plant_faults.py --check-green   run the tests of all faults on src as it is
    python tests/plant_faults.py --places        find the places, run nothing

The tests come from the checkout, the package from the copy. The exit status is 1 if a fault was not
caught, its place was not found, or its tests did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = HERE / "faults.md"

ENOUGH = 3
"""Failing tests after which the rest need not run."""
NAMED = 2
"""Failing tests that the list names."""
READ = (".py", ".j2", ".js", ".css")
"""Files of ``src`` that a fault can be planted in."""

_HEADING = re.compile(r"^#{1,3} .*$", re.M)
_TITLE = re.compile(r"^### (\d+)\. (.+)$", re.M)
_PLACE = re.compile(r"^In `([^`]+)`:$", re.M)
_DIFF = re.compile(r"^```diff\n(.*?)^```$", re.M | re.S)
_TESTS = re.compile(r"^Run: (.+)$", re.M)
_FAILS = re.compile(r"^Fails: .*\n", re.M)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::[^\s\[]+)", re.M)

LOADED = (
    "numpy",
    "scipy.stats",
    "torch",
    "torchvision.transforms.v2",
    "timm",
    "lightning_fabric",
    "sklearn.model_selection",
    "matplotlib.pyplot",
    "pyarrow",
    "jinja2",
)
"""Libraries that are imported once: nine tenths of what a quick file of tests takes."""

_WRONG_PACKAGE = 99
_SERVER = f"""
import importlib, json, os, sys

sys.modules.setdefault("torchaudio", None)  # as tests/conftest.py has it
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for line in sys.stdin:
    src, root, log, *words = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.setsid()  # so that what the tests start can be ended with them
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(root)
    sys.path.insert(0, src)
    paths = [src, os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    status = {_WRONG_PACKAGE}
    try:
        import keymix
        import pytest

        if os.path.commonpath((os.path.abspath(keymix.__file__), src)) == src:
            status = int(pytest.main(words))
        else:
            print(f"keymix was imported from {{keymix.__file__}}")
    finally:
        sys.stdout.flush()
        os._exit(status)
"""


class BadList(Exception):
    """The list of faults cannot be read."""


class Lost(Exception):
    """The text that a fault replaces was not found exactly once."""


@dataclass(frozen=True)
class Fault:
    """One fault of the list.

    Args:
        number: Its number.
        name: What is wrong, in plain words.
        path: The file, from the root of the checkout.
        before: The lines to replace; the whole may stand at another indentation.
        after: The lines to put in their place.
        tests: Files of tests to run, or single tests.
    """

    number: int
    name: str
    path: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the lines to replace, at any indentation."""
        first, *others = (re.escape(line) for line in self.before)
        rest = "".join(f"\n(?P=indent){line}" if line else "\n" for line in others)
        return re.compile(f"^(?P<indent>[ \t]*){first}{rest}$", re.M)

    def planted(self, text: str) -> str:
        """Return a file's text with the fault.

        Raises:
            Lost: If the lines to replace are not there exactly once.
        """
        found = list(self.pattern.finditer(text))
        if len(found) != 1:
            raise Lost(f"its lines are in {self.path} {len(found)} times, not once")
        (match,) = found
        indent = match["indent"]
        lines = [indent + line if line else "" for line in self.after]
        return text[: match.start()] + "\n".join(lines) + text[match.end() :]


@dataclass(frozen=True)
class Result:
    """What became of a planted fault.

    Args:
        fault: The fault, with the file that it was found in.
        state: ``caught``, ``NOT CAUGHT``, ``LOST`` or ``NOT RUN``.
        failed: The tests that failed.
        seconds: Time the tests took.
        note: Why it is not caught.
    """

    fault: Fault
    state: str
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    note: str = ""

    @property
    def fails(self) -> str:
        """The line of the list."""
        if self.state != "caught":
            return f"Fails: nothing ({self.state.lower()})."
        some = [f"`{name.rpartition('::')[2]}`" for name in self.failed[:NAMED]]
        more = len(self.failed) - len(some)
        many = " or more" if len(self.failed) >= ENOUGH else ""
        return f"Fails: {', '.join(some)}" + (f" and {more}{many} others." if more else ".")


@dataclass(frozen=True)
class Ran:
    """How a run of tests ended: pytest's exit status, None after too long a time."""

    status: int | None
    failed: tuple[str, ...]
    seconds: float
    output: str


def read(text: str) -> list[Fault]:
    """Read the list of faults.

    Raises:
        BadList: If a fault lacks a part, or a number stands twice.
    """
    starts = [match.start() for match in _HEADING.finditer(text)]
    faults = []
    for title in _TITLE.finditer(text):
        end = next((start for start in starts if start > title.start()), len(text))
        faults.append(_fault(int(title[1]), title[2].strip(), text[title.end() : end]))
    numbers = [fault.number for fault in faults]
    if len(set(numbers)) != len(numbers):
        raise BadList(f"a number stands twice: {numbers}")
    return faults


def _fault(number: int, name: str, section: str) -> Fault:
    place, diff, tests = (p.search(section) for p in (_PLACE, _DIFF, _TESTS))
    if place is None or diff is None or tests is None:
        raise BadList(f"fault {number} lacks its file, its diff or its tests")
    lines = diff[1].splitlines()
    if any(line[:1] not in ("", " ", "+", "-") for line in lines):
        raise BadList(f"fault {number}: each line of a diff begins with +, - or a space")
    sides = [[line[1:] for line in lines if line[:1] != sign] for sign in "+-"]
    whole = textwrap.dedent("\n".join(side for both in sides for side in both)).split("\n")
    before, after = whole[: len(sides[0])], whole[len(sides[0]) :]
    if not any(before) or before == after:
        raise BadList(f"fault {number} replaces nothing")
    return Fault(
        number=number,
        name=name,
        path=place[1],
        before=tuple(before),
        after=tuple(after),
        tests=tuple(re.findall(r"`([^`]+)`", tests[1])),
    )


def locate(fault: Fault, root: Path) -> Fault:
    """Return a fault with the file that its lines are in now.

    They may have moved to another file of ``src``, if they are there once and nowhere else.

    Raises:
        Lost: If they are nowhere, or at several places.
    """
    own = root / fault.path
    count = len(fault.pattern.findall(own.read_text(encoding="utf-8"))) if own.is_file() else 0
    if count == 1:
        return fault
    if count > 1:
        raise Lost(f"its lines are in {fault.path} {count} times, not once")
    others = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "src").rglob("*"))
        if path.suffix in READ and fault.pattern.search(path.read_text(encoding="utf-8"))
    ]
    if len(others) != 1:
        where = f"in {len(others)} files: {', '.join(others)}" if others else "nowhere in src"
        raise Lost(f"its lines are not in {fault.path}; they are {where}")
    moved = replace(fault, path=others[0])
    moved.planted((root / moved.path).read_text(encoding="utf-8"))
    return moved


def plant(fault: Fault, runner: Runner, *, limit: float) -> Result:
    """Plant a fault in a copy of ``src`` and run its tests.

    Args:
        fault: The fault.
        runner: Runs the tests of a checkout.
        limit: Seconds that the tests may take.
    """
    root = runner.root
    try:
        fault = locate(fault, root)
    except Lost as lost:
        return Result(fault, "LOST", note=str(lost))
    with tempfile.TemporaryDirectory(prefix="keymix-fault-") as folder:
        copy = _copied(root, Path(folder))
        file = copy.parent / fault.path
        file.write_text(fault.planted(file.read_text(encoding="utf-8")), encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()  # an edit within the same second may keep time and size
        ran = runner.run(copy, fault.tests, limit=limit, enough=ENOUGH)
    if ran.status == 0:
        return Result(fault, "NOT CAUGHT", seconds=ran.seconds, note="all its tests pass")
    if ran.status == 1 and ran.failed:
        return Result(fault, "caught", ran.failed, ran.seconds)
    why = f"longer than {limit:.0f} s" if ran.status is None else f"pytest ended with {ran.status}"
    last = (ran.output.strip().splitlines() or [""])[-1]
    return Result(fault, "NOT RUN", seconds=ran.seconds, note=f"{why}: {last}")


def _copied(root: Path, folder: Path) -> Path:
    """Copy ``src`` with what Python compiled of it; times of files stay."""
    return shutil.copytree(root / "src", folder / "src")


class Runner:
    """Runs tests in processes that have the libraries loaded already, one after another.

    Args:
        root: The checkout that the tests come from.
        loaded: Libraries to import once.
    """

    def __init__(self, root: Path, loaded: Sequence[str] = LOADED) -> None:
        self.root, self._loaded = root, loaded
        self._server: subprocess.Popen[str] | None = None

    def run(self, src: Path, tests: Sequence[str], *, limit: float, enough: int = 0) -> Ran:
        """Run tests, of files the quick ones, on a copy that all their processes import.

        Args:
            src: The copy.
            tests: Files of tests, or single tests.
            limit: Seconds until they are ended.
            enough: Failing tests after which the rest is left out; 0 runs all.
        """
        log = src.parent / "log"
        words = ["-q", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts=", "-rfE"]
        one_by_one = all("::" in test for test in tests)  # then slow ones are meant, too
        words += ["-m", "not gpu" if one_by_one else "not slow and not gpu"]
        words += [f"--maxfail={enough}"]
        words += [f"--basetemp={src.parent / 'tmp'}", *tests]
        server = self._server = self._server or self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([str(src), str(self.root), str(log), *words]) + "\n")
        server.stdin.flush()
        child, late = int(server.stdout.readline()), threading.Event()  # libraries are loaded now
        start = time.monotonic()

        def end() -> None:
            late.set()
            os.killpg(child, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            status = int(server.stdout.readline())
        except BaseException:  # Ctrl-C
            os.killpg(child, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
        output = log.read_text(encoding="utf-8", errors="replace")
        failed = tuple(dict.fromkeys(_FAILED.findall(output)))
        seconds = time.monotonic() - start
        return Ran(None if late.is_set() else status, failed, seconds, output)

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _SERVER, *self._loaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def close(self) -> None:
        """End the process that holds the libraries."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait()


def written(text: str, result: Result) -> str:
    """Return the list with what failed, and with the file that the lines have moved to."""
    fault = result.fault
    title = next(match for match in _TITLE.finditer(text) if int(match[1]) == fault.number)
    starts = (match.start() for match in _HEADING.finditer(text) if match.start() > title.start())
    end = next(starts, len(text))
    section = text[title.end() : end]
    section = _PLACE.sub(lambda _: f"In `{fault.path}`:", section, count=1)
    if result.state != "found":
        section = _FAILS.sub("", section, count=1)
        section = _TESTS.sub(lambda match: f"{match[0]}\n{result.fails}", section, count=1)
    return text[: title.end()] + section + text[end:]


def check_green(faults: Sequence[Fault], runner: Runner, *, limit: float) -> Ran:
    """Run the tests of all faults on a copy without a fault, each once."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    with tempfile.TemporaryDirectory(prefix="keymix-fault-") as folder:
        return runner.run(_copied(runner.root, Path(folder)), tests, limit=limit * len(faults))


def _chosen(faults: Sequence[Fault], only: str | None) -> list[Fault]:
    if only is None:
        return list(faults)
    wanted: set[int] = set()
    for part in only.split(","):
        first, _, last = part.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    lacking = wanted - {fault.number for fault in faults}
    if lacking:
        raise BadList(f"the list has no fault {', '.join(map(str, sorted(lacking)))}")
    return [fault for fault in faults if fault.number in wanted]


def _show(result: Result) -> None:
    name = f"{result.fault.number:3}. {result.fault.name}"
    first = result.note or (result.failed[0] if result.failed else "")
    sys.stdout.write(f"{name:<64} {result.state:<10} {result.seconds:5.0f} s  {first}\n")
    sys.stdout.flush()


def _places(fault: Fault, root: Path) -> Result:
    try:
        return Result(locate(fault, root), "found")
    except Lost as lost:
        return Result(fault, "LOST", note=str(lost))


def _results(
    faults: Sequence[Fault], root: Path, given: argparse.Namespace, loaded: Sequence[str]
) -> Iterator[Result]:
    """Yield what becomes of each fault, in their order."""
    if given.places:
        yield from (_places(fault, root) for fault in faults)
        return
    free: queue.SimpleQueue[Runner] = queue.SimpleQueue()

    def planted(fault: Fault) -> Result:
        runner = free.get()
        try:
            return plant(fault, runner, limit=given.limit)
        finally:
            free.put(runner)

    with ExitStack() as stack:
        for _ in range(given.jobs):
            free.put(stack.enter_context(closing(Runner(root, loaded))))
        pool = stack.enter_context(ThreadPoolExecutor(given.jobs))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        yield from pool.map(planted, faults)


def main(argv: Sequence[str] | None = None, loaded: Sequence[str] = LOADED) -> int:
    """Run the command; return its exit status.

    Args:
        argv: Its words.
        loaded: Libraries to import once for all tests.
    """
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", help="numbers of faults: 3,7-9")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one fault's tests")
    parser.add_argument("--write", action="store_true", help="write the results into the list")
    parser.add_argument("--check-green", action="store_true", help="plant nothing, run the tests")
    parser.add_argument("--places", action="store_true", help="find the places, run nothing")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of faults")
    given = parser.parse_args(argv)
    root = given.root.resolve()
    try:
        faults = _chosen(read(given.list.read_text(encoding="utf-8")), given.only)
    except BadList as error:
        parser.error(str(error))
    if given.check_green:
        with closing(Runner(root, loaded)) as runner:
            ran = check_green(faults, runner, limit=given.limit)
        sys.stdout.write(ran.output)
        return 0 if ran.status == 0 else 1
    results = []
    for result in _results(faults, root, given, loaded):
        _show(result)
        results.append(result)
        if given.write:
            text = written(given.list.read_text(encoding="utf-8"), result)
            given.list.write_text(text, encoding="utf-8")
    good = "found" if given.places else "caught"
    count = sum(result.state == good for result in results)
    seconds = sum(result.seconds for result in results)
    sys.stdout.write(f"{count} of {len(results)} {good}, {seconds:.0f} s\n")
    return 0 if count == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
