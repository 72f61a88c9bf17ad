# SPDX-License-Identifier: Apache-2.0
"""What ``keymix swap`` leaves behind, step by step, so that a stopped search can resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keymix.errors import UserError
from keymix.records import from_json, to_json

if TYPE_CHECKING:
    from keymix.swap.record import Search
    from keymix.swap.result import Swapped, SwapSetting

SEARCH, STEPS, PAGE = "search.json", "search.csv", "report.html"


class Folder:
    """The folder given as ``--out``; it is refused if it is a file or contains other things."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        from keymix.train.files import LOCK, SWAP

        self.path, self._overwrite = path, overwrite
        self._setting: SwapSetting | None = None
        self._kept: Search | None = None
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

    def begin(self, setting: SwapSetting) -> Search | None:
        """Return what a stopped search of the same setting found there; refuse another search."""
        from keymix.swap.result import SearchRecord
        from keymix.train import files

        self._setting = setting
        path = self.path / SEARCH
        if self._overwrite or not path.exists():
            for name in (SEARCH, STEPS, PAGE, files.SWAP):
                (self.path / name).unlink(missing_ok=True)
            return None
        known = from_json(SearchRecord, files.read_json(path), where=repr(str(path)))
        there, here = to_json(known.setting), to_json(setting)
        differing = [key for key in here if there[key] != here[key]]
        if differing:
            text = "; ".join(
                f"{key} is {there[key]!r} there, {here[key]!r} here" for key in differing
            )
            raise UserError(
                f"the folder {str(self.path)!r} holds another search: {text}. Name another folder "
                "with --out, or replace that search with --overwrite."
            )
        self._kept = known.search
        return known.search

    def keep(self, search: Search) -> None:
        """Write what is known of a search."""
        from keymix.swap.result import SearchRecord
        from keymix.train import files

        assert self._setting is not None  # a search was begun
        record = SearchRecord(setting=self._setting, search=search)
        files.write_json(self.path / SEARCH, record.to_dict())
        files.write_text(self.path / STEPS, search.tables["steps"].csv())
        self._kept = search

    def claim(self) -> None:
        """Mark the folder as a swap's before models are in it: one that was killed may resume."""
        from keymix.train import files

        files.write_json(self.path / files.SWAP, {"setting": to_json(self._setting)})

    def resume_hint(self) -> str:
        """Say what is kept when a signal ends the work."""
        if self._kept is None:
            return "nothing was measured yet"
        done = len(self._kept.trials) + len(self._kept.steps)
        return (
            f"{str(self.path)!r} holds {done} measurements; run the same command again (without "
            "--overwrite) to resume"
        )

    def finish(self, record: Swapped) -> None:
        """Write the page and, last of all, ``swap.json``."""
        from keymix.train import files

        files.write_text(self.path / PAGE, record.html())
        files.write_json(self.path / files.SWAP, record.to_dict())
