# SPDX-License-Identifier: Apache-2.0
"""Exported files: what they say of themselves, and how they run in place of a run's model.

A file has one JSON text under the key ``keymix``: in the ``metadata_props`` of ONNX, in the extra
files of PyTorch's ``.pt2``. Nothing of it is a path, a name of a file or of a patient.
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keymix.analysis.images import View
from keymix.arguments import whole_size
from keymix.data.record import DataRecord
from keymix.data.sample import Size
from keymix.errors import Attempt, UserError, reason
from keymix.models.arguments import OF_WEIGHTS
from keymix.records import from_json
from keymix.task import DEFAULT
from keymix.train.recipe import ModelConfig

Format = Literal["onnx", "torch"]
ENDINGS: Mapping[str, Format] = {".onnx": "onnx", ".pt2": "torch"}
KEY = "keymix"
Call = Callable[[Tensor], Tensor]
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
_PARTS = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/\w+|extra/keymix|models/model\.json"
    r"|data/sample_inputs/model\.pt|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json))"
)
"""Parts of PyTorch's archive without code: others hold compiled libraries and pickles."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was exported: the recipe's model without anything that may be a path."""

    name: str
    mixer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What an exported file, or a model that was pushed, says of itself.

    Args:
        keymix: Version of keymix.
        torch: Version of PyTorch.
        model: The model.
        data: What it was trained on: classes, preprocessing, task; None of a module in memory that
            does not say it.
        batch: Whether a batch may have any number of images; else it is one.
        step: Height and width may be any multiples of these; None where they are fixed.
        precision: Bits of the numbers inside; inputs and outputs have 32.
        format: Number of this format.
    """

    keymix: str
    torch: str
    model: ModelFacts
    data: DataRecord | None
    batch: bool = True
    step: Size | None = None
    precision: Literal["32", "16"] = "32"
    format: int = 1


@dataclass(frozen=True)
class Shipped:
    """Where a model was loaded from, in place of a run: a file, a folder, or a name on the Hub."""

    place: str
    facts: FileFacts


def public_record(data: DataRecord) -> DataRecord:
    """Return a record without what may be a path, or name a file or a patient.

    Of the spec the kind of source stays, of images that were left out their number. Names of
    classes stay: they are the answers.
    """
    kind = data.spec.partition(":")[0]
    return replace(data, spec=kind, unfit=None, notes=(), left_out=())


def public_model(config: ModelConfig) -> ModelFacts:
    """Return name, mixer and options of a model, without options that may be paths."""
    given = config.options.items()
    options = {k: each for k, each in given if k not in OF_WEIGHTS and not may_be_path(each)}
    name = re.split(r"[/\\]", config.name)[-1]
    return ModelFacts(name=name, mixer=config.mixer, options=options)


def may_be_path(value: object) -> bool:
    """Whether a value, or one inside it, may name a file."""
    return any(mark in json.dumps(value, default=str) for mark in "/\\")


def said_by(model: nn.Module) -> tuple[ModelFacts, DataRecord | None]:
    """Return what a model in memory says of itself: its name, and what it was trained on."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = str(cfg.get("architecture") or type(model).__name__)
    return ModelFacts(name=name), _record_of(model)


def _record_of(model: nn.Module) -> DataRecord | None:
    """Say of a classifier what it was trained on, as far as it says so itself."""
    cfg = getattr(model, "pretrained_cfg", None)
    number = getattr(model, "num_classes", 0)
    if not cfg or not number or getattr(model, "task", DEFAULT) != DEFAULT:
        return None
    view, names = View.of(model), cfg.get("label_names") or ()
    return DataRecord(
        spec="unknown",
        classes=tuple(names) if len(names) == number else tuple(map(str, range(number))),
        image_size=view.size,
        in_chans=view.in_chans,
        mean=view.mean,
        std=view.std,
        crop_pct=view.crop_pct,
        cached=False,
        sizes={"train": 0, "val": 0, "test": 0},
        index_sha256={"train": "", "val": "", "test": ""},
        task=DEFAULT,
    )


def is_exported(path: object) -> bool:
    """Whether something names an exported file, be it there or not."""
    return isinstance(path, str | Path) and (
        Path(path).suffix in ENDINGS and not Path(path).is_dir()
    )


def check_packages(*modules: str) -> None:
    """Refuse ONNX where what it needs is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UserError(
            f"ONNX files need {' and '.join(missing)}: install it with `pip install 'keymix[onnx]'`"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Let exporters and readers say nothing: what came out is checked."""
    before, said = logging.root.manager.disable, io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(said), redirect_stderr(said):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


class FileModel(nn.Module):
    """Runs an exported file as a model: a batch in, what the run's model gives out."""

    def __init__(self, call: Call, where: str, *, batch: bool) -> None:
        super().__init__()
        self.where, self.batch = where, batch
        self.call = (call,)  # no submodule: an exported program refuses eval()

    def forward(self, images: Tensor) -> Tensor:
        """Run the file, one by one where it takes single images."""
        parts = (images,) if self.batch else torch.split(images, 1)
        return torch.cat([self.call[0](part.float().cpu()) for part in parts]).to(images.device)

    def __deepcopy__(self, memo: object) -> FileModel:
        raise UserError(
            f"{self.where} is an exported file: it answers images, and its layers cannot be "
            "changed or looked into; name the run that it came from"
        )


def read_exported(path: Path, content: bytes | None = None) -> tuple[FileModel, FileFacts]:
    """Open an exported file, or the content of one that is not written yet."""
    where, kind = repr(str(path)), ENDINGS[path.suffix]
    if content is None:
        if not path.is_file():
            raise UserError(f"there is no file {where}: name what `keymix export` wrote.")
        content = path.read_bytes()
    if kind == "onnx":
        check_packages("onnxruntime")
    opened: tuple[Call, str | None] | None = None
    with quiet(), Attempt() as attempt:
        opened = _onnx(content) if kind == "onnx" else _torch(content)
    if opened is None:
        why = reason(attempt.error) if attempt.error else "nothing was read"
        raise UserError(f"{where} is damaged, or no file of this kind ({why}): export it again")
    call, text = opened
    if not text:
        raise UserError(
            f"{where} was not exported by keymix: it does not say its classes and preprocessing. "
            "Export the run with `keymix export`, or run the file in ONNX Runtime or PyTorch."
        )
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is damaged ({error}): export it again") from None
    facts = from_json(FileFacts, values, where=where)
    return FileModel(call, where, batch=facts.batch), facts


def _onnx(content: bytes) -> tuple[Call, str | None]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    there = onnxruntime.get_available_providers()
    providers = [name for name in _PROVIDERS if name in there]
    session = onnxruntime.InferenceSession(content, options, providers=providers)
    name = session.get_inputs()[0].name

    def call(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    return call, session.get_modelmeta().custom_metadata_map.get(KEY)


def _torch(content: bytes) -> tuple[Call, str | None]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            known = _PARTS.fullmatch(name)
            inputs = "/sample_inputs/" in name and archive.getinfo(name).file_size
            pickled = name.endswith("_config.json") and any(
                part["use_pickle"] for part in json.loads(archive.read(name))["config"].values()
            )
            if not known or inputs or pickled:
                raise UserError(f"its part {name!r} might run code, and keymix writes no such part")
    extra: dict[str, Any] = {KEY: ""}
    program = torch.export.load(io.BytesIO(content), extra_files=extra)
    text = extra[KEY]
    return program.module().forward, text.decode() if isinstance(text, bytes) else text


def size_for(path: Path, facts: FileFacts, image_size: int | Size | None, own: Size) -> Size:
    """Return the height and width at which a file sees images, or refuse those it cannot take."""
    size = own if image_size is None else whole_size("image_size", image_size)
    if size == own:
        return size
    if facts.step is None:
        raise UserError(
            f"image_size={image_size!r}: {str(path)!r} takes images of {own[0]}x{own[1]} alone; "
            "export the run again with --dynamic size"
        )
    if any(side % step for side, step in zip(size, facts.step, strict=True)):
        raise UserError(
            f"image_size={image_size!r}: {str(path)!r} takes multiples of "
            f"{facts.step[0]}x{facts.step[1]} pixels"
        )
    return size
