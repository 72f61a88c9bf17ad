# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoints: their names in order, written whole or not at all, read with a check.

A checkpoint is a mapping of plain values and tensors, written with ``torch.save``:

- ``format``: that of the run's folder, `keymix.train.record.FORMAT`;
- ``epoch``, ``batch``, ``updates``: epochs done, batches done of the one after them, and updates
  of the weights since the start;
- ``model``, ``ema``: state of the model, and of its moving average (None without);
- ``optimizer``, ``scheduler`` (None where the rate is constant), ``scaler`` (empty but of float16);
- ``task``: sums of the epoch's losses, the last learning rate, and the digest of a teacher;
- ``record``: lines of the epochs, seconds of the unfinished one, and whose images it saw.

It is all that a run resumes from, but for the weights of the best epoch so far, which a file of
their own keeps.

The checkpoint of a model whose ranks have parts of it (``--strategy fsdp``) is a folder: the
mapping, in which sharded tensors have no values, as ``state.ckpt``, and their parts, a safetensors
file of each rank. ``files`` in the mapping has the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch

from keymix.errors import KeymixWarning, UserError
from keymix.records import FormatError, check_format, from_json
from keymix.train import files, ranks
from keymix.train.record import FORMAT, EpochsDone

KEPT = 2

STATE = "state.ckpt"
"""In the folder of a sharded checkpoint, what is not sharded."""

_NAME = re.compile(r"epochs_(\d+)(?:_step_(\d+))?\.ckpt")
_PARTS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("epoch", "batch", "updates"), int),
    **dict.fromkeys(("model", "optimizer", "scaler", "task"), dict),
    **dict.fromkeys(("ema", "scheduler"), (dict, NoneType)),
}
_UNREADABLE = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


class DamagedRun(UserError):
    """A run that can neither be used as it is nor be written again from its checkpoints."""

    def __init__(self, cause: str) -> None:
        self.cause = cause.rstrip(".")
        super().__init__(
            f"{self.cause}. Restore it from a copy, or train again from the start with --overwrite."
        )


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
        files.remove(old.path)


def resume_hint(folder: Path, *, overwrite: bool = False) -> str:
    """Say what a run resumes from, and how; `overwrite` is what the command that began it did."""
    newest = next(iter(checkpoints(folder)), None)
    if newest is None:
        return "no checkpoint was written yet; the same command starts from the beginning"
    how = "the same command without --overwrite" if overwrite else "the same command"
    return f"{str(newest.path)!r} is saved ({newest.place}); {how} resumes from it"


def newest(folder: Path) -> tuple[dict[str, Any], EpochsDone] | None:
    """Read the newest checkpoint that loads, and its record; None where there is none at all.

    One that does not load is named in a `KeymixWarning` and passed over; where none loads, the run
    is a `DamagedRun`.
    """
    found, wrong = checkpoints(folder), list[str]()
    for place in found:
        try:
            content = _read(place.path)
        except FormatError:
            raise
        except UserError as error:
            wrong.append(str(error))
            continue
        for damaged in wrong:
            text = f"{damaged}; resuming from {place.path.name}"
            warnings.warn(text, KeymixWarning, stacklevel=3)
        return content
    if wrong:
        raise DamagedRun("; ".join(wrong))
    return None


def _read(path: Path) -> tuple[dict[str, Any], EpochsDone]:
    """Read a checkpoint, checksums compared, and its record of the epochs that are done.

    Of one that is a folder, ``shards`` names it: `ranks.read_shards` reads the rest.
    """
    where, file = f"the checkpoint {str(path)!r}", path / STATE if path.is_dir() else path
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
        content = None if bad else torch.load(file, map_location="cpu", weights_only=True)
        if content and path.is_dir():
            known = content["files"].items()
            bad = ", ".join(name for name, digest in known if _digest(path / name) != digest)
            content["shards"] = str(path)
    except _UNREADABLE as error:
        bad, content = (str(error).splitlines() or [type(error).__name__])[0], None
    if bad:
        raise UserError(f"{where} is damaged ({bad})")
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"{where} is none of keymix")
    check_format(content, FORMAT, where=where)
    for name, kind in _PARTS.items():
        if not isinstance(content.get(name), kind):
            raise UserError(f"{where} is damaged ({name} is a {type(content.get(name)).__name__})")
    record = from_json(EpochsDone, content.get("record"), where=where)
    if [line.epoch for line in record.lines] != [*range(content["epoch"])]:
        raise UserError(f"{where} is damaged (its lines are not those of its epochs)")
    return content, record


def save(folder: Path, state: Mapping[str, Any], *, sharded: bool = False) -> None:
    """Write a checkpoint, given but for its format, into a run's folder, whole or not at all.

    The first rank writes it; one of a `sharded` model is written by all.
    """
    path = checkpoint_path(folder, state["epoch"], state["batch"])
    content = {"format": FORMAT, **state}
    if not sharded:
        ranks.first(lambda: _write(path, content))
        return
    part = files.part_of(path)
    try:
        ranks.first(lambda: files.make_folder(part, parents=False))
        with ranks.agreed():
            try:
                content = ranks.write_shards(part, content)
                names = ranks.first(lambda: sorted(each.name for each in part.iterdir()))
                mine = {name: _digest(part / name) for name in names[ranks.rank() :: ranks.size()]}
            except OSError as error:
                raise files.write_error(path, error) from error
        for each in ranks.gathered(mine):
            content.setdefault("files", {}).update(each)
        ranks.first(lambda: _write(part / STATE, content))
        ranks.first(lambda: files.replace_folder(part, path))
    finally:
        if ranks.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    written = io.BytesIO()  # torch.save itself hides the error of a full disk behind its own
    torch.save(dict(content), written)
    files.write_atomically(path, lambda stream: stream.write(written.getbuffer()))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
