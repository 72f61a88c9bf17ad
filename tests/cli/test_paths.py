# SPDX-License-Identifier: Apache-2.0
"""A path that no file system takes, or nobody may read, is one line in whichever verb it stands."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from written_run import written_run

from keymix.cli import main

LONG = "n" * 300
COMMANDS = (
    "train LONG",
    "train digits_vit --out LONG",
    "train digits_vit --data folder:LONG",
    "train digits_vit --model.weights LONG",
    "train digits_vit --import LONG.py",
    "compare --out LONG",
    "compare --data folder:LONG",
    "compare --recipe LONG.yaml",
    "report LONG",
    "eval LONG",
    "eval run --data folder:LONG",
    "predict LONG x.png",
    "predict run LONG",
    "predict run x.png --out LONG",
    "swap LONG --mixer ska --out swapped",
    "swap run --mixer ska --out LONG",
    "analyze attention run --out LONG",
    "check-mixer LONG",
    "data check LONG",
    "data check digits --out LONG",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    written_run(folder / "run")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_too_long_is_one_line(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(command.replace("LONG", LONG).split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("keymix: error: ")
    assert "n" * 50 in line
    assert [path.name for path in place.iterdir()] == ["run"]


def test_a_path_that_may_not_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    assert main(["report", "theirs/comparison"]) == 2
    text = capsys.readouterr().err
    assert "'theirs/comparison'" in text
    assert text.count("\n") == 1
