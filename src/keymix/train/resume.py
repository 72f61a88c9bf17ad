# SPDX-License-Identifier: Apache-2.0
"""What a run resumes from: its newest checkpoint that loads, and the best weights so far.

All other files of a run are written from these two, those of a finished run too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from keymix.errors import KeymixWarning, UserError, one_line
from keymix.train import files
from keymix.train.checkpoints import DamagedRun, newest
from keymix.train.folder import damage
from keymix.train.record import EpochLine, EpochsDone, SameData, Validated
from keymix.train.runs import Run
from keymix.train.step import Training

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_UNFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run's record has of the epochs before: nothing where the run starts.

    `seconds` were spent on the unfinished epoch, `lines` are those of the others, and `best` has
    the epoch and scores of the weights that are kept as best.
    """

    seconds: float = 0.0
    lines: tuple[EpochLine, ...] = ()
    best: Validated | None = None


class Stored(NamedTuple):
    """What a run resumes from, and which file of a finished one is damaged: empty for none."""

    content: Mapping[str, Any]
    record: EpochsDone
    best: Validated | None
    wrong: str


def stored(run: Run) -> Stored | None:
    """Read what a run resumes from; None where there is no checkpoint.

    A `DamagedRun` is refused. Nothing is written.
    """
    wrong = damage(run.folder) if run.done else ""
    found = newest(run.folder)
    if found is None:
        if wrong:
            raise DamagedRun(f"{wrong}; the finished run has no checkpoint to write it from")
        return None
    content, record = found
    return Stored(content, record, _best(run.folder) if record.lines else None, wrong)


def resumed(run: Run, found: Stored, data: ImageData, training: Training) -> Progress:
    """Bring a training to where a checkpoint stands; one that began with other data is refused."""
    content, record, best, wrong = found
    changed = record.data.changed(SameData.of(data.record()))
    if changed:
        raise UserError(
            f"the run in {str(run.folder)!r} began with other {data.kind.nouns}: the data "
            f"{data.spec!r} has changed since ({', '.join(changed)}). Restore it, or start over "
            "with --overwrite."
        )
    try:
        training.restore(content)
    except (UserError, torch.OutOfMemoryError):
        raise
    except _UNFIT as error:
        why = one_line(str(error))[:300]
        raise DamagedRun(f"the checkpoint in {str(run.folder)!r} does not fit: {why}") from None
    if wrong:
        text = f"{wrong}; the files of the finished run are written again from its checkpoint"
        warnings.warn(text, KeymixWarning, stacklevel=3)
    return Progress(seconds=record.seconds, lines=record.lines, best=best)


def _best(folder: Path) -> Validated:
    """The epoch and the scores of the best weights so far, of which there is one file alone."""
    path = folder / files.weights_file("best")
    try:
        facts = files.read_weights(path)[1]
    except UserError as error:
        raise DamagedRun(f"{error}; nothing else keeps the best epoch's weights") from None
    if facts.epoch is None or facts.val is None:
        raise DamagedRun(f"{str(path)!r} has no epoch and scores")
    return Validated(epoch=facts.epoch, val=facts.val)
