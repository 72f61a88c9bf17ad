# SPDX-License-Identifier: Apache-2.0
"""What a run resumes from: its checkpoint, the lines of its epochs, the best weights so far.

The checkpoint is what counts. It keeps the epochs' lines, and weights keep the epoch and the scores
that they are of, so that ``metrics.jsonl`` may be damaged and no number stands by other weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from keymix.errors import KeymixWarning, UserError
from keymix.task import Task
from keymix.train import files
from keymix.train.checkpoints import Checkpoint, usable
from keymix.train.evaluation import score_split
from keymix.train.folder import RETESTED, damage, epoch_lines, read_summary
from keymix.train.record import Environment, EpochLine, SameData, Validated, WeightsFacts
from keymix.train.runs import Run

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Without a checkpoint it starts from the first step, or, if the last epoch is trained, is tested.
    `best` has the scores of the weights that are kept as best, `lost` a sentence on each part of
    the record that cannot be rebuilt.
    """

    checkpoint: Checkpoint | None = None
    trained: bool = False
    lines: tuple[EpochLine, ...] = ()
    best: Validated | None = None
    lost: tuple[str, ...] = ()

    def steps_done(self, steps: int, epochs: int) -> int:
        """Batches of the run that are done, of `steps` per epoch and `epochs` epochs."""
        if self.trained:
            return steps * epochs
        place = self.checkpoint
        return 0 if place is None else place.epochs * steps + place.steps


def progress_of(run: Run, data: ImageData, model: nn.Module) -> Progress:
    """Find what is done of a run, by its checkpoint, and compare its metrics with that.

    Weights that have no scores of their own are scored with the model.
    """
    folder, epochs = run.folder, run.recipe.schedule.epochs
    found = usable(folder, resumes=not run.done)
    checkpoint, before = found or (None, None)
    ended = checkpoint is not None and checkpoint.epochs == epochs
    trained = None if ended else _facts(folder, "last")
    if trained is not None:  # written once, after the last epoch, whose checkpoint is gone
        began, done = SameData.of(trained.data), epochs
    elif checkpoint is not None and before is not None:
        began, done = before.data, checkpoint.epochs
    elif run.done:
        raise UserError(
            f"the run in {str(folder)!r} is finished, but neither a whole checkpoint nor whole "
            "weights are left to test it again. Restore its files, or train again from the start "
            "with --overwrite."
        )
    else:
        return Progress()
    _same_data(folder, data, began)
    lost = list(before.lost) if before is not None else []
    kept = before.lines if before is not None else ()
    lines, lacking = _lines(run, done, kept, lost, data.task)
    best = _best(run, data, model, done, lines, lacking, lost) if done else None
    return Progress(
        checkpoint=None if trained is not None else checkpoint,
        trained=trained is not None,
        lines=tuple(lines),
        best=best,
        lost=tuple(dict.fromkeys(lost)),
    )


def mend(run: Run) -> bool:
    """Rebuild the damaged files of a finished run that need none of its images.

    Returns whether the run is whole now; else it must be tested again.
    """
    folder = run.folder
    found = damage(folder) if run.done else {}
    for name, wrong in found.items():
        text = f"{wrong.rstrip('.')}; {name} of the finished run is rebuilt"
        warnings.warn(text, KeymixWarning, stacklevel=3)
    if not found or any(name in found for name in RETESTED):
        return False
    if files.RECIPE in found:
        files.write_json(folder / files.RECIPE, run.recipe.to_dict())
    if files.ENVIRONMENT in found:
        files.write_json(folder / files.ENVIRONMENT, Environment())  # nobody knows it any more
    if files.METRICS in found:
        checkpoint = usable(folder)
        kept = () if checkpoint is None else checkpoint[1].lines
        lost: list[str] = []
        task = read_summary(folder).task_kind
        lines, _ = _lines(run, run.recipe.schedule.epochs, kept, lost, task)
        files.write_metrics(folder / files.METRICS, lines)
        if lost:
            summary = replace(read_summary(folder), lost=tuple(lost))
            files.write_json(folder / files.SUMMARY, summary)
            warn_of_lost(folder, lost)
    return True


def warn_of_lost(folder: Path, lost: Iterable[str]) -> None:
    """Warn of what of a run's record cannot be rebuilt."""
    for text in lost:
        warnings.warn(f"run {str(folder)!r}: {text}", KeymixWarning, stacklevel=4)


def validated(which: str, run: Run, data: ImageData, model: nn.Module) -> Validated:
    """The epoch and validation scores of weights: their own, or scored now in a copy of a model."""
    path = run.folder / files.weights_file(which)
    facts = files.read_facts(path)
    known = {} if facts.val is None or facts.epoch is None else facts.val
    own = Validated(epoch=facts.epoch, val=known)
    if known.keys() >= {*data.task.keys} and not own.lacks(data.task):
        return own
    model = copy.deepcopy(model)  # training continues with the other, in its own mode
    model.load_state_dict(files.read_weights(path)[0])
    return Validated(epoch=None, val=score_split(run.recipe, model, data, "val").scores)


def _facts(folder: Path, which: str) -> WeightsFacts | None:
    """The facts of weights; None if the file is missing or damaged."""
    try:
        return files.read_facts(folder / files.weights_file(which))
    except UserError:
        return None


def _lines(
    run: Run, done: int, kept: Sequence[EpochLine], lost: list[str], task: Task
) -> tuple[list[EpochLine], list[int]]:
    """The lines of the epochs that are done, and the epochs that have none, which `lost` takes in.

    Those that the checkpoint kept count before those of the file.
    """
    path = run.folder / files.METRICS
    stored = {line.epoch: line for line in files.read_metrics(path, epochs=done, task=task)}
    sure = {line.epoch: line for line in kept}
    texts = {epoch: files.line_text(line) for epoch, line in stored.items()}
    differs = any(texts.get(epoch) != files.line_text(line) for epoch, line in sure.items())
    if differs and not run.done:  # of a finished run it was said before
        text = f"{str(path)!r} was damaged; it is rebuilt from the checkpoint"
        warnings.warn(text, KeymixWarning, stacklevel=4)
    lines = stored | sure
    lacking = [epoch for epoch in range(done) if epoch not in lines]
    if lacking:
        lost.append(
            f"{files.METRICS} lacks {epoch_lines(lacking)}, and nothing is left to rebuild it"
        )
    return [lines[epoch] for epoch in sorted(lines)], lacking


def _best(
    run: Run,
    data: ImageData,
    model: nn.Module,
    done: int,
    lines: list[EpochLine],
    lacking: list[int],
    lost: list[str],
) -> Validated | None:
    """The epoch and the scores of the weights that are kept as best; None if they are gone."""
    name, facts = files.weights_file("best"), _facts(run.folder, "best")
    if facts is None:
        text = f"{name} of epochs 1 to {done} was missing or damaged"
        lost.append(f"{text}: the best of later epochs, or else the last, is used as the best")
        return None
    found = validated("best", run, data, model)
    if found.epoch is None:
        found = replace(found, epoch=_epoch_of(found, lines, lacking, data.task))
    if found.epoch is None:
        lost.append(f"the epoch of {name} is not known")
    return found


def _epoch_of(
    found: Validated, lines: list[EpochLine], lacking: list[int], task: Task
) -> int | None:
    """The epoch that scored so, or the only one without a line."""
    found_score, found_loss = found.rank(task)
    for line in lines:
        score, loss = line.validated.rank(task)
        if score == found_score and abs(loss - found_loss) <= 1e-6 * abs(loss):
            return line.epoch
    return lacking[0] if len(lacking) == 1 else None


def _same_data(folder: Path, data: ImageData, began: SameData) -> None:
    """Refuse to resume with images other than those that the run began with."""
    changed = began.changed(SameData.of(data.record()))
    if changed:
        raise UserError(
            f"the run in {str(folder)!r} began with other {data.kind.nouns}: the data "
            f"{data.spec!r} has changed since ({', '.join(changed)}). Restore it, or start over "
            "with --overwrite."
        )
