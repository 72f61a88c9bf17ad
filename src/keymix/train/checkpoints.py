# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoints: their names in order, written whole or not at all, read with a check.

A checkpoint is a mapping of plain values and tensors, written with ``torch.save``:

- ``format``: that of the run's folder, `keymix.train.record.FORMAT`;
- ``epoch``, ``batch``, ``updates``: epochs done, batches done of the one after them, and updates
  of the weights since the start;
- ``model``, ``ema``: state of the model, and of its moving average (None without);
- ``optimizer``, ``scheduler`` (None where the rate is constant), ``scaler`` (empty but of float16);
- ``task``: sums of the epoch's losses, the last learning rate, and the digest of a teacher;
- ``record``: lines of the epochs, seconds of the unfinished one, whose images it saw, what is lost.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from keymix.errors import KeymixWarning
from keymix.records import check_format, from_json
from keymix.train import files
from keymix.train.record import FORMAT, EpochsDone

KEPT = 2

_NAME = re.compile(r"epochs_(\d+)(?:_step_(\d+))?\.ckpt")


class Checkpoint(NamedTuple):
    """Where a run stood: epochs done, and steps of the epoch after them (0 at an epoch's end)."""

    epochs: int
    steps: int
    path: Path

    @property
    def place(self) -> str:
        """The place in words, epochs counted from one."""
        if self.steps:
            return f"step {self.steps} of epoch {self.epochs + 1}"
        return f"the end of epoch {self.epochs}"


def checkpoint_path(folder: Path, epochs: int, steps: int = 0) -> Path:
    """The file for a place, in a run's folder; names sort as the places do."""
    step = f"_step_{steps:06d}" if steps else ""
    return folder / files.CHECKPOINTS / f"epochs_{epochs:05d}{step}.ckpt"


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a run's folder, newest first."""
    found = [
        Checkpoint(int(name[1]), int(name[2] or 0), path)
        for path in (folder / files.CHECKPOINTS).glob("epochs_*.ckpt")
        if (name := _NAME.fullmatch(path.name))
    ]
    return sorted(found, reverse=True)


def prune(folder: Path) -> None:
    """Remove all but the newest two: the second is there in case the newest is damaged."""
    for old in checkpoints(folder)[KEPT:]:
        old.path.unlink(missing_ok=True)


def resume_hint(folder: Path, *, overwrite: bool = False) -> str:
    """Say what a run resumes from, and how; `overwrite` is what the command that began it did."""
    newest = next(iter(checkpoints(folder)), None)
    if newest is None:
        return "no checkpoint was written yet; the same command starts from the beginning"
    how = "the same command without --overwrite" if overwrite else "the same command"
    return f"{str(newest.path)!r} is saved ({newest.place}); {how} resumes from it"


def usable(folder: Path, *, resumes: bool = False) -> tuple[Checkpoint, EpochsDone] | None:
    """The newest whole checkpoint, with what it keeps of the epochs before it; None without one.

    A damaged one is named in a `KeymixWarning`, which says what a run `resumes` from, and passed
    over.
    """
    there = checkpoints(folder)
    for place, checkpoint in enumerate(there):
        content = _read(checkpoint.path)
        if isinstance(content, dict):
            where = f"the checkpoint {str(checkpoint.path)!r}"
            check_format(content, FORMAT, where=where)
            return checkpoint, from_json(EpochsDone, content["record"], where=where)
        older = place + 1 < len(there)
        remedy = "resuming from the one before" if older else "there is no other; starting over"
        warnings.warn(
            f"checkpoint {str(checkpoint.path)!r} is damaged ({content})"
            + (f"; {remedy}" if resumes else ""),
            KeymixWarning,
            stacklevel=2,
        )
    return None


def _read(path: Path) -> dict[str, Any] | str:
    """The content of a checkpoint, checksums compared; or why it cannot be used."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return f"checksum of {bad} is wrong"
        content = read(path)
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return content if isinstance(content, dict) and "format" in content else "it is none of keymix"


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, given but for its format, into a run's folder, whole or not at all."""
    content = io.BytesIO()  # torch.save itself hides the error of a full disk behind its own
    torch.save({"format": FORMAT, **state}, content)
    path = checkpoint_path(folder, state["epoch"], state["batch"])
    files.write_atomically(path, lambda stream: stream.write(content.getbuffer()))


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint that is known to be whole."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content
