# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder: written whole or not at all, read with one clear error."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from keymix.errors import UserError

RECIPE, ENVIRONMENT, SUMMARY = "recipe.json", "environment.json", "summary.json"
METRICS, PREDICTIONS, CHECKPOINTS = "metrics.jsonl", "predictions_test.npz", "checkpoints"
CHECKPOINTS_KEPT = 2


def weights_file(which: str) -> str:
    """Name of the weights file of the ``last`` or the ``best`` epoch."""
    return f"weights_{which}.safetensors"


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it.

    Args:
        path: The file.
        write: Puts the content into the open file it is given.
    """
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as stream:
        write(stream)
    settle(part, path)


def settle(part: Path, path: Path) -> None:
    """Bring a finished file to the disk and give it its name in one step."""
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a mapping as indented JSON."""
    text = json.dumps(values, indent=2) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping.

    Raises:
        UserError: If the file is missing, damaged or no mapping.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{str(path)!r} is damaged: it holds no mapping.")
    return values


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write named arrays to a compressed ``.npz``."""
    named: dict[str, Any] = dict(arrays)
    write_atomically(path, lambda stream: np.savez_compressed(stream, **named))


def write_weights(path: Path, state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write weights with the facts they need to be used: how to build the model, its classes.

    Args:
        path: The ``.safetensors`` file.
        state: The model's state; tensors that share memory are written out apart.
        facts: Plain values, kept as JSON in the file's metadata.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    data = save(tensors, metadata={"format": "pt", "keymix": json.dumps(facts)})
    write_atomically(path, lambda stream: stream.write(data))


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights and their facts.

    Raises:
        UserError: If the file is missing, truncated or not one of keymix's.
    """
    if not path.exists():
        raise UserError(f"{str(path)!r} does not exist: the run has not finished its first epoch.")
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return tensors, json.loads(metadata["keymix"])
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"the weights {str(path)!r} are damaged ({error}). Run the recipe again, or restore "
            "the file."
        ) from None
    except KeyError:
        raise UserError(f"{str(path)!r} was not written by keymix: it has no facts.") from None


def read_metrics(path: Path, *, epochs: int | None = None) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, one an epoch; a half-written last line is left out.

    Args:
        path: The file; a missing one has no lines.
        epochs: Only the first so many epochs.
    """
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines if epochs is None else [line for line in lines if line["epoch"] < epochs]


def write_metrics(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write all epochs' lines anew."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(path, lambda stream: stream.write(text.encode()))


def append_metrics(path: Path, line: Mapping[str, Any]) -> None:
    """Add an epoch's line."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The run's checkpoints as (epochs done, file), newest first."""
    found = [(int(path.stem.rpartition("_")[2]), path) for path in folder.glob("epochs_*.ckpt")]
    return sorted(found, reverse=True)


def checkpoint_path(folder: Path, epochs: int) -> Path:
    """The file of the checkpoint after so many epochs."""
    return folder / f"epochs_{epochs:05d}.ckpt"


def checkpoint_damage(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if it is whole: checksums and content are read."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return f"checksum of {bad} is wrong"
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if "state_dict" in content else "it holds no state"
