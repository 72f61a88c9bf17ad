# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, read with one clear error, in a locked folder."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import OwnerRecord, SoftFileLease, Timeout
from safetensors import SafetensorError
from torch import Tensor

from keymix.errors import KeymixWarning, UserError, WriteError
from keymix.records import from_json, to_json
from keymix.train.recipe import RECORD
from keymix.train.record import EpochLine, WeightsFacts
from keymix.weights_file import packed, unpacked

RECIPE, ENVIRONMENT, SUMMARY = RECORD, "environment.json", "summary.json"
METRICS, PREDICTIONS, CHECKPOINTS = "metrics.jsonl", "predictions_test.npz", "checkpoints"
NONFINITE, SWAP, LOGGERS, LOCK = "nonfinite.json", "swap.json", "loggers.json", ".lock"

LEASE = 300.0
"""Seconds after which a lock that is not renewed is free, on whatever machine its process was."""
BEAT = 10.0
"""Seconds between two renewals."""
LOOK = 1.0
"""Seconds between two looks at a lock that is waited for."""

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

    `write` puts the content into the open file that it is given. Raises `WriteError`, or `InUse`
    where another process took the folder's lock over.
    """
    _refuse_lost(path)
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
            remove(part)


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_folder(part: Path, path: Path) -> None:
    """Give a folder that is whole its name, in place of what may have it."""
    try:
        remove(path)
        part.rename(path)
        _bring_to_disk(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Make a folder and those above it; without `parents`, only where these are there."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
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


# ---- one process at a time in a folder --------------------------------------------------------


class InUse(UserError):
    """Another process works in the folder."""


class Lock(SoftFileLease):
    """A folder's lock: a file that names its process and machine, and that this one renews.

    Another process has it once that one has ended, on the same machine; else once it saw no renewal
    for `LEASE` seconds.
    """

    def __init__(self, folder: Path) -> None:
        path, beat = folder / LOCK, min(BEAT, LEASE / 3)
        super().__init__(path, lease_duration=LEASE, heartbeat_interval=beat, thread_local=False)

    def _take_over(self, marker: os.stat_result, breaker_pid: int | None) -> None:
        """Where names cannot be exchanged, as on NFS, remove a dead process's file: any may come.

        Should two do so in one moment, one of them finds the lock `lost`.
        """
        super()._take_over(marker, breaker_pid)
        with suppress(OSError):
            there = Path(self.lock_file).stat()
            if (there.st_ino, there.st_mtime_ns) == (marker.st_ino, marker.st_mtime_ns):
                Path(self.lock_file).unlink()

    def tried(self) -> bool:
        """Take the lock if nobody has it, and return whether it was so."""
        try:
            self.acquire(blocking=False)
        except Timeout:
            with suppress(OSError):  # an empty file: its process died before it wrote
                there = Path(self.lock_file).stat()
                if not there.st_size and time.time() - there.st_mtime > LEASE:
                    self.force_break()
        return self.is_locked

    def free(self) -> bool:
        """Whether nobody has the lock; looks of one object notice a machine that died."""
        found = not Path(self.lock_file).exists() or self.tried()
        self.release()
        return found

    @property
    def lost(self) -> bool:
        """Whether another process took the lock over from this one, which it took for dead."""
        owner = self.owner
        return owner is not None and owner.token != self.token

    @property
    def who(self) -> str:
        """The process that has the lock, in words."""
        owner = self.owner
        return "a process" if owner is None else f"process {owner.pid} on {_host(owner)}"

    @property
    def here(self) -> bool:
        """Whether a process of this machine has the lock; so say those that say nothing."""
        owner = self.owner
        return owner is None or _host(owner) == socket.gethostname()


_locks: dict[Path, Lock] = {}  # that this process has, by folder


def _host(owner: OwnerRecord) -> str:
    return owner.hostname.partition("?")[0]


@contextmanager
def locked(folder: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, made if need be, against other processes; `what` works there, for the message.

    One that works there is waited for, or else refused by `InUse`; that of another machine only
    once it gave a sign of life. A folder that was made for this and is left empty goes again.
    Raises `WriteError` if the folder cannot be made or written to.
    """
    path, lock = folder / LOCK, Lock(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    seen = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not lock.tried():
            renewed = _renewed(path)
            if renewed and not wait and (lock.here or seen not in (0, renewed)):
                raise InUse(
                    f"another {what} is at work in {str(folder)!r}: {lock.who}. Wait for it, or "
                    f"name another folder with --out. If it is dead, remove {str(path)!r}."
                )
            if renewed and not wait and not seen:
                text = f"{str(folder)!r} is {lock.who}'s: free if that is silent for {LEASE:g} s"
                warnings.warn(text, KeymixWarning, stacklevel=3)
            seen = renewed
            time.sleep(LOOK)
            folder.mkdir(parents=True, exist_ok=True)  # who was there may have taken it away
    except OSError as error:
        raise write_error(path, error) from None
    _locks[folder] = lock
    try:
        yield
    finally:
        del _locks[folder]
        if lock.is_locked:  # not in a forked child
            with suppress(OSError):  # a folder that became read-only, or is gone
                lock.release()
            with suppress(OSError):
                for place in made:
                    place.rmdir()


def _renewed(path: Path) -> int:
    """Return when a lock's file was renewed, 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _refuse_lost(path: Path) -> None:
    """Refuse to write below a folder whose lock another process took over."""
    for folder in path.parents:
        if folder in _locks and _locks[folder].lost:
            raise InUse(
                f"{_locks[folder].who} has taken {str(folder)!r} over: this process gave no sign "
                f"of life for {LEASE:g} s, or its lock was removed"
            )
