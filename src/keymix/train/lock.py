# SPDX-License-Identifier: Apache-2.0
"""A folder belongs to one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keymix.errors import UserError
from keymix.train.files import write_error

LOCK = ".lock"

_held: set[int] = set()


class InUse(UserError):
    """Another process works in the folder."""


def _let_go() -> None:
    """Close the locks in a forked child: it would hold them after its parent's death."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, made if need be, against another process; it may die without letting go.

    A folder that was made for this and is left empty goes again.

    Args:
        folder: The folder.
        what: What works there, ``"run"`` or ``"comparison"``, for the message.

    Raises:
        InUse: If another process holds it.
        WriteError: If the folder cannot be made or written to.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows; there two at a time are the user's to avoid
        folder.mkdir(parents=True, exist_ok=True)
        yield
        return
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    path = folder / LOCK
    tries = 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError as error:  # the holder has just taken the folder away,
            tries += 1
            if tries == 100:  # or no folder can be made there
                raise write_error(folder, error) from None
            continue
        except OSError as error:
            raise write_error(path, error) from None
        _held.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _close(descriptor)
            raise InUse(
                f"another {what} is at work in {str(folder)!r}. Wait for it, or name another "
                "folder with --out."
            ) from None
        if _is_at(descriptor, path):
            break
        _close(descriptor)  # the holder removed the file between opening and locking
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that became read-only: the lock itself goes with us
            path.unlink(missing_ok=True)
        _close(descriptor)
        with suppress(OSError):
            for place in made:
                place.rmdir()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _close(descriptor: int) -> None:
    if descriptor in _held:  # not in a forked child, which has closed it
        _held.remove(descriptor)
        os.close(descriptor)
