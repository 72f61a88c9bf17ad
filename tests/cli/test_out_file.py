# SPDX-License-Identifier: Apache-2.0
"""``--out FILE``: refused before any work, written whole or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from written_run import written_run

from keymix.cli import main

COMMANDS = [["predict", "run", "photos", "--format", "csv"], ["data", "check", "photos"]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a run and photographs of two classes."""
    monkeypatch.chdir(tmp_path)
    written_run(tmp_path / "run")
    for k, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            image = Image.new("RGB", (12, 12), (100 * k, 10 * i, 50))
            image.save(tmp_path / "photos" / name / f"{i:02d}.png")
    return tmp_path


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file grows beyond a size, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("words", COMMANDS, ids=["predict", "data check"])
def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(
    words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", "out"]) == 0
    before = (place / "out").read_bytes()
    with full_after(len(before) // 2):
        assert main([*words, "--out", "out", "--overwrite"]) == 2
    assert "cannot write 'out'" in capsys.readouterr().err
    assert (place / "out").read_bytes() == before
    assert sorted(path.name for path in place.iterdir()) == ["out", "photos", "run"]
