# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoints: their names in order, written whole or not at all, read with a check."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from keymix.errors import KeymixWarning
from keymix.train import files

KEPT = 2
OURS = "keymix"
"""Key of our part of a checkpoint; the rest is Lightning's."""

_NAME = re.compile(r"epochs_(\d+)(?:_step_(\d+))?\.ckpt")


class Checkpoint(NamedTuple):
    """Where a run stood.

    Args:
        epochs: Epochs done.
        steps: Steps done in the epoch after them; 0 at the end of an epoch.
        path: The file.
    """

    epochs: int
    steps: int
    path: Path

    @property
    def told(self) -> str:
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


def standing(folder: Path, *, overwrite: bool = False) -> str:
    """Say what a run goes on from, and how.

    Args:
        folder: The run's folder.
        overwrite: Whether the command that began it throws away what is there.
    """
    newest = next(iter(checkpoints(folder)), None)
    if newest is None:
        return "no checkpoint was written yet; the same command starts anew"
    how = "the same command without --overwrite" if overwrite else "the same command"
    return f"{str(newest.path)!r} stands ({newest.told}); {how} goes on from there"


def usable(folder: Path, *, resumes: bool = False) -> tuple[Checkpoint | None, dict[str, Any]]:
    """The newest whole checkpoint with its content; None where there is none.

    A damaged one is named in a `KeymixWarning` and passed over.

    Args:
        folder: The run's folder.
        resumes: Whether a run resumes from it, which the warning says then.
    """
    there = checkpoints(folder)
    for place, checkpoint in enumerate(there):
        content = _read(checkpoint.path)
        if isinstance(content, dict):
            return checkpoint, content
        older = place + 1 < len(there)
        remedy = "resuming from the one before" if older else "there is no other; starting again"
        warnings.warn(
            f"checkpoint {str(checkpoint.path)!r} is damaged ({content})"
            + (f"; {remedy}" if resumes else ""),
            KeymixWarning,
            stacklevel=2,
        )
    return None, {}


def _read(path: Path) -> dict[str, Any] | str:
    """The content of a checkpoint, checksums compared; or why it cannot be used."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return f"checksum of {bad} is wrong"
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return content if OURS in content else "it is not one of this version's"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's reading and our writing: through a part, brought to the disk, then renamed."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            WriteError: If the disk does not take it.
        """
        content = io.BytesIO()  # torch.save itself hides the error of a full disk behind its own
        torch.save(checkpoint, content)
        files.write_atomically(Path(path), lambda stream: stream.write(content.getbuffer()))
