# SPDX-License-Identifier: Apache-2.0
"""``keymix.export``: a model as a file, which is written only after it computed the same."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix._version import __version__
from keymix.analysis.counting import default_input_size
from keymix.analysis.images import Images, Model, one_batch
from keymix.arguments import checked, module_of, opened
from keymix.data.record import DataRecord
from keymix.data.sample import Size
from keymix.errors import Attempt, UserError, reason
from keymix.export import program
from keymix.export.result import Check, Exported
from keymix.records import to_json
from keymix.train import files
from keymix.train.evaluation import data_for
from keymix.train.exported import (
    ENDINGS,
    FileFacts,
    Format,
    ModelFacts,
    check_packages,
    read_exported,
)
from keymix.train.predict import TrainedModel, published
from keymix.train.runs import Run

Dynamic = Literal["batch", "size"]
BATCHES = (1, 3)
"""Images of the batches that a file is checked on."""
TOLERANCE = {"32": 1e-4, "16": 2e-2}
"""Largest difference of outputs, as a share of the largest: rounding in another order, and in 11
bits. Layers that are left out or another way to pad move outputs by far more."""


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is exported: a model in eval mode on the CPU, and what is known of it."""

    model: nn.Module
    facts: ModelFacts
    data: DataRecord | None
    images: Tensor  # those that it is checked on, as it takes them
    origin: str  # where these come from, in words
    resize: str | None  # what mixers do at other sizes
    limit: float  # how far outputs may differ

    @property
    def size(self) -> Size:
        """Height and width of the images."""
        return self.images.shape[-2], self.images.shape[-1]

    def at(self, size: Size) -> nn.Module:
        """Return the model for images of a size."""
        return self.model if size == self.size else program.at(self.model, size, self.resize)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return what outputs mean: a class for each image or pixel, or several."""
        several = self.data is not None and self.data.multilabel
        return outputs > 0 if several else outputs.argmax(1)


@checked
def export(
    model: Model | Run,
    path: str | Path,
    *,
    format: Format = "onnx",
    dynamic: Dynamic | None = "batch",
    half: bool = False,
    resize: str | None = None,
    images: Images | None = None,
    overwrite: bool = False,
) -> Exported:
    """Export a model as a file that runs without keymix, and check it before it is written.

    It is folded for inference first. The file must give what the model gives, on batches of 1 and 3
    images, at another size too where sizes are dynamic; else nothing is written. ``keymix.load``
    opens the file as it opens a run.

    Args:
        model: The folder of a run, what `keymix.load` returns, or any model; it is not changed.
        path: The file, ``.onnx`` or ``.pt2``.
        format: ``onnx``, or ``torch`` for a file of ``torch.export``.
        dynamic: ``batch`` for batches of any number of images, ``size`` for images of other sizes
            too; None for single images of one size.
        half: Compute in 16 bits; inputs and outputs keep 32.
        resize: Where sizes are dynamic, the policy of mixers that hold something per position,
            ``"interpolate"``, in place of their own.
        images: Those it is checked on, two or more, as `keymix.attention_maps` takes them; None for
            images of the run's validation split. Of a model in memory these are random numbers.
        overwrite: Replace a file that is there.

    Returns:
        The checks and facts of the file; it prints in a few lines.

    Raises:
        UserError: If the file cannot be written, a package is missing, the model or its mixers
            cannot be exported, its outputs do not vary from image to image, or the file computes
            something else.
    """
    path = Path(path)
    _check_path(path, format, overwrite=overwrite)
    if format == "onnx":
        check_packages("onnx", "onnxscript", "onnxruntime")
    if resize is not None and dynamic != "size":
        raise UserError(f"resize={resize!r} acts on images of other sizes: give dynamic='size' too")
    precision: Literal["32", "16"] = "16" if half else "32"
    subject = _subject(opened(model), images, resize, TOLERANCE[precision])
    _refuse_constant(subject)

    step, sizes, example = None, [subject.size], subject.images[:2]
    made = copy.deepcopy(subject.model)
    if dynamic == "size":
        step = program.step_of(made, subject.size, resize)
        sizes.append(program.larger(subject.size, step))
        program.follow_size(made, resize)
        height, width = subject.size
        # other numbers than those of the model, so that none of them is taken for fixed
        example = _resized(example, (2 * height, 3 * width))
        _refuse_fixed(subject, made, example)
    example = example if dynamic else example[:1]
    made = program.for_inference(made, half=half)
    trace = program.traced(made, example, batch=bool(dynamic), sides=step is not None)
    facts = FileFacts(
        keymix=__version__,
        torch=torch.__version__,
        model=subject.facts,
        data=subject.data,
        batch=bool(dynamic),
        step=None if step is None else (step, step),
        precision=precision,
    )
    written = program.onnx_file if format == "onnx" else program.torch_file
    content, nodes = written(trace, json.dumps(to_json(facts)))

    found, _ = read_exported(path, content)
    checks = []
    for size in sizes:
        reference, shown = subject.at(size), _resized(subject.images, size)
        batches = torch.split(shown, [*BATCHES] if dynamic else 1)
        checks += [_check(subject, reference, found, batch) for batch in batches]
    files.write_bytes(path, content)
    return Exported(
        file=path,
        format=format,
        half=half,
        bytes=len(content),
        nodes=nodes,
        batch=facts.batch,
        step=facts.step,
        images=subject.origin,
        checks=tuple(checks),
    )


def _check_path(path: Path, format: Format, *, overwrite: bool) -> None:
    """Refuse a file that could not be written in the end."""
    ending = next(ending for ending, each in ENDINGS.items() if each == format)
    if path.suffix != ending:
        raise UserError(f"path={str(path)!r}: a file of format {format!r} ends in {ending}")
    if path.exists() and not (overwrite and path.is_file()):
        remedy = "name another, or replace it with overwrite=True (--overwrite)"
        raise UserError(f"path={str(path)!r} exists: {remedy if path.is_file() else 'name a file'}")
    part = files.part_of(path)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise files.write_error(path, error) from None


# ---- what is exported -----------------------------------------------------------------------


def _subject(given: object, images: Images | None, resize: str | None, limit: float) -> _Subject:
    """Take a model, or what `keymix.load` returns, and the images that it is checked on."""
    model = copy.deepcopy(module_of(given)).cpu().float().eval()
    trained = given if isinstance(given, TrainedModel) else None
    if trained is not None and trained.task.whole_images:
        raise UserError(
            f"{trained.place!r} {trained.task.does}, of images of their own sizes: such models are "
            "not exported yet"
        )
    facts, record = published(given, model)
    most = sum(BATCHES)
    if images is not None:
        shown, origin = one_batch(images, given)[:most], "the images that were given"
    elif trained is not None and isinstance(trained.source, Run):
        shown, origin = _validation(trained, most), "images of the run's validation split"
    else:
        noise = torch.Generator().manual_seed(0)
        shown = torch.randn(most, *default_input_size(model), generator=noise)
        origin = "random numbers in place of images"
    if len(shown) < 2:
        raise UserError("one image does not show whether outputs vary: give two or more as images=")
    shown = torch.cat([shown] * most)[:most] if len(shown) < most else shown
    return _Subject(
        model=model,
        facts=facts,
        data=record,
        images=shown.cpu(),
        origin=origin,
        resize=resize,
        limit=limit,
    )


def _validation(trained: TrainedModel, most: int) -> Tensor:
    """Read some images of the validation split, as the model takes them."""
    run = trained.run
    try:
        data = data_for(run.recipe.data, trained.data, None, trained.image_size)[0]
    except UserError as error:
        text = str(error).rstrip(".")
        raise UserError(
            f"{text}; to check the file on other images, give images= (--images)"
        ) from None
    split, number = data.val, min(most, len(data.val))
    rows = [i * len(split) // number for i in range(number)]
    return data.prepared(torch.stack([split.read(i) for i in rows]))


# ---- checks ---------------------------------------------------------------------------------


@torch.inference_mode()
def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    found: Any = model(images)
    if not isinstance(found, Tensor):
        raise UserError(
            f"the model returns {type(found).__name__}: only models that return one tensor are "
            "exported"
        )
    return found.float()


def _resized(images: Tensor, size: Size) -> Tensor:
    """Resize prepared images, ``[B, C, H, W]`` or frames ``[B, T, C, H, W]``."""
    if images.shape[-2:] == size:
        return images
    flat = F.interpolate(images.flatten(0, -4), size, mode="bilinear", align_corners=False)
    return flat.reshape(*images.shape[:-2], *size)


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, as a share of the largest output that is wanted."""
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _refuse_constant(subject: _Subject) -> None:
    """Refuse outputs that are alike for all images: equal ones of a file would prove nothing."""
    outputs = _outputs(subject.model, subject.images)
    if not bool(torch.isfinite(outputs).all()):
        raise UserError("the model's outputs are NaN or infinite: train it again before its export")
    if _difference(outputs[:1].expand_as(outputs), outputs) <= subject.limit:
        raise UserError(
            "the model's outputs do not vary from image to image, so that equal outputs of the "
            "file would prove nothing: train it first (a spiking model that has seen no training "
            "batch is silent), or give images that differ as images= (--images)"
        )


def _refuse_fixed(subject: _Subject, made: nn.Module, images: Tensor) -> None:
    """Refuse dynamic sizes of a model that holds its grid; before the long work of a trace."""
    height, width = images.shape[-2:]
    wanted = _outputs(subject.at((height, width)), images)
    found = None
    with Attempt() as attempt:
        found = _outputs(made, images)
    why = f"outputs at {height}x{width} are others" if found is not None else ""
    why = why or reason(attempt.error or RuntimeError())
    if found is None or _difference(found, wanted) > subject.limit:
        raise UserError(
            f"{type(made).__name__} does not follow the size of its images batch by batch ({why}): "
            f"{program.FIXED}"
        )


def _check(subject: _Subject, reference: nn.Module, file: nn.Module, images: Tensor) -> Check:
    """Compare file and model on a batch, and refuse the file if they differ."""
    batch, (height, width) = len(images), images.shape[-2:]
    wanted, found = _outputs(reference, images), None
    with Attempt() as attempt:
        found = _outputs(file, images)
    where = f"on {batch} image{'s' * (batch != 1)} of {height}x{width}"
    if found is None:
        why = reason(attempt.error or RuntimeError())
        raise UserError(f"the exported file fails {where} ({why}): nothing was written")
    difference = _difference(found, wanted)
    if not difference <= subject.limit:
        raise UserError(
            f"the exported file computes something else {where}: outputs differ by "
            f"{difference:.1e} of the largest one, more than {subject.limit:g}; nothing was written"
        )
    same = subject.answers(found) == subject.answers(wanted)
    return Check(
        batch=batch,
        height=height,
        width=width,
        difference=difference,
        same=int(same.sum()),
        answers=same.numel(),
    )
