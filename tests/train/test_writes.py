# SPDX-License-Identifier: Apache-2.0
"""A disk that takes no more: old files stay whole, one line says what to do, the run continues."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from keymix.errors import WriteError
from keymix.train import files
from keymix.train.engine import train
from keymix.train.recipe import Recipe


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class FullDisk:
    """Takes nothing from the n-th write of a file on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int, out: Path
    ) -> None:
        self.name, self.left, self.code, self.out = name, nth, code, out
        self.before: dict[str, bytes] = {}
        self.path = Path()
        self._write, self._fsync = files.write_atomically, os.fsync
        monkeypatch.setattr(files, "write_atomically", self.write)
        monkeypatch.setattr(files.os, "fsync", self.fsync)

    def write(self, path: Path, content: Any) -> None:
        if path.name == self.name:
            self.left -= 1
            if not self.left:
                self.path = path
                self.before = contents(self.out)
        self._write(path, content)

    def fsync(self, descriptor: int) -> None:
        if self.left <= 0:
            raise OSError(self.code, os.strerror(self.code))
        self._fsync(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nth", "code", "remedy"),
    [
        ("recipe.json", 1, errno.ENOSPC, "Free space"),
        ("weights_best.safetensors", 1, errno.EDQUOT, "quota"),
        ("epochs_00001.ckpt", 1, errno.ENOSPC, "Free space"),
        ("metrics.jsonl", 3, errno.EIO, "failing"),
        ("summary.json", 1, errno.EROFS, "--out"),
    ],
)
def test_full_disk_leaves_whole_files_and_the_run_goes_on(
    tiny: Recipe,
    tiny_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nth: int,
    code: int,
    remedy: str,
) -> None:
    out = tmp_path / "run"
    disk = FullDisk(monkeypatch, name, nth, code, out)
    with pytest.raises(WriteError) as failed:
        train(tiny, out)
    monkeypatch.undo()
    line = str(failed.value)
    assert "\n" not in line
    assert f"cannot write {str(disk.path)!r}" in line
    assert remedy in line
    assert os.strerror(code) in line
    now = contents(out) if out.exists() else {}
    disk.before.pop(".lock")
    assert {place: now.get(place) for place in disk.before} == disk.before
    assert not [place for place in now if place.endswith(".part")]
    train(tiny, out)
    for which in ("last", "best"):
        weights = files.weights_file(which)
        assert (out / weights).read_bytes() == (tiny_run / weights).read_bytes()


def test_failing_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    files.write_json(path, {"a": 1})

    def write(stream: Any) -> None:
        stream.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WriteError, match=r"kept\.json"):
        files.write_atomically(path, write)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.json"]
    assert files.read_json(path) == {"a": 1}


def limited(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command whose files may not grow beyond 16 KiB; its exit code and what it said."""
    command = Command(*words, folder=folder, largest=16_384)
    try:
        return command.ended(), command.err
    finally:
        command.kill()


@pytest.mark.slow
def test_limit_on_files_ends_train_with_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "digits_vit", "--limit", "80", "--epochs", "1", "--data.batch_size", "32"]
    code, err = limited(tmp_path / "said", *words, "--out", str(out))
    assert code == 2
    said = [line for line in err.splitlines() if " to train on, " not in line]
    assert len(said) == 1, err
    assert "weights_best.safetensors" in err
    assert "ulimit -f" in err
    assert "same command starts from the beginning" in err
    assert not list(out.rglob("*.part"))


@pytest.mark.slow
def test_limit_on_files_ends_a_comparison_with_one_line(tmp_path: Path) -> None:
    out = tmp_path / "comparison"
    words = ["compare", "--limit", "80", "--epochs", "1", "--data.batch_size", "32"]
    words += ["--mixers", "mhsa,ska", "--seeds", "1", "--no-controls", "--processes", "1"]
    code, err = limited(tmp_path / "said", *words, "--out", str(out))
    assert code == 2
    said = [line for line in err.splitlines() if line.startswith("keymix: ")]
    assert len(said) == 1, err
    assert said[0].startswith("keymix: error: cannot write ")  # the first, not each run's failure
    assert "weights_best.safetensors" in said[0]
    assert "Traceback" not in err
    assert not list(out.rglob("*.part"))
    assert not (out / "results.json").exists()
