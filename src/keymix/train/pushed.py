# SPDX-License-Identifier: Apache-2.0
"""Folders in timm's layout, on this disk or the Hub, and swapped models, in place of a run.

``config.json`` is timm's, and has keymix's record under the key ``keymix``. Weights are opened
without unpickling, and the architecture is one that this process knows: no code of a folder runs.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from keymix._version import __version__
from keymix.data.record import DataRecord
from keymix.errors import Attempt, UserError, reason
from keymix.models.pretrained import from_hub
from keymix.models.swapped import is_swapped, load_swapped
from keymix.records import from_json
from keymix.train import files
from keymix.train.exported import KEY, FileFacts, ModelFacts, quiet, said_by
from keymix.train.folder import holds_run

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_OF_DATA = ("img_size", "in_chans", "num_classes")
NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Of a model on the Hub."""


def is_pushed(place: str | Path) -> bool:
    """Whether something names a model that was pushed, a folder or on the Hub, or swapped."""
    path = Path(place)
    if path.is_file():
        return is_swapped(path)
    if path.exists():
        return (path / CONFIG).is_file() and not holds_run(path)
    return NAME.fullmatch(str(place)) is not None and path.parts[0] not in (".", "..")


def facts_of(model: ModelFacts, data: DataRecord | None) -> FileFacts:
    """Let a model that is pushed, or lies in timm's layout, say what exported files say."""
    return FileFacts(keymix=__version__, torch=torch.__version__, model=model, data=data)


def rebuilt(folder: Path, failed: str) -> nn.Module:
    """Build the model of a folder as timm does, in eval mode, or say why that failed."""
    importlib.import_module("keymix.models")  # registers them
    model: nn.Module | None = None
    with quiet(), torch.random.fork_rng(devices=[]), Attempt() as attempt:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    if model is None:
        raise UserError(f"{failed} ({reason(attempt.error or RuntimeError())})")
    return model


def read_pushed(place: str | Path) -> tuple[nn.Module, FileFacts, DataRecord]:
    """Open what was pushed: the model in eval mode, what its folder says, and its data's record."""
    path, where = Path(place), repr(str(place))
    stored, config = None, dict[str, Any]()
    if path.is_file():
        model = load_swapped(path)
    else:
        folder = path if path.exists() else from_hub(str(place), [WEIGHTS, CONFIG])
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                pickled = name == WEIGHTS
                why = "; weights in another format might run code and are not opened" * pickled
                raise UserError(f"{where} has no {name}{why}: push the model with `keymix push`")
        config = files.read_json(folder / CONFIG)
        stored = config.get(KEY)
        model = rebuilt(folder, f"{where} cannot be loaded")
    facts = None if stored is None else from_json(FileFacts, stored, where=f"{CONFIG} of {where}")
    if facts is None:
        said, data = said_by(model)
        given: dict[str, Any] = config.get("model_args") or {}  # as timm writes it
        options = {name: value for name, value in given.items() if name not in _OF_DATA}
        facts = facts_of(replace(said, options=options), data)
    if facts.data is None:
        raise UserError(
            f"{where} does not say its classes and preprocessing: load the model with "
            "timm.create_model, or what was swapped with keymix.load_swapped"
        )
    return model, facts, facts.data
