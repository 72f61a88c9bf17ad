# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, read with one clear error, in a locked folder."""

from __future__ import annotations

import errno
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from keymix.errors import UserError, WriteError
from keymix.records import from_json, to_json
from keymix.train.recipe import RECORD
from keymix.train.record import EpochLine, WeightsFacts
from keymix.weights_file import packed, unpacked

RECIPE, ENVIRONMENT, SUMMARY = RECORD, "environment.json", "summary.json"
METRICS, PREDICTIONS, CHECKPOINTS = "metrics.jsonl", "predictions_test.npz", "checkpoints"
NONFINITE, SWAP, LOGGERS, LOCK = "nonfinite.json", "swap.json", "loggers.json", ".lock"

_PART = ".part"
_BAD_ARRAYS = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    TypeError,
    zipfile.BadZipFile,
    zlib.error,
)  # what NumPy and zipfile raise of a file whose bytes were changed
_MAKE_WRITABLE = "Name a folder that you may write to with --out, or make this one so"
_REMEDIES = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "Free space or ask for a larger quota",
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`)",
    errno.EIO: "The disk may be failing: save what is on it",
    errno.EROFS: _MAKE_WRITABLE,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.ENAMETOOLONG: "Name a shorter one with --out",
}


def weights_file(which: str) -> str:
    """Name of the weights file of the ``last`` or the ``best`` epoch."""
    return f"weights_{which}.safetensors"


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash, or a full disk, leaves the old one or the new one whole.

    `write` puts the content into the open file that it is given. Raises `WriteError`.
    """
    part = part_of(path)
    try:
        try:
            with part.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(path)
            _bring_to_disk(path.parent)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def part_of(path: Path) -> Path:
    """Name the file that becomes another once it is whole."""
    return path.with_name(f".{path.name}{_PART}")


def clear_parts(folder: Path) -> None:
    """Remove what killed runs left half-written in their folder."""
    for place in (folder, folder / CHECKPOINTS):
        for part in place.glob(f".*{_PART}"):
            part.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def checked_output(path: Path, *, manifest: str, what: str, overwrite: bool) -> Path:
    """Refuse an output that is a file, or a folder with something in it, before any work.

    A folder that has the `manifest` holds such outputs, `what`, of before: they may be replaced if
    asked for.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {str(path)!r} is a file. A folder is needed: name one.")
    if not path.exists() or not any(path.iterdir()):
        return path
    if not (path / manifest).exists():
        raise UserError(
            f"the folder {str(path)!r} is not empty and holds no {what} ({manifest}). "
            "Name another with --out."
        )
    if not overwrite:
        raise UserError(f"--out {str(path)!r} holds {what}: name another or add --overwrite.")
    return path


def write_error(path: Path, error: OSError) -> WriteError:
    """Make the one line for a failed write, with a remedy that fits its cause."""
    remedy = _REMEDIES.get(error.errno or 0, "See to the disk")
    cause = error.strerror or str(error)
    return WriteError(
        f"cannot write {str(path)!r}: {cause}; what was there is whole. {remedy}, then run the "
        "same command again"
    )


def _bring_to_disk(folder: Path) -> None:
    """Make a rename in a folder outlast a loss of power."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    write_atomically(path, lambda stream: stream.write(content))


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; what UTF-8 cannot hold of a file's name is escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, record: object) -> None:
    """Write a record, or a mapping, as indented JSON."""
    write_text(path, json.dumps(to_json(record), indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON mapping."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # that it is no UTF-8 included
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{str(path)!r} is damaged: it holds no mapping.")
    return values


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write named arrays to a compressed ``.npz``."""
    named: dict[str, Any] = dict(arrays)
    content = io.BytesIO()  # an archive that cannot be written hides why behind its own error
    np.savez_compressed(content, **named)
    write_atomically(path, lambda stream: stream.write(content.getbuffer()))


def write_weights(path: Path, state: Mapping[str, Tensor], facts: WeightsFacts) -> None:
    """Write weights with their facts; equal ones make equal files."""
    write_bytes(path, packed(state, facts))


def read_weights(path: Path) -> tuple[dict[str, Tensor], WeightsFacts]:
    """Read weights and their facts; a file that differs from what was written is refused."""
    try:
        state, facts = unpacked(path)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise UserError(f"the weights {str(path)!r} are damaged ({why})") from None
    if facts is None:
        raise UserError(f"{str(path)!r} was not written by keymix: it has no facts.")
    return state, from_json(WeightsFacts, facts, where=f"the record in {str(path)!r}")


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of a ``.npz``."""
    try:
        with zipfile.ZipFile(path) as archive:  # np.load takes other files, too
            members = archive.namelist()
        with np.load(path) as stored:
            return {name.removesuffix(".npy"): stored[name] for name in members}
    except _BAD_ARRAYS as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot read {str(path)!r}: {why}") from None


def read_metrics(path: Path) -> list[EpochLine]:
    """Read the lines of ``metrics.jsonl``, up to one that is not whole; a missing file has none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    lines: list[EpochLine] = []
    for line in text.splitlines():
        try:
            lines.append(from_json(EpochLine, json.loads(line), where="a line"))
        except (ValueError, RecursionError):  # a UserError included
            break
    return lines


def write_metrics(path: Path, lines: Sequence[EpochLine]) -> None:
    """Write all epochs' lines."""
    write_text(path, "".join(json.dumps(to_json(line)) + "\n" for line in lines))


class InUse(UserError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: Path, what: str, *, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder, made if need be, against another process; `what` works there, for the message.

    A lock that another one has is waited for `patience` seconds. It ends with the process, however
    that ends. A folder that was made for this and is left empty goes again. Raises `InUse`, or
    `WriteError` if the folder cannot be made or written to.
    """
    path = folder / LOCK
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience)
    except Timeout:
        raise InUse(
            f"another {what} is at work in {str(folder)!r}. Wait for it, or name another folder "
            "with --out."
        ) from None
    except OSError as error:
        raise write_error(path, error) from None
    try:
        yield
    finally:
        if lock.is_locked:  # not in a forked child
            with suppress(OSError):  # a folder that became read-only: the lock itself goes with us
                path.unlink(missing_ok=True)  # who has it open already does not get the lock
            lock.release()
            with suppress(OSError):
                for place in made:
                    place.rmdir()
