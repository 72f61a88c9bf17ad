# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a state dict, a file, a run's folder."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import clean_state_dict, load_state_dict
from torch import Tensor

from keymix.errors import UserError, one_line
from keymix.mixers.base import Grid
from keymix.models.preprocessing import Config, preprocessing_of
from keymix.records import from_json
from keymix.weights_file import unpacked

_LIGHTNING = "model."
_LAST = "weights_last.safetensors"  # of a run's folder
_WANTED = "give model.state_dict(), a file or a run's folder"
_KINDS = "a .safetensors or .pth file of tensors"
_FAILURES = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights as they were read: tensors by name, and what errors call them.

    Where a run wrote them: height and width of its images in pixels, and how these were shown (as
    ``pretrained_cfg`` has it).
    """

    tensors: dict[str, Tensor]
    called: str
    img_size: Grid | None = None
    shown: Config | None = None


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What weights say of a run's data."""

    image_size: tuple[int, int]
    classes: tuple[str, ...]
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    task: str


def read_source(source: str | Path | Mapping[str, Any]) -> Source:
    """Read weights: a state dict, a file of tensors, or a run's folder; refuse anything else."""
    if isinstance(source, Mapping):
        called = "the state dict"
        return Source(tensors=_tensors(source, called), called=called)
    if not isinstance(source, str | Path) or not str(source).strip():
        what = repr(source) if isinstance(source, str) else f"a {type(source).__name__}"
        raise UserError(f"weights are {what}, no source of tensors; {_WANTED}")
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / _LAST).is_file():
            raise UserError(
                f"weights {str(source)!r}: this folder is no run's, or of a run without a finished "
                f"epoch: it holds no {_LAST}; name a run's folder, or {_KINDS}"
            )
        path = path / _LAST
    called = f"weights {str(path)!r}"
    if not path.is_file():
        raise UserError(f"{called}: no such file")
    try:
        _check_kind(path)
        content, facts = _read(path)
        size, shown = _trained_at(facts)
    except _FAILURES as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "weights_only" in str(error):  # advice to run what a pickle holds
            reason = "it holds more than tensors, which is not read; save model.state_dict()"
        raise UserError(f"{called} are damaged, or no {_KINDS[2:]}: {one_line(reason)}") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{called} hold a {type(content).__name__}; save model.state_dict()")
    return Source(tensors=_tensors(content, called), called=called, img_size=size, shown=shown)


def unwrapped(tensors: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Leave out the prefix of a LightningModule's ``self.model``, unless a model has it itself."""
    inside = all(name.startswith(_LIGHTNING) for name in tensors)
    if not inside or any(name.startswith(_LIGHTNING) for name in own):
        return tensors
    bare: dict[str, Tensor] = {n.removeprefix(_LIGHTNING): t for n, t in tensors.items()}
    return dict(clean_state_dict(bare))


def _check_kind(path: Path) -> None:
    """Refuse what begins like no file of tensors, before a reader guesses at it."""
    with path.open("rb") as stream:
        start = stream.read(4)
    if path.suffix == ".safetensors" or start.startswith((b"PK", b"\x80")):
        return
    if path.suffix == ".json" and (path.parent / _LAST).is_file():
        raise ValueError(f"name the run's folder {str(path.parent)!r}, or its {_LAST}")
    raise ValueError(f"it begins with {start!r}; name a file that torch.save or safetensors wrote")


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read a file of tensors, and what a run says of itself in it; nothing where none wrote it."""
    if path.suffix != ".safetensors":
        return load_state_dict(str(path)), {}
    state, facts = unpacked(path)
    return state, facts or {}


def _trained_at(facts: Mapping[str, Any]) -> tuple[Grid | None, Config | None]:
    """Return height and width of a run's images, and how they were shown; None of other weights."""
    if not facts:
        return None, None
    data = from_json(_Shown, facts["data"], where="the record of its data")
    return data.image_size, preprocessing_of(data)


def _tensors(content: Mapping[Any, Any], called: str) -> dict[str, Tensor]:
    """Check that all are tensors by name."""
    tensors: dict[str, Tensor] = {}
    strange = next((key for key in content if not isinstance(key, str)), None)
    if strange is not None:
        raise UserError(
            f"{called}: the key {one_line(repr(strange))} is no name of a tensor; give what "
            "model.state_dict() gives"
        )
    for name, value in clean_state_dict(dict(content)).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values()):
            raise UserError(
                f"{called}: {one_line(name)!r} is a dict of tensors in a dict; give that one alone"
            )
        elif not name.endswith("_extra_state") and any(
            isinstance(v, Tensor) for v in content.values()
        ):
            raise UserError(
                f"{called}: {one_line(name)!r} is a {type(value).__name__}, no tensor; give what "
                "model.state_dict() gives"
            )
    if not tensors:
        some = next(iter(content), None)
        found = "" if some is None else f"; {one_line(some)!r} is a {type(content[some]).__name__}"
        raise UserError(f"{called}: no tensors in it{found}; give what model.state_dict() gives")
    return tensors
