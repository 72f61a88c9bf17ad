# SPDX-License-Identifier: Apache-2.0
"""What ``keymix swap`` leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keymix.errors import UserError
from keymix.records import from_json, to_json

if TYPE_CHECKING:
    from keymix.swap.result import Swapped, SwapSetting

SEARCH, PAGE = "search.json", "report.html"


class Folder:
    """The folder given as ``--out``; it is refused if it is a file or contains other things."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        from keymix.train.files import LOCK, SWAP

        self.path, self._overwrite = path, overwrite
        name = str(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {name!r} is a file: name a folder.")
        there = {entry.name for entry in path.iterdir()} - {LOCK} if path.exists() else set()
        if there and not there & {SWAP, SEARCH}:
            raise UserError(
                f"the folder {name!r} is not empty and holds no swap: name another with --out."
            )

    def finished(self, setting: SwapSetting, *, test: bool) -> Swapped | None:
        """Return the record of a finished swap that is there; another or a damaged one is refused.

        With `test` the record must have the scores of the test split.
        """
        from keymix.swap.result import Swapped
        from keymix.train import files

        path = self.path / files.SWAP
        if self._overwrite or not path.exists():
            return None
        there = files.read_json(path)
        if "report" not in there:  # it was begun, and stopped
            return None
        record = from_json(Swapped, there, where=repr(str(path)))
        if record.setting != setting or (test and record.test is None):
            raise UserError(
                f"--out {str(self.path)!r} holds a swap: name another or add --overwrite."
            )
        return record

    def begin(self, setting: SwapSetting | None) -> None:
        """Remove what an earlier one left, and mark the folder before a model is in it.

        So one that was killed is done again. None says that no model will be in it.
        """
        from keymix.train import files

        for name in (PAGE, files.SWAP, *(each.name for each in self.path.glob("search*.*"))):
            (self.path / name).unlink(missing_ok=True)
        if setting is not None:
            files.write_json(self.path / files.SWAP, {"setting": to_json(setting)})

    def finish(self, record: Swapped) -> None:
        """Write the page and, last of all, ``swap.json``."""
        from keymix.train import files

        files.write_text(self.path / PAGE, record.html())
        files.write_json(self.path / files.SWAP, record.to_dict())
