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
from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from keymix.errors import UserError, WriteError
from keymix.records import check_format, from_json, to_json
from keymix.task import Task
from keymix.train.recipe import RECORD
from keymix.train.record import FORMAT, EpochLine, WeightsFacts

RECIPE, ENVIRONMENT, SUMMARY = RECORD, "environment.json", "summary.json"
METRICS, PREDICTIONS, CHECKPOINTS = "metrics.jsonl", "predictions_test.npz", "checkpoints"
NONFINITE, SWAP, LOGGERS, LOCK = "nonfinite.json", "swap.json", "loggers.json", ".lock"

_PART = ".part"
_DEEPEST = 64
"""Levels of a record; the deepest of keymix's own has about ten."""

_TRIES = 100
"""Whoever has the lock removes its file, and perhaps the folder, while another wants it."""

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
    except (OSError, ValueError) as error:  # that it is no UTF-8, and huge numbers, included
        raise UserError(f"cannot read {str(path)!r}: {error}") from None
    except RecursionError:
        values = None
    if values is None or _is_deep(values):
        raise UserError(f"{str(path)!r} is damaged: it is nested too deeply, or holds nothing.")
    if not isinstance(values, dict):
        raise UserError(f"{str(path)!r} is damaged: it holds no mapping.")
    return values


def _is_deep(values: Any) -> bool:
    """Whether plain values are nested deeper than any record, which recursion may not follow."""
    level = [values]
    for _ in range(_DEEPEST):
        groups = (
            v.values() if isinstance(v, dict) else v for v in level if type(v) in (dict, list)
        )
        level = [value for group in groups for value in group]
        if not level:
            return False
    return True


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write named arrays to a compressed ``.npz``."""
    named: dict[str, Any] = dict(arrays)
    content = io.BytesIO()  # an archive that cannot be written hides why behind its own error
    np.savez_compressed(content, **named)
    write_atomically(path, lambda stream: stream.write(content.getbuffer()))


def write_weights(path: Path, state: Mapping[str, Tensor], facts: WeightsFacts) -> None:
    """Write weights, with facts as JSON in the file's metadata.

    Equal weights and facts make equal files; tensors that share memory are written out apart.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    data = save(tensors, metadata={"format": "pt", "keymix": json.dumps(to_json(facts))})
    write_bytes(path, _in_order(data))


def _in_order(data: bytes) -> bytes:
    """Sort the metadata of a safetensors file, which come in an order of chance."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def read_weights(path: Path) -> tuple[dict[str, Tensor], WeightsFacts]:
    """Read weights and their facts."""
    return _weights(
        path,
        tensors=True,
        remedy=f". Restore the file, or run `keymix train {path.parent}`, which rebuilds it if "
        "the run's checkpoint is whole; --overwrite trains again from the start.",
    )


def read_facts(path: Path) -> WeightsFacts:
    """Read the facts of weights alone; the file is seen to be as long as it should be."""
    return _weights(path, tensors=False)[1]


def _weights(
    path: Path, *, tensors: bool, remedy: str = ""
) -> tuple[dict[str, Tensor], WeightsFacts]:
    if not path.exists():
        raise UserError(
            f"{str(path)!r} does not exist: the run has not finished its first epoch, or somebody "
            "took the file away."
        )
    try:
        with safe_open(path, framework="pt") as stored:
            facts = (stored.metadata() or {}).get("keymix")
            names = list(stored.keys()) if tensors else []
            state = {name: stored.get_tensor(name) for name in names}
        values = None if facts is None else json.loads(facts)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise UserError(f"the weights {str(path)!r} are damaged ({why}){remedy}") from None
    if facts is None:
        raise UserError(f"{str(path)!r} was not written by keymix: it has no facts.")
    check_format(values, FORMAT, where=repr(str(path)))
    try:
        return state, from_json(WeightsFacts, values, where="their record")
    except UserError as error:
        why = str(error).rstrip(".")
        raise UserError(f"the weights {str(path)!r} are damaged ({why}){remedy}") from None


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


def read_metrics(
    path: Path, *, epochs: int | None = None, task: Task | None = None
) -> list[EpochLine]:
    """The `epoch_lines` of ``metrics.jsonl``, of the first `epochs`; a missing file has none.

    With a task, lines without the scores that it ranks epochs by are left out.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    lines = epoch_lines(content)
    return [
        line
        for line in lines
        if (epochs is None or line.epoch < epochs)
        and not (task is not None and line.validated.lacks(task))
    ]


def epoch_lines(content: bytes) -> list[EpochLine]:
    """The epochs' lines of a part of ``metrics.jsonl``, in the order of the epochs.

    What is no epoch's line, such as one that was written by half, is left out; so is an epoch of
    which two lines say different things.
    """
    found: dict[int, dict[str, EpochLine]] = {}
    for text in content.decode("utf-8", errors="replace").splitlines():
        try:
            line = from_json(EpochLine, json.loads(text), where="a line")
        except (ValueError, RecursionError):  # a UserError included
            continue
        found.setdefault(line.epoch, {})[line_text(line)] = line
    return [
        line for _, lines in sorted(found.items()) for line in lines.values() if len(lines) == 1
    ]


def line_text(line: EpochLine) -> str:
    """Write an epoch's line of metrics."""
    return json.dumps(to_json(line))


def write_metrics(path: Path, lines: Sequence[EpochLine]) -> None:
    """Write all epochs' lines."""
    write_text(path, "".join(line_text(line) + "\n" for line in lines))


class InUse(UserError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder, made if need be, against another process; `what` works there, for the message.

    The lock ends with the process, however that ends. A folder that was made for this and is left
    empty goes again. Raises `InUse`, or `WriteError` if the folder cannot be made or written to.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    lock = _acquired(folder, what)
    try:
        yield
    finally:
        if lock.is_locked:  # not in a forked child
            with suppress(OSError):  # a folder that became read-only: the lock itself goes with us
                (folder / LOCK).unlink(missing_ok=True)
            lock.release()
            with suppress(OSError):
                for place in made:
                    place.rmdir()


def _acquired(folder: Path, what: str) -> BaseFileLock:
    path = folder / LOCK
    lock = FileLock(path)
    tries = 0
    while True:
        tries += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            if path.exists() or tries == _TRIES:
                raise InUse(
                    f"another {what} is at work in {str(folder)!r}. Wait for it, or name another "
                    "folder with --out."
                ) from None
        except FileNotFoundError as error:  # whoever had the lock has just removed the folder,
            if tries == _TRIES:  # or no folder can be made there
                raise write_error(folder, error) from None
        except OSError as error:
            raise write_error(path, error) from None
        else:
            return lock
