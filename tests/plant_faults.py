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
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = HERE / "faults.md"

ENOUGH = 5
"""Failing tests after which the rest need not run."""
NAMED = 2
"""Failing tests that the list names."""
READ = (".py", ".j2", ".js", ".css")
"""Files of ``src`` that a fault can be planted in."""

_GROUP = re.compile(r"^##? .*$", re.M)
_TITLE = re.compile(r"^### (\d+)\. (.+)$", re.M)
_PLACE = re.compile(r"^In `([^`]+)`:$", re.M)
_DIFF = re.compile(r"^```diff\n(.*?)^```$", re.M | re.S)
_TESTS = re.compile(r"^Run: (.+)$", re.M)
_FAILS = re.compile(r"^Fails: .*$", re.M)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::[^\s\[]+)", re.M)

_WRONG_PACKAGE = 99
_PYTEST = f"""
import sys
from pathlib import Path

import pytest

import keymix

copy, *words = sys.argv[1:]
if not Path(keymix.__file__).is_relative_to(copy):
    sys.stderr.write(f"keymix was imported from {{keymix.__file__}}\\n")
    sys.exit({_WRONG_PACKAGE})
sys.exit(pytest.main(words))
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
        tests: Files or folders of tests to run.
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
    titles = list(_TITLE.finditer(text))
    ends = sorted(match.start() for match in (*titles, *_GROUP.finditer(text)))
    faults = []
    for title in titles:
        end = next((end for end in ends if end > title.start()), len(text))
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


def plant(fault: Fault, root: Path, *, limit: float) -> Result:
    """Plant a fault in a copy of ``src`` and run its tests.

    Args:
        fault: The fault.
        root: The checkout.
        limit: Seconds that the tests may take.
    """
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
        ran = run_tests(root, copy, fault.tests, limit=limit, enough=ENOUGH)
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


def run_tests(root: Path, src: Path, tests: Sequence[str], *, limit: float, enough: int = 0) -> Ran:
    """Run quick tests of a checkout on a copy of the package.

    Args:
        root: The checkout.
        src: The copy, which every process of the tests imports keymix from.
        tests: Files or folders.
        limit: Seconds until they are ended.
        enough: Failing tests after which the rest is left out; 0 runs all.
    """
    paths = [str(src), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ("-q", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts=", "-rfE")
    command = [sys.executable, "-c", _PYTEST, str(src), *options, "-m", "not slow and not gpu"]
    command += [f"--maxfail={enough}", f"--basetemp={src.parent / 'tmp'}", *tests]
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # so that what the tests start ends with them
    )
    try:
        output, status = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        output, status = "", None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    failed = tuple(dict.fromkeys(_FAILED.findall(output)))
    return Ran(status, failed, time.monotonic() - start, output)


def written(text: str, results: Iterable[Result]) -> str:
    """Return the list with what failed, and with the files that lines have moved to."""
    for result in results:
        fault = result.fault
        title = next(m for m in _TITLE.finditer(text) if int(m[1]) == fault.number)
        end = next((m.start() for m in _TITLE.finditer(text) if m.start() > title.start()), None)
        section, tail = text[title.end() : end], "" if end is None else text[end:]
        section = _PLACE.sub(lambda _, f=fault: f"In `{f.path}`:", section, count=1)
        if result.state != "found":
            line = result.fails
            if _FAILS.search(section):
                section = _FAILS.sub(lambda _, line=line: line, section, count=1)
            else:
                section = _TESTS.sub(lambda m, line=line: f"{m[0]}\n{line}", section, count=1)
        text = text[: title.end()] + section + tail
    return text


def check_green(faults: Sequence[Fault], root: Path, *, limit: float) -> Ran:
    """Run the tests of all faults on a copy without a fault, each once."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    with tempfile.TemporaryDirectory(prefix="keymix-fault-") as folder:
        return run_tests(root, _copied(root, Path(folder)), tests, limit=limit * len(faults))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
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
        ran = check_green(faults, root, limit=given.limit)
        sys.stdout.write(ran.output)
        return 0 if ran.status == 0 else 1
    work: Callable[[Fault], Result] = (
        (lambda fault: _places(fault, root))
        if given.places
        else (lambda fault: plant(fault, root, limit=given.limit))
    )
    results = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for result in pool.map(work, faults):
            _show(result)
            results.append(result)
    good = "found" if given.places else "caught"
    count = sum(result.state == good for result in results)
    seconds = sum(result.seconds for result in results)
    sys.stdout.write(f"{count} of {len(results)} {good}, {seconds:.0f} s\n")
    if given.write:
        text = written(given.list.read_text(encoding="utf-8"), results)
        given.list.write_text(text, encoding="utf-8")
    return 0 if count == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
