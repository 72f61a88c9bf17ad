# SPDX-License-Identifier: Apache-2.0
"""What an export wrote and how it was checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keymix.report.result import Result
from keymix.report.tables import Column, Table
from keymix.train.exported import Format


@dataclass(frozen=True, kw_only=True)
class Check:
    """One batch, given to the model and to the file."""

    batch: int  # images
    height: int  # pixels
    width: int  # pixels
    difference: float  # largest difference of an output, as a share of the largest output
    same: int  # answers that are equal: classes of images, or of pixels
    answers: int  # how many there are


@dataclass(kw_only=True, repr=False)
class Exported(Result):
    """An exported file. The table is ``"checks"``, a row for each batch it was checked on."""

    name = "export"
    templates = "keymix.export"

    file: Path  # what was written
    format: Format  # onnx or torch
    half: bool  # whether it computes in half precision
    bytes: int  # size of the file
    nodes: int  # operations in it
    batch: bool  # whether a batch may have any number of images
    step: tuple[int, int] | None  # of which height and width may be multiples; None if fixed
    images: str  # on which images it was checked
    checks: tuple[Check, ...]  # the checks

    @property
    def data(self) -> dict[str, object]:
        """Everything as plain data."""
        return {**vars(self), "file": str(self.file)}

    @property
    def tables(self) -> dict[str, Table]:
        """The checks."""
        columns = (
            Column("batch", "batch", "whole"),
            Column("height", "height", "whole"),
            Column("width", "width", "whole"),
            Column("largest difference", "difference", "rate", write="{:.1e}".format),
            Column("same answers", "same", "whole"),
            Column("of", "answers", "whole"),
        )
        rows = [[getattr(check, column.key) for column in columns] for check in self.checks]
        return {"checks": Table("checks", "The file against the model", columns, rows)}

    @property
    def difference(self) -> float:
        """The largest difference of all checks."""
        return max(check.difference for check in self.checks)

    @property
    def same(self) -> bool:
        """Whether all answers are equal."""
        return all(check.same == check.answers for check in self.checks)
