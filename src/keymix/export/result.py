# SPDX-License-Identifier: Apache-2.0
"""What an export wrote and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keymix.report.formats import with_unit
from keymix.report.result import Result
from keymix.report.tables import Column, Table
from keymix.task import FRACTION, Score, get_task
from keymix.train.exported import Format, Precision

MOST_LOST = 0.01
"""A larger loss by 8 bits, one point of a percentage, is searched for its causes."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One batch, given to the model and to the file."""

    batch: int  # images
    height: int  # pixels
    width: int  # pixels
    difference: float  # largest difference of an output, as a share of the largest output
    same: int  # answers that are equal: classes of images, or of pixels
    answers: int  # how many there are


@dataclass(frozen=True, kw_only=True)
class Int8:
    """What 8 bits cost on the test split."""

    task: str  # name of the task
    before: float | None  # its score of the float file
    after: float | None  # that of the 8-bit file
    low: float | None  # ends of the 95 % interval of the difference, paired by image
    high: float | None
    images: int  # test images
    kept: tuple[str, ...]  # blocks that stay in float
    gains: Mapping[str, float]  # of the validation score, with one more block in float

    @property
    def score(self) -> Score:
        """The score of the task that models are compared by."""
        return get_task(self.task).score

    @property
    def difference(self) -> float | None:
        """The score in 8 bits minus that in float."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def lossy(self) -> bool:
        """Whether 8 bits cost more than a point."""
        return self.score.rank(self.difference or 0.0) < -MOST_LOST


@dataclass(frozen=True, kw_only=True)
class Backend:
    """How long the model takes in one place, measured in turns with the others."""

    name: str  # what runs it
    bytes: int | None  # size of the file; None in memory
    score: float | None  # of the task, on the test split; None where it was not asked for
    alone_ms: float  # one image, milliseconds
    batch_ms: float  # a batch of 32 images, milliseconds
    against: str  # the latency of one image next to the first row's


@dataclass(kw_only=True, repr=False)
class Exported(Result):
    """An exported file.

    The table ``"checks"`` has a row for each batch it was checked on, ``"backends"`` for each place
    that it was timed in, and ``"blocks"`` for each block that was left in float in turn.
    """

    name = "export"
    templates = "keymix.export"

    file: Path  # what was written
    format: Format  # onnx, torch or openvino
    precision: Precision  # bits that it computes in
    bytes: int  # size of the file
    nodes: int  # operations in it
    batch: bool  # whether a batch may have any number of images
    step: tuple[int, int] | None  # of which height and width may be multiples; None if fixed
    images: str  # on which images it was checked
    checks: tuple[Check, ...]  # the checks
    int8: Int8 | None = None  # what 8 bits cost
    backends: tuple[Backend, ...] = ()  # where it was timed

    @property
    def data(self) -> dict[str, object]:
        """Everything as plain data."""
        return {**vars(self), "file": str(self.file)}

    @property
    def tables(self) -> dict[str, Table]:
        """Where it was timed and which blocks cost most, if that was asked for; the checks."""
        score = self.int8.score if self.int8 else FRACTION
        found: list[Table] = []
        columns: tuple[Column, ...]
        if self.backends:
            columns = (
                Column("", "name"),
                Column("bytes", "bytes", "whole"),
                Column(
                    with_unit(f"test {score.short}", score), "score", "rate", write=score.digits
                ),
                Column("ms, 1 image", "alone_ms", "ms"),
                Column("ms, 32 images", "batch_ms", "ms"),
                Column("1 image, of the first row's", "against"),
            )
            found.append(_table("backends", "Where it runs", columns, self.backends))
        if self.int8 and self.int8.gains:
            heading = with_unit(f"validation {score.short} gained", score)
            pair = (Column("left in float", "block"), Column(heading, "gained", write=score.change))
            rows = [*self.int8.gains.items()]
            found.append(Table("blocks", "Blocks left in float in turn", pair, rows))
        columns = (
            Column("batch", "batch", "whole"),
            Column("height", "height", "whole"),
            Column("width", "width", "whole"),
            Column("largest difference", "difference", "rate", write="{:.1e}".format),
            Column("same answers", "same", "whole"),
            Column("of", "answers", "whole"),
        )
        found.append(_table("checks", "The file against the model", columns, self.checks))
        return {each.key: each for each in found}

    @property
    def difference(self) -> float:
        """The largest difference of all checks."""
        return max(check.difference for check in self.checks)

    @property
    def same(self) -> bool:
        """Whether all answers are equal."""
        return all(check.same == check.answers for check in self.checks)


def _table(key: str, title: str, columns: Sequence[Column], records: Sequence[object]) -> Table:
    rows = [[getattr(record, column.key) for column in columns] for record in records]
    return Table(key, title, columns, rows)
