# SPDX-License-Identifier: Apache-2.0
"""A folder belongs to one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from keymix.errors import UserError
from keymix.train.files import write_error

LOCK = ".lock"

_TRIES = 100
"""Whoever has the lock removes its file, and perhaps the folder, while another wants it."""


class InUse(UserError):
    """Another process works in the folder."""


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder, made if need be, against another process.

    The lock ends with the process, however that ends. A folder that was made for this and is left
    empty goes again.

    Args:
        folder: The folder.
        what: What works there, ``"run"`` or ``"comparison"``, for the message.

    Raises:
        InUse: If another process has locked it.
        WriteError: If the folder cannot be made or written to.
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
