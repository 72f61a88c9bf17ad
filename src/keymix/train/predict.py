# SPDX-License-Identifier: Apache-2.0
"""A trained model with what belongs to it, and what it answers to files and images in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from keymix.arguments import checked, described
from keymix.data.decode import Pixels
from keymix.data.events.recordings import is_recording
from keymix.data.files import is_image
from keymix.data.pixels import prepared
from keymix.data.record import DataRecord
from keymix.data.sample import Size
from keymix.data.shown import (
    Picture,
    file_pixels,
    fitted,
    image_files,
    memory_pixels,
    of_scans,
    read_file,
)
from keymix.errors import UserError
from keymix.models.detectors import padded
from keymix.models.image_size import take_time_steps
from keymix.task import Task
from keymix.train.exported import (
    ModelFacts,
    Shipped,
    is_exported,
    public_model,
    public_record,
    read_exported,
    said_by,
    size_for,
)
from keymix.train.folder import Which
from keymix.train.model import device_of_this_machine, enough_memory
from keymix.train.parts import Answered, Prediction, answers_of
from keymix.train.pushed import is_pushed, read_pushed
from keymix.train.recipe import ModelConfig, Recipe
from keymix.train.runs import Run, at_size, in_windows, load_run, refuse_lone
from keymix.train.scoring import Flips, Mirrored, autocast


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModel:
    """A run's model, the classes it knows, and what prepares its images; see `load`.

    Args:
        source: The run: its folder, recipe and records; or the file, folder or name on the Hub.
        model: In eval mode, on this machine's GPU if it has one. ``model.to(...)`` moves it.
        data: The record of the data it was trained on.
        image_size: Height and width, pixels, at which it sees images.
        flips: Mirror images that are answered too.
    """

    source: Run | Shipped
    model: nn.Module
    data: DataRecord
    image_size: Size
    flips: Flips | None = None

    def __repr__(self) -> str:
        """Say in a few lines which model it is, what it was trained on, and what it scores."""
        source, data = self.source, self.data
        config = source.facts.model if isinstance(source, Shipped) else source.recipe.model
        classes = f", {len(data.classes)} classes" if data.classes else ""
        lines = [
            f"TrainedModel of {self.place!r}",
            f"  model: {config.name}" + (f" with {config.mixer}" if config.mixer else ""),
            f"  task: {self.task.name}, {self.task.does}{classes}",
            f"  data: {data.spec}, {data.kind.nouns} of {self.image_size[0]}x{self.image_size[1]}",
        ]
        with suppress(UserError):  # of a run that is not done, or of a file
            score, summary = self.task.score, self.run.summary
            tested = {"last": summary.last.test.scores, "best": summary.best.test.scores}
            said = [
                f"{score.text(s[score.key] or 0)} ({which} epoch)" for which, s in tested.items()
            ]
            lines.append(f"  test {score.name}: {', '.join(said)}")
        return "\n".join(lines)

    @property
    def place(self) -> str:
        """The run's folder; or the file, folder or name on the Hub."""
        source = self.source
        return source.place if isinstance(source, Shipped) else str(source.folder)

    @property
    def run(self) -> Run:
        """The run.

        Raises:
            UserError: If it was exported or pushed, and loaded without its run.
        """
        if isinstance(self.source, Shipped):
            raise UserError(
                f"{self.place!r} was exported or pushed, and this needs the run that it came "
                "from: name its folder"
            )
        return self.source

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the model's outputs; none if it has no classes."""
        return self.data.classes

    @property
    def task(self) -> Task:
        """What it does: its task, with its scores."""
        return self.data.task_kind

    @property
    def recipe(self) -> Recipe:
        """How it was trained; what was exported or pushed does not say it."""
        return self.run.recipe

    @property
    def model_config(self) -> ModelConfig:
        """The model's part of a recipe, its mixer in it, as training goes on with it."""
        if isinstance(self.source, Shipped):
            facts = self.source.facts.model
            return ModelConfig(name=facts.name, mixer=facts.mixer, options=dict(facts.options))
        return replace(self.recipe.model, drop_path=0.0)

    @property
    def at_once(self) -> int:
        """How many inputs the model is given together; one of images that windows slide over."""
        return 1 if self.data.window_overlap is not None else answers_of(self.task).at_once

    @property
    def takes_events(self) -> bool:
        """Whether its inputs are recordings of events, and not images."""
        return self.data.events

    def transform(self, image: Picture) -> Tensor:
        """Prepare an image as in the run's evaluation; a batch of these is what the model takes.

        Args:
            image: A file; an image of Pillow's; an array ``[h, w]``, ``[h, w, C]`` or
                ``[C, h, w]`` of bytes or of values from 0 to 1; or a uint8 tensor ``[C, h, w]``.

        Returns:
            float32 ``[C, H, W]`` on the CPU, resized, cropped and normalised; frames
            ``[T, 2, H, W]`` of a recording of events.

        Raises:
            UserError: If it cannot be read, or is no image that the model takes.
        """
        return self._read(image)[0]

    @checked
    def predict(self, inputs: Picture | Sequence[Picture], *, top: int = 5) -> Any:
        """Answer an input, or several.

        Of a list or a folder, a file that cannot be read has its error as the answer; alone, it
        raises.

        Args:
            inputs: One input as `transform` takes it, or what that returned, a float tensor; or
                several: a list of inputs, a folder with all below, an array ``[N, h, w, C]``, a
                tensor ``[N, C, h, w]``.
            top: How many classes to name for an image.

        Returns:
            A prediction of the run's task, or a list of them. Of classes, it has ``classes``,
            best first, and their ``probabilities``; of masks ``mask`` at the image's own size,
            ``[h, w]`` of class numbers or ``[K, h, w]`` of 0 and 1 where a pixel may have several
            classes, ``pixels`` of each class, and, made when they are asked for,
            ``probabilities`` ``[K, h, w]`` and an ``overlay`` ``[h, w, 3]``. All have ``path``,
            empty for images in memory, and ``error``.

        Raises:
            UserError: If an input does not exist or is none that the model takes, or the memory
                does not suffice.

        Example:
            >>> import keymix
            >>> trained = keymix.load("my-run")  # doctest: +SKIP
            >>> trained.predict("photo.png").classes[0]  # doctest: +SKIP
            'cat'
        """
        if top < 1:
            raise UserError(f"top = {top}: name at least one class.")
        self.check_answers()
        wanted, several = self._listed(inputs)
        with enough_memory(self.image_size):
            answers = list(self._answers(wanted, top, alone=not several))
        return answers if several else answers[0]

    def outputs(self, shown: Sequence[Tensor]) -> Any:
        """Return what the model gives for images that `transform` prepared, on its device.

        Args:
            shown: The images, a batch.
        """
        device = next((each.device for each in self.model.parameters()), torch.device("cpu"))
        source, whole = self.source, self.data.listed
        if isinstance(source, Shipped) and source.facts.model.levels:
            whole, shown = False, [*padded([*shown])[0]]
        batch: Any = [each.to(device) for each in shown] if whole else torch.stack([*shown])
        precision = "32" if isinstance(source, Shipped) else source.recipe.precision
        with torch.inference_mode(), autocast(device, precision):
            part = answers_of(self.task)
            model = self.model if self.flips is None else Mirrored(self.model, self.flips)
            answering = part.answering(model, self.data, self.image_size)
            return answering(batch if whole else batch.to(device))

    def check_answers(self) -> None:
        """Refuse a file that holds a part of a detector, and answers nothing."""
        if isinstance(self.source, Shipped) and self.source.facts.model.levels:
            raise UserError(
                f"{self.place!r} holds a backbone and its feature pyramid, whose maps outputs() "
                "returns: to find instances, name the run that it came from"
            )

    def prepare(self, pixels: Pixels) -> Tensor:
        """Resize, crop and normalise decoded pixels: uint8 ``[C, h, w]`` -> float32."""
        return self._normalised(fitted(pixels, self.data, self.image_size))

    def _normalised(self, shown: Tensor) -> Tensor:
        return prepared(shown, self.data.kind, mean=self.data.mean, std=self.data.std)

    def _listed(self, inputs: Picture | Sequence[Picture]) -> tuple[list[Picture], bool]:
        """List what is to be answered, and say whether that may be several."""
        if isinstance(inputs, np.ndarray):
            return (list(inputs), True) if inputs.ndim == 4 else ([inputs], False)
        if isinstance(inputs, Tensor):
            several = inputs.ndim == (5 if self.takes_events else 4)
            return (list(inputs), True) if several else ([inputs], False)
        if isinstance(inputs, str | Path):
            return [*image_files([inputs], events=self.takes_events)], Path(inputs).is_dir()
        if isinstance(inputs, Sequence):
            found: list[Picture] = []
            for each in inputs:
                found += self._listed(each)[0]
            return found, True
        return [inputs], False

    def _answers(self, inputs: Sequence[Picture], top: int, *, alone: bool) -> Iterator[Prediction]:
        """Answer inputs in batches; a file that cannot be read gets its error, or alone raises."""
        part = answers_of(self.data.task_kind)
        for start in range(0, len(inputs), self.at_once):
            shown: list[Tensor] = []
            known: list[Answered | Prediction] = []
            for each in inputs[start : start + self.at_once]:
                is_file = isinstance(each, str | Path)
                try:
                    tensor, size, pixels = self._read(each)
                except UserError as error:
                    if alone or not is_file:
                        raise
                    known.append(part.prediction(path=str(each), error=str(error)))
                    continue
                shown.append(tensor)
                path = str(each) if is_file else str(getattr(each, "filename", ""))
                known.append(Answered(path=path, size=size, pixels=pixels))
            answered = [each for each in known if isinstance(each, Answered)]
            outputs = self.outputs(shown) if shown else None
            found = iter(part.predicted(outputs, answered, self.data, top=top) if shown else ())
            yield from (next(found) if isinstance(k, Answered) else k for k in known)

    def _read(self, given: Picture) -> tuple[Tensor, Size, Pixels | None]:
        """Prepare an input; with its own height and width, and pixels."""
        if isinstance(given, str | Path):
            return self._of_file(Path(given))
        if isinstance(given, Tensor) and given.is_floating_point():
            return self._as_prepared(given)
        if not isinstance(given, np.ndarray | Image.Image | Tensor):
            raise UserError(
                f"inputs hold {described(given)}: give files, images of Pillow's, uint8 arrays "
                "[h, w, C] or tensors [C, h, w]."
            )
        if self.takes_events:
            raise UserError(
                "the run was trained on recordings of events: give files (.npz, .aedat), or what "
                "transform() returns of them."
            )
        data, scans = self.data, of_scans(self.data)
        window = data.intensity_window
        pixels = memory_pixels(given, data.in_chans, data.white_level, scans=scans, window=window)
        return self._of_pixels(pixels)

    def _of_file(self, path: Path) -> tuple[Tensor, Size, Pixels | None]:
        if not self.takes_events:
            if is_recording(path.name):
                raise UserError(f"{path}: is a recording of events; the run was trained on images.")
            return self._of_pixels(file_pixels(path, self.data))
        if is_image(path.name):
            raise UserError(
                f"{path}: is an image; the run was trained on recordings of events (.npz, .aedat)."
            )
        return self._normalised(read_file(path, self.data, self.image_size)), self.image_size, None

    def _of_pixels(self, pixels: Pixels) -> tuple[Tensor, Size, Pixels | None]:
        return self.prepare(pixels), (pixels.shape[-2], pixels.shape[-1]), pixels

    def _as_prepared(self, given: Tensor) -> tuple[Tensor, Size, Pixels | None]:
        """Take what `transform` returned, by its shape."""
        frames = (self.data.time_steps,) if self.takes_events else ()
        shape = (*frames, self.data.in_chans, *self.image_size)
        kept = len(shape) - 2 if self.data.listed else len(shape)
        if given.ndim != len(shape) or tuple(given.shape[:kept]) != shape[:kept]:
            raise UserError(
                f"a float tensor of shape {tuple(given.shape)}: the model takes {list(shape)}, as "
                "transform() returns it. Give pixels as uint8."
            )
        return given.float(), (given.shape[-2], given.shape[-1]), None


def published(given: object, network: nn.Module) -> tuple[ModelFacts, DataRecord | None]:
    """Return what may be published of a model, and of its data at the size that it sees images."""
    if not isinstance(given, TrainedModel):
        return said_by(network)
    record = replace(public_record(given.data), image_size=given.image_size)
    if isinstance(given.source, Shipped):
        return given.source.facts.model, record
    return public_model(given.recipe.model), record


@checked
def load(
    run: Run | str | Path,
    *,
    which: Which = "last",
    image_size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    time_steps: int | None = None,
    overlap: float | None = None,
    flips: Flips | None = None,
) -> TrainedModel:
    """Load a trained run, or what was exported or pushed, ready to predict.

    `keymix.load_run` opens the folder alone, of runs that are not finished too. An exported file
    is as it was exported: of the options it takes ``image_size``, if its size is dynamic. What was
    pushed is a model as a run's is, with one set of weights; nothing in its folder runs.

    Args:
        run: The run's folder: that given as ``--out`` to ``keymix train``, or one of a
            comparison, such as ``keymix-compare/runs/static_key/seed0``; or a file that
            ``keymix export`` wrote, ``.onnx`` or ``.pt2``; or a folder that ``keymix push``
            wrote, or the name ``OWNER/NAME`` of a model on the Hugging Face Hub, one of timm's
            classifiers too; or what `keymix.save_swapped` wrote of a classifier.
        which: Weights of the ``last`` or the ``best`` epoch.
        image_size: As in `evaluate`.
        resize: As in `evaluate`.
        time_steps: As in `evaluate`.
        overlap: As in `evaluate`.
        flips: As in `evaluate`.

    Raises:
        UserError: If it is no run's folder (of a comparison's, its runs are named), the weights
            are missing, damaged or unfit, the Hub cannot be reached, or the model, or the memory,
            cannot take the image size or the time steps.

    Example:
        >>> import keymix
        >>> trained = keymix.load("keymix-compare/runs/static_key/seed0")  # doctest: +SKIP
        >>> answer = trained.predict("digit.png")  # doctest: +SKIP
        >>> answer.classes[0], answer.probabilities[0]  # doctest: +SKIP
        ('7', 0.98)
    """
    if not isinstance(run, Run) and is_exported(run):
        given = {"which": None if which == "last" else which, "resize": resize}
        file = _of_exported(Path(run), image_size, {**given, "time_steps": time_steps})
        return replace(file, data=in_windows(file.data, overlap, flips), flips=flips)
    refuse_lone(resize, image_size)
    source: Run | Shipped
    with enough_memory(image_size):
        if not isinstance(run, Run) and is_pushed(run):
            if which != "last":
                raise UserError(
                    f"which={which!r}: {str(run)!r} has one set of weights. Leave it out."
                )
            model, facts, seen = read_pushed(run)
            source = Shipped(str(run), facts)
        else:
            source = run if isinstance(run, Run) else load_run(run)
            model, seen = source.model_and_data(which)
        size = at_size(model, seen, image_size, resize)
        if time_steps is not None:
            take_time_steps(model, time_steps)
        model = model.to(device_of_this_machine())
    seen = in_windows(seen, overlap, flips)
    trained = TrainedModel(source=source, model=model, data=seen, image_size=size, flips=flips)
    if time_steps is None or not trained.takes_events:
        return trained
    return replace(trained, data=replace(seen, time_steps=time_steps))


def _of_exported(
    path: Path, image_size: int | Size | None, fixed: Mapping[str, object]
) -> TrainedModel:
    """Open an exported file; what is `fixed` in it cannot be asked for."""
    model, facts = read_exported(path)
    for name, value in fixed.items():
        if value is not None:
            raise UserError(f"{name}={value!r}: {str(path)!r} is as it was exported. Leave it out.")
    if facts.data is None:
        raise UserError(
            f"{str(path)!r} was exported from a model in memory that does not say its classes and "
            "preprocessing: run it in ONNX Runtime or PyTorch, or export a run"
        )
    size = size_for(path, facts, image_size, facts.data.image_size)
    file = Shipped(str(path), facts)
    return TrainedModel(source=file, model=model.eval(), data=facts.data, image_size=size)


@checked
def predict(
    run: Run | str | Path,
    paths: Picture | Sequence[Picture],
    *,
    which: Which = "last",
    top: int = 5,
    image_size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    time_steps: int | None = None,
) -> list[Prediction]:
    """Say what a run answers to files, such as the classes of images.

    A broken file gets its error as an answer; the others are answered. `keymix.load` keeps the
    model for more, and `keymix.predict_masks` writes masks into a folder.

    Args:
        run: The run, or its folder; or what was exported or pushed.
        paths: Files, folders or images in memory, as `TrainedModel.predict` takes them; recordings
            of events for a run on those.
        which: Weights of the ``last`` or the ``best`` epoch.
        top: How many classes to name for an image.
        image_size: As in `evaluate`.
        resize: As in `evaluate`.
        time_steps: As in `evaluate`.

    Returns:
        Predictions of the run's task, as `TrainedModel.predict` returns them.

    Raises:
        UserError: If a path does not exist, the weights are unfit, or the model, or the memory,
            cannot take the image size or the time steps.
    """
    trained = load(run, which=which, image_size=image_size, resize=resize, time_steps=time_steps)
    found = trained.predict(paths, top=top)
    return found if isinstance(found, list) else [found]
