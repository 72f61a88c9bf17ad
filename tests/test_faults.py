# SPDX-License-Identifier: Apache-2.0
"""The list of planted faults is whole, and the script that plants them says what it found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from plant_faults import LIST, BadList, Fault, Lost, locate, main, read

ROOT = LIST.parent.parent
FAULTS = read(LIST.read_text(encoding="utf-8"))
LEAST = 40


def test_the_list_has_forty_faults_or_more() -> None:
    assert [fault.number for fault in FAULTS] == list(range(1, len(FAULTS) + 1))
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= LEAST


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_a_fault_has_its_place_and_its_tests(fault: Fault) -> None:
    """After code has moved, ``python tests/plant_faults.py --places --write`` writes its file."""
    assert locate(fault, ROOT).path == fault.path
    before = (ROOT / fault.path).read_text(encoding="utf-8")
    after = fault.planted(before)
    assert after != before
    assert Path(fault.path).suffix == ".py"
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), test


PACKAGE = """
def double(x):
    if x:
        return 2 * x
    return 0


def half(x):
    return x / 2
"""

TESTS = """
import os, subprocess, sys
import pytest
from keymix import double, half


def test_double():
    assert double(3) == 6


@pytest.mark.parametrize("x", [2, 4])
def test_half(x):
    assert half(x) == x / 2


def test_double_in_another_process():
    code = "import keymix; print(keymix.double(3))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "6\\n"
"""

FOUND, UNSEEN, LOST, MOVED, BROKEN = (
    f"""
### {number}. {name}

In `src/keymix/{file}`:

```diff
{diff}
```

Run: `tests/test_toy.py`
"""
    for number, name, file, diff in (
        (1, "Doubles thrice", "__init__.py", " if x:\n-    return 2 * x\n+    return 3 * x"),
        (2, "Nothing is something", "__init__.py", "-return 0\n+return 0.0"),
        (3, "Not there", "__init__.py", "-return 5 * x\n+return 6 * x"),
        (4, "In another file", "other.py", "-return x / 2\n+return x / 3"),
        (5, "No Python", "__init__.py", "-return x / 2\n+return x /"),
    )
)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose package and tests take no time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in (("src/keymix/__init__.py", PACKAGE), ("tests/test_toy.py", TESTS)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(toy: Path, faults: str, *words: str) -> tuple[int, str]:
    """Run the script on a list; return its exit status and the list afterwards."""
    (toy / "faults.md").write_text(faults)
    status = main(["--root", str(toy), "--list", str(toy / "faults.md"), *words], loaded=())
    return status, (toy / "faults.md").read_text()


def test_a_fault_that_tests_see_is_caught_in_all_processes(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(toy, f"# Faults\n{FOUND}\n## Others\n", "--write")
    assert status == 0
    assert "1 of 1 caught" in capsys.readouterr().out
    assert "Fails: `test_double`, `test_double_in_another_process`.\n" in text
    assert text.endswith("## Others\n")
    assert (toy / "src/keymix/__init__.py").read_text() == PACKAGE
    assert run(toy, text, "--write") == (0, text)


def test_a_fault_that_is_not_caught_is_named_and_the_status_is_1(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(toy, FOUND + UNSEEN + LOST + BROKEN, "--write")
    assert status == 1
    states = ("caught", "NOT CAUGHT", "LOST", "NOT RUN")
    for line, state in zip(capsys.readouterr().out.splitlines(), states, strict=False):
        assert f" {state} " in line
    for part, state in zip(text.split("###")[2:], states[1:], strict=True):
        assert f"Fails: nothing ({state.lower()})." in part


def test_lines_that_moved_are_found_and_their_file_is_written(toy: Path) -> None:
    status, text = run(toy, MOVED, "--places", "--write")
    assert status == 0
    assert text == MOVED.replace("other.py", "__init__.py")
    (toy / "src/keymix/third.py").write_text("def third(x):\n    return x / 2\n")
    (fault,) = read(MOVED)
    with pytest.raises(Lost, match=r"third\.py"):
        locate(fault, toy)


def test_numbers_choose_faults_and_tests_run_without_any(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toy, FOUND + LOST, "--only", "1")[0] == 0
    assert run(toy, FOUND + LOST, "--check-green")[0] == 0
    (toy / "tests/test_toy.py").write_text("def test_red():\n    assert 0\n")
    capsys.readouterr()
    assert run(toy, FOUND + LOST, "--check-green")[0] == 1
    assert "test_red" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(toy, FOUND, "--only", "9")


@pytest.mark.slow
def test_tests_that_take_too_long_are_ended_and_not_counted(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy / "tests/test_toy.py").write_text("import time\ntime.sleep(60)\n")
    assert run(toy, FOUND, "--limit", "1")[0] == 1
    assert "NOT RUN" in capsys.readouterr().out


def test_a_package_outside_of_the_copy_is_not_tested(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy / "src/keymix/__init__.py").write_text(PACKAGE + "\n__file__ = '/elsewhere/keymix.py'\n")
    assert run(toy, FOUND)[0] == 1
    assert "NOT RUN" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [FOUND.replace("Run:", "Try:"), FOUND + FOUND, FOUND.replace("3 * x", "2 * x")],
    ids=["no tests", "twice", "no change"],
)
def test_a_list_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(BadList):
        read(text)
