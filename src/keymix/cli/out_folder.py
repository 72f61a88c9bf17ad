# SPDX-License-Identifier: Apache-2.0
"""The folder that an analysis writes: checked before the work, and not left behind empty."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.errors import UserError
from keymix.records import to_json

if TYPE_CHECKING:
    from keymix.analysis.study_record import StudyRecord


def checked(name: str, record: str, *, overwrite: bool) -> Path:
    """Check where the files go, before any work.

    Args:
        name: As given to ``--out``.
        record: The file that tells an analysis of this kind, such as ``"attention.json"``.
        overwrite: Whether an analysis there may be replaced.

    Raises:
        UserError: If it is a file, or a folder with other things or an analysis in it.
    """
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {name!r} is a file. Name a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return folder
    if not (folder / record).exists():
        raise UserError(
            f"the folder {name!r} is not empty and holds no analysis of this kind ({record}). Name "
            "another with --out."
        )
    if not overwrite:
        raise UserError(f"--out {name!r} holds an analysis: name another or add --overwrite.")
    return folder


@contextmanager
def made(folder: Path | None, done: Callable[[], bool]) -> Iterator[None]:
    """Make the folder before the work, and take it away again if nothing came of the work.

    Args:
        folder: What :func:`checked` returned; None where nothing is written.
        done: Whether there is something to keep.

    Raises:
        WriteError: If it cannot be made.
    """
    from keymix.train.files import make_folder

    if folder is None:
        yield
        return
    lacking = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield
    finally:
        if not done():
            for path in lacking:
                with suppress(OSError):
                    path.rmdir()


def json_text(record: object) -> str:
    """Return the JSON of a record, as its file has it.

    Args:
        record: What `keymix.records.to_json` takes.
    """
    return json.dumps(to_json(record), indent=2, ensure_ascii=False) + "\n"


def frame(*words: str) -> StudyRecord:
    """Say by which command, when and on what a record is made.

    Args:
        words: The command line after ``keymix``.
    """
    from keymix.analysis.study_record import StudyRecord
    from keymix.compare import environments
    from keymix.train.environment import environment

    return StudyRecord(
        command=shlex.join(["keymix", *words]),
        created=time.strftime("%Y-%m-%d %H:%M %Z"),
        environment=environments.lines(environment()),
    )
