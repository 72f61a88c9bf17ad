# SPDX-License-Identifier: Apache-2.0
"""A run after training: read its folder, build its model, evaluate it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keymix.arguments import checked, whole_size
from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.models.image_size import set_image_size, take_time_steps
from keymix.models.preprocessing import describe, preprocessing_of
from keymix.records import to_json
from keymix.task import LOSS
from keymix.train import files
from keymix.train.evaluation import (
    SplitName,
    data_for,
    record_of,
    score_split,
    warn_of_degenerate,
)
from keymix.train.folder import Which, read_summary, recorded_recipe, run_folder
from keymix.train.model import enough_memory, model_for
from keymix.train.recipe import Recipe
from keymix.train.record import Evaluation, RunRecord, WeightsFacts
from keymix.train.scoring import Flips, Mirrored


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Args:
        folder: Where it is.
        recipe: What was trained.
    """

    folder: Path
    recipe: Recipe

    @cached_property
    def summary(self) -> RunRecord:
        """What came out; raises UserError while the run is not done, or if it is damaged.

        `keymix.records.to_json` gives the plain data that ``summary.json`` has.
        """
        if not self.done:
            raise self._unfinished()
        try:
            return read_summary(self.folder)
        except UserError as error:
            raise self._written_again(error) from None

    @property
    def done(self) -> bool:
        """Whether training and the final test are complete."""
        return (self.folder / files.SUMMARY).exists()

    def metrics(self) -> list[dict[str, float | None]]:
        """The epochs' lines, in order, as ``metrics.jsonl`` has them."""
        return [to_json(line) for line in files.read_metrics(self.folder / files.METRICS)]

    def weights(self, which: Which = "last") -> tuple[dict[str, Tensor], WeightsFacts]:
        """The weights of the last or the best-on-validation epoch, and their facts.

        Facts are the run's recipe, its data's record, and the weights' epoch and scores.
        """
        if which not in ("last", "best"):
            raise UserError(f"weights {which!r}: choose 'last' or 'best'.")
        path = self.folder / files.weights_file(which)
        if not path.exists():
            gone = UserError(f"{str(path)!r} was taken away: restore it.")
            raise gone if self.done else self._unfinished()
        try:
            return files.read_weights(path)
        except UserError as error:
            raise self._written_again(error) from None

    def _written_again(self, error: UserError) -> UserError:
        return UserError(
            f"{str(error).rstrip('.')}. `keymix train {self.folder}` writes the files of a "
            "finished run again from its checkpoint."
        )

    def _unfinished(self) -> UserError:
        return UserError(
            f"the run {str(self.folder)!r} is not done; to resume it: `keymix train {self.folder}`."
        )

    def model(self, which: Which = "last") -> nn.Module:
        """The trained model in eval mode, on the CPU.

        Its ``pretrained_cfg`` describes the run: size, channels, mean, standard deviation, crop and
        interpolation of its images, and its classes.

        Args:
            which: Weights of the ``last`` or the ``best`` epoch on validation.

        Raises:
            UserError: If the weights are missing, damaged or do not fit the recipe.
        """
        return self.model_and_data(which)[0]

    def model_and_data(self, which: Which = "last") -> tuple[nn.Module, DataRecord]:
        """The trained model as `model` gives it, and the record of the data it was trained on.

        Raises:
            UserError: If the weights are missing, damaged or do not fit the recipe.
        """
        state, facts = self.weights(which)
        data = facts.data
        with torch.random.fork_rng(devices=[]):
            model = model_for(self.recipe, data)
        try:
            model.load_state_dict(state)
            describe(model, preprocessing_of(data))
        except (RuntimeError, UserError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"the weights in {str(self.folder)!r} do not fit their recipe: {reason}"
            ) from None
        return model.eval(), data


@checked
def load_run(path: str | Path) -> Run:
    """Open a run's folder.

    Raises:
        UserError: If it is no run's folder, or its recipe is damaged.
    """
    folder = run_folder(Path(path))
    return Run(folder, recorded_recipe(folder))


@checked
def evaluate(
    run: Run | str | Path,
    data_spec: str | None = None,
    *,
    which: Which = "last",
    split: SplitName = "test",
    image_size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    time_steps: int | None = None,
    overlap: float | None = None,
    flips: Flips | None = None,
) -> dict[str, Any]:
    """Score a run on its own test split or on other data with the same classes.

    Args:
        run: The run, or its folder.
        data_spec: Other data; None for the run's own.
        which: Weights of the ``last`` or the ``best`` epoch.
        split: The split to score; other data is split as training data would be.
        image_size: Side, or height and width, of the images, pixels; those of the training if
            None. The model takes another size through ``set_input_size``.
        resize: Policy of mixers that hold something per position, ``"interpolate"`` or
            ``"pool_values"``, in place of the one the run was trained with.
        time_steps: Steps T of a spiking model, and frames made of each recording of events; those
            of the training if None.
        overlap: For runs on masks, share, 0 to below 1, by which windows of ``image_size`` overlap
            that slide over each image at its own size; None to see images as in training.
        flips: For runs on masks, mirror images whose logits are averaged with the image's:
            ``"horizontal"``, or ``"both"`` for three of them.

    Returns:
        ``loss``, ``top1``, ``top5`` (fractions, or None), or the scores of masks, with those of
        each class and case (``loss``, ``jaccard``, ``weighted_jaccard``, ``dice``,
        ``surface_dice``, ``hd95_mm`` or ``hd95_px``, …); ``images``, ``data``, ``split``,
        ``weights``, ``image_size``, ``resize``, ``time_steps`` (T, or None of a model without),
        ``overlap``, ``flips``.

    Raises:
        UserError: If weights or data are unfit, the data has classes that the run never saw, or
            the model, or the memory, cannot take the image size or the time steps.
    """
    refuse_lone(resize, image_size)
    run = run if isinstance(run, Run) else load_run(run)
    with enough_memory(image_size):
        model, seen = run.model_and_data(which)
        seen = in_windows(seen, overlap, flips)
        size = at_size(model, seen, image_size, resize)
        if time_steps is not None:
            take_time_steps(model, time_steps)
        data = data_for(run.recipe.data, seen, data_spec, size, time_steps)
        answering = model if flips is None else Mirrored(model, flips)
        scored = score_split(run.recipe, answering, data, split)
    inputs = f"{split} {data.kind.nouns}"
    warn_of_degenerate(scored.answers, run.recipe.model, inputs, scored.scores.get(LOSS))
    plain: dict[str, Any] = to_json(
        Evaluation(
            **vars(record_of(scored)),
            images=len(scored.answers.index),
            data=data.spec,
            split=split,
            weights=which,
            image_size=size,
            resize=resize,
            time_steps=getattr(model, "time_steps", None),
            overlap=seen.window_overlap,
            flips=flips,
        )
    )
    return plain


def refuse_lone(resize: str | None, image_size: int | tuple[int, int] | None) -> None:
    """Refuse a size that is none, and what mixers do at another size where none is given."""
    if image_size is not None:
        whole_size("image_size", image_size)
    elif resize is not None:
        raise UserError(f"resize={resize!r} acts on images of another size: give image_size too")


def at_size(
    model: nn.Module,
    seen: DataRecord,
    image_size: int | tuple[int, int] | None,
    resize: str | None,
) -> tuple[int, int]:
    """Let a model that was trained on some data take an image size; its height and width."""
    if image_size is None:
        return seen.image_size
    task = seen.task_kind
    if task.own_sizes:
        raise UserError(f"image_size={image_size!r}: {seen.spec} is seen at the images' own sizes.")
    if not task.whole_images:  # else the model takes images of any size
        set_image_size(model, image_size, resize=resize)
    elif resize is not None:
        raise UserError(f"resize={resize!r}: the model takes images of any size. Leave it out.")
    return whole_size("image_size", image_size)


def in_windows(seen: DataRecord, overlap: float | None, flips: Flips | None) -> DataRecord:
    """Let windows slide over images; these and flips are refused where pixels are not answered."""
    for name, value in (("overlap", overlap), ("flips", flips)):
        if value is not None and "window_overlap" not in seen.task_kind.data_options:
            does = seen.task_kind.does
            text = (
                f"{name}={value!r}: windows and flips are for masks; the run {does}. Leave it out."
            )
            raise UserError(text)
    if overlap is not None and not 0 <= overlap < 1:
        raise UserError(f"overlap={overlap!r}: give a share of a window, 0 to below 1.")
    return seen if overlap is None else replace(seen, window_overlap=overlap)
