# SPDX-License-Identifier: Apache-2.0
"""``keymix.export``: a model as a file, which is written only after it computed the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix._version import __version__
from keymix.analysis.counting import default_input_size
from keymix.analysis.images import Images, Model, one_batch
from keymix.analysis.measure import measure_interleaved
from keymix.analysis.threads import use_threads
from keymix.arguments import checked, module_of, opened
from keymix.data.dataset import ImageData
from keymix.data.record import DataRecord
from keymix.data.sample import Size
from keymix.errors import Attempt, UserError, reason
from keymix.export import program
from keymix.export.int8 import KeepFloat, Quantiser
from keymix.export.result import Backend, Check, Exported
from keymix.models.detectors import Detector, padded
from keymix.records import to_json
from keymix.train import files
from keymix.train.evaluation import data_for
from keymix.train.exported import (
    ENDINGS,
    PARTS,
    FileFacts,
    FileModel,
    Format,
    ModelFacts,
    Precision,
    check_packages,
    quiet,
    read_exported,
)
from keymix.train.predict import TrainedModel, published
from keymix.train.runs import Run

Dynamic = Literal["batch", "size"]
BATCHES = (1, 3)
"""Images of the batches that a file is checked on."""
TIMED = 32
"""Images of the larger batch that is timed."""
TOLERANCE: Mapping[Precision, float] = {"32": 1e-4, "16": 2e-2, "8": 1.0}
"""Largest difference of outputs, as a share of the largest: rounding in another order, and in 11
bits. Layers that are left out or another way to pad move outputs by far more. What 8 bits cost is
measured on the test split."""
_RUNS_IN: Mapping[Format, str] = {
    "onnx": "ONNX Runtime",
    "torch": "torch.export",
    "openvino": "OpenVINO",
}
_EIGHT = "8 bits"


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
    splits: ImageData | None = None  # the run's data, where it was loaded

    @property
    def size(self) -> Size:
        """Height and width of the images."""
        return self.images.shape[-2], self.images.shape[-1]

    def at(self, size: Size) -> nn.Module:
        """Return the model for images of a size."""
        own = size == self.size and self.resize is None
        return self.model if own else program.at(self.model, size, self.resize)

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
    int8: bool = False,
    keep_float: KeepFloat = (),
    measure: bool = False,
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
        path: The file: ``.onnx``, ``.pt2`` or ``.xml``.
        format: ``onnx``, ``torch`` for a file of ``torch.export``, ``openvino`` for OpenVINO's
            ``.xml`` with its ``.bin``.
        dynamic: ``batch`` for batches of any number of images, ``size`` for images of other sizes
            too; None for single images of one size.
        half: Compute in 16 bits; inputs and outputs keep 32.
        int8: Compute linear maps and convolutions of a run in 8 bits, calibrated on 128 training
            images, and score the file on the test split, next to the float one.
        keep_float: With ``int8``, blocks that stay in float, such as ``blocks.0``; ``"auto"``
            chooses them where 8 bits cost more than one point.
        measure: Time the model in PyTorch and as a file, one image and 32, all in turns.
        resize: Where sizes are dynamic, the policy of mixers that hold something per position,
            ``"interpolate"``, in place of their own.
        images: Those it is checked on, two or more, as `keymix.attention_maps` takes them; None for
            images of the run's validation split. Of a model in memory these are random numbers.
        overwrite: Replace a file that is there.

    Returns:
        The checks and facts of the file; it prints in a few lines.

    Raises:
        UserError: If the file cannot be written, a package is missing, options exclude each other,
            the model or its mixers cannot be exported, its outputs do not vary from image to image,
            or the file computes something else.
    """
    path = Path(path)
    _check_path(path, format, overwrite=overwrite)
    if format != "torch":
        packages = ("onnx", "onnxscript", "onnxruntime", "openvino")
        check_packages(*packages[: 4 if format == "openvino" else 3], extra=format)
    if int8 and (half or format == "torch"):
        other = "half=True" if half else f"format={format!r}"
        raise UserError(f"int8=True and {other} exclude each other: leave one out")
    if keep_float and not int8:
        raise UserError(f"keep_float={keep_float!r} is of 8 bits: give int8=True (--int8) too")
    if resize is not None and dynamic != "size":
        raise UserError(f"resize={resize!r} acts on images of other sizes: give dynamic='size' too")
    precision: Precision = "8" if int8 else "16" if half else "32"
    given = opened(model)
    trained = given if isinstance(given, TrainedModel) else None
    subject = _subject(given, images, resize, TOLERANCE["16" if half else "32"])
    if int8 and (trained is None or subject.facts.levels or not isinstance(trained.source, Run)):
        raise UserError(
            "int8=True needs a run of classes or masks: its training images for ranges, its test "
            "images for scores"
        )
    _refuse_constant(subject)

    step, sizes, example = None, [subject.size], subject.images[:2]
    made = copy.deepcopy(subject.model)
    if dynamic == "size":
        program.follow_size(made, resize)
        step = program.step_of(subject.model, subject.size, resize)
        sizes.append(program.larger(subject.size, step))
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
        precision="16" if half else "32",
    )
    written = program.torch_file if format == "torch" else program.onnx_file
    content, nodes = written(trace, json.dumps(to_json(facts)))
    floats = _opened(path, content)
    batches = [*BATCHES] if dynamic else 1
    checks = _checks(subject, floats, sizes, batches)

    timed, cost = {_RUNS_IN[format]: (path, content)}, None
    if measure and format == "onnx" and find_spec("openvino") is not None:
        timed[_RUNS_IN["openvino"]] = (path.with_suffix(".xml"), content)
    scores: dict[str, float | None] = {}
    if int8 and trained is not None:
        quantiser = Quantiser(
            content=content,
            metadata=json.dumps(to_json(replace(facts, precision="8"))),
            trained=trained,
            data=subject.splits or _data_of(trained),
            opened=partial(_opened, path),
            batch=bool(dynamic),
        )
        content, nodes, cost = quantiser.quantised(keep_float)
        timed[_EIGHT] = (path, content)
        scores = {_RUNS_IN[format]: cost.before, _EIGHT: cost.after}
        eight = _opened(path, content)
        checks = _checks(replace(subject, limit=TOLERANCE["8"]), eight, sizes, batches)
    backends = _timed(subject, timed, scores, memory=measure) if measure or int8 else ()
    return Exported(
        file=path,
        format=format,
        precision=precision,
        bytes=_write(path, _parts(format, content)),
        nodes=nodes,
        batch=facts.batch,
        step=facts.step,
        images=subject.origin,
        checks=checks,
        int8=cost,
        backends=backends,
    )


# ---- files ----------------------------------------------------------------------------------


def _parts(format: Format, content: bytes) -> Mapping[str, bytes]:
    """Return the files of a format, by ending, of the graph that was exported."""
    if format == "openvino":
        return program.openvino_files(content)
    return {PARTS[format][0]: content}


def _opened(path: Path, content: bytes) -> FileModel:
    """Open a graph as the files at a path will be opened."""
    return read_exported(path, _parts(ENDINGS[path.suffix], content))[0]


def _write(path: Path, parts: Mapping[str, bytes]) -> int:
    """Write all files or none, the one that is named last; return their bytes."""
    with ExitStack() as undo:
        for ending, part in reversed([*parts.items()]):
            files.write_bytes(path.with_suffix(ending), part)
            undo.callback(path.with_suffix(ending).unlink, missing_ok=True)
        undo.pop_all()
    return sum(map(len, parts.values()))


def _check_path(path: Path, format: Format, *, overwrite: bool) -> None:
    """Refuse a file that could not be written in the end."""
    ending = PARTS[format][0]
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
    if trained is not None and trained.task.whole_images and not isinstance(model, Detector):
        raise UserError(
            f"{trained.place!r} {trained.task.does}, of images of their own sizes: of such models "
            "detectors of keymix alone are exported"
        )
    facts, record = published(given, model)
    most, splits = sum(BATCHES), None
    if images is not None:
        shown, origin = [*one_batch(images, given)[:most]], "the images that were given"
    elif trained is not None and isinstance(trained.source, Run):
        splits, origin = _for_checks(trained), "images of the run's validation split"
        shown = splits.some(splits.val, most)
    else:
        noise = torch.Generator().manual_seed(0)
        shown = [*torch.randn(most, *default_input_size(model), generator=noise)]
        origin = "random numbers in place of images"
    if len(shown) < 2:
        raise UserError("one image does not show whether outputs vary: give two or more as images=")
    shown = (shown * most)[:most]
    if isinstance(model, Detector):
        shown, model = [*padded(shown)[0]], program.Pyramid(model)
        facts = replace(facts, levels=model.levels)
    return _Subject(
        model=model,
        facts=facts,
        data=record,
        images=torch.stack(shown).cpu(),
        origin=origin,
        resize=resize,
        limit=limit,
        splits=splits,
    )


def _data_of(trained: TrainedModel) -> ImageData:
    """Load a run's data."""
    return data_for(trained.run.recipe.data, trained.data, None, trained.image_size)


def _for_checks(trained: TrainedModel) -> ImageData:
    """Load a run's data, or say how to do without."""
    try:
        return _data_of(trained)
    except UserError as error:
        text = str(error).rstrip(".")
        raise UserError(
            f"{text}; to check the file on other images, give images= (--images)"
        ) from None


# ---- checks ---------------------------------------------------------------------------------


@torch.inference_mode()
def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    found: Any = model(images)
    if isinstance(found, dict) and isinstance(model, program.Pyramid | FileModel):
        found = torch.cat([level.flatten(2) for level in found.values()], 2)
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


def _checks(
    subject: _Subject, file: nn.Module, sizes: Sequence[Size], batches: list[int] | int
) -> tuple[Check, ...]:
    """Compare file and model at each size on each batch, and refuse the file if they differ."""
    found = []
    for size in sizes:
        reference, shown = subject.at(size), _resized(subject.images, size)
        found += [_check(subject, reference, file, each) for each in torch.split(shown, batches)]
    return tuple(found)


def _check(subject: _Subject, reference: nn.Module, file: nn.Module, images: Tensor) -> Check:
    """Compare file and model on a batch, and refuse the file if they differ."""
    batch, (height, width) = len(images), images.shape[-2:]
    wanted, found = _outputs(reference, images), None
    with Attempt() as attempt:
        found = _outputs(file, images)
    where = f"on {batch} image{'s' * (batch != 1)} of {height}x{width}"
    end = "nothing was written"
    end += f"; {program.FIXED}" if (height, width) != subject.size else ""
    if found is None:
        why = reason(attempt.error or RuntimeError())
        raise UserError(f"the exported file fails {where} ({why}): {end}")
    difference = _difference(found, wanted)
    if not difference <= subject.limit:
        raise UserError(
            f"the exported file computes something else {where}: outputs differ by "
            f"{difference:.1e} of the largest one, more than {subject.limit:g}; {end}"
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


# ---- times ----------------------------------------------------------------------------------


def _in_memory(subject: _Subject) -> dict[str, nn.Module]:
    """Return the model as PyTorch runs it, and compiled where that can be done here."""
    compiled: Any = torch.compile(copy.deepcopy(subject.model))
    with quiet(), Attempt() as attempt:
        _outputs(compiled, subject.images)
    more = {"PyTorch, compiled": compiled} if attempt.error is None else {}
    return {"PyTorch": subject.model, **more}


def _timed(
    subject: _Subject,
    contents: Mapping[str, tuple[Path, bytes]],
    scores: Mapping[str, float | None],
    *,
    memory: bool,
) -> tuple[Backend, ...]:
    """Time one image and 32, in turns, next to the first.

    On one thread: the idle threads of one library spin, and would slow the next one.
    """
    with use_threads(1), quiet():
        models = _in_memory(subject) if memory else {}
        models |= {name: _opened(*each) for name, each in contents.items()}
        size, first = subject.images.shape[1:], next(iter(models))
        found = measure_interleaved(models, size, batch_size=TIMED, baseline=first)
    return tuple(
        Backend(
            name=name,
            bytes=getattr(models[name], "bytes", None),
            score=scores.get(name),
            alone_ms=cost.latency_ms,
            batch_ms=1e3 * TIMED / cost.images_per_s,
            against="" if cost.against is None else cost.against.ratio_text(),
        )
        for name, cost in found.items()
    )
