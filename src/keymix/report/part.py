# SPDX-License-Identifier: Apache-2.0
"""What a task brings to a comparison's record and report: see `Page`. No torch."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from markupsafe import Markup

from keymix.analysis.answers import Answers, FloatArray
from keymix.data.record import DataRecord
from keymix.records import Own
from keymix.report.charts import Look, looks
from keymix.report.gallery import Gallery, Pictures
from keymix.report.record import DoneRun, OutcomeRow, Results, Said
from keymix.report.tables import Column, Table
from keymix.task import Score, Task

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

Output = Any
"""What a task's model returns: a tensor, a list, a mapping."""


SHARES = 65535
"""A stored share of this many is 1."""
Notes = Sequence[tuple[Sequence[str], str]]
"""Labels of mixers and what is said of them."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report: by its fields alone, or by a template of its own.

    Args:
        name: What the page's navigation calls it; its heading, if empty.
        heading: Its heading; so are the next ones left out where it has a template.
        about: A paragraph below.
        legend: Labels of the mixers that the charts show.
        charts: The charts.
        layout: How they are placed: two or three next to each other, or narrow.
        tables: The tables.
        notes: What is said at the end.
        template: Its template, in the ``templates`` of the task's package; empty for none.
        view: What the template reads, under the name ``view``.
        styles: Template of rules that it adds to the page's style sheet, with the same view.
        images: Names of the images of the data that it holds pictures of.
    """

    name: str = ""
    heading: str = ""
    about: str = ""
    legend: Collection[str] = ()
    charts: Sequence[Markup] = ()
    layout: Literal["grid2", "grid3", "narrow"] = "grid2"
    tables: Sequence[Table] = ()
    notes: Notes = ()
    template: str = ""
    view: object = None
    styles: str = ""
    images: Collection[str] = ()

    @property
    def link(self) -> str:
        """What the navigation calls it."""
        return self.name or self.heading

    @property
    def anchor(self) -> str:
        """Its name in links of the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.link.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class RunAnswers:
    """A finished run: what its last weights answered on the test split, and the details of it."""

    mixer: str
    answers: Answers
    details: Own


@dataclass(frozen=True, kw_only=True)
class ImageOutputs:
    """What a model of each mixer returned for the same few test images.

    Args:
        chosen: The images' positions, each with a few words on why it was chosen.
        outputs: What each mixer's model returned for them, by label.
        missing: Why a model returned nothing, by label.
        seed: Whose weights they are.
    """

    chosen: Mapping[int, str]
    outputs: Mapping[str, Output]
    missing: Mapping[str, str]
    seed: int


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """The scores of each class, for the section of classes.

    `score` is their name in a sentence, and `scores` has a fraction for each class, or None, by
    mixer's label and seed. `counts` say, by heading, how many test images a class has, say;
    `further` columns have means over seeds by mixer's label. `about` are numbers for the macro
    ``classes`` in the task's ``captions.html.j2``.
    """

    score: str
    names: Sequence[str]
    scores: Mapping[str, Mapping[int, Sequence[float | None]]]
    counts: Mapping[str, Sequence[int]]
    further: Mapping[Column, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    about: Mapping[str, float] = field(default_factory=dict)


class Page:
    """What a task keeps in a comparison's record and shows in its report.

    All of it may be left out: a task without a page of its own has this one, and its report the
    sections that all tasks share. ``templates/captions.html.j2`` has words as macros: those of its
    galleries and classes, and those of the report's file of this name.

    Attributes:
        package: The package in which ``templates`` and ``script`` are; empty for none.
        scripts: Files of ``script``; one of them defines ``contrast(a, b)`` for two runs next to
            each other. Without any, their scores and curves are compared.
        shared_scripts: Files of the report's own that these rest on.
        run: The dataclass of what the record keeps of a finished run, which the script reads too;
            None for nothing.
        comparison: That of what it keeps of the comparison.
        test_scores: Further scores of the test split, which the task's details of it hold.
        terminal: Keys of the scores that the table at the terminal shows next to the first.
        test_numbers: Further numbers of these details that are listed with a run's scores.
        label_is: What `label` gives.
    """

    package: ClassVar[str] = ""
    scripts: ClassVar[Sequence[str]] = ()
    shared_scripts: ClassVar[Sequence[str]] = ()
    run: ClassVar[type[Any] | None] = None
    comparison: ClassVar[type[Any] | None] = None
    test_scores: ClassVar[Sequence[Score]] = ()
    terminal: ClassVar[Sequence[str]] = ()
    test_numbers: ClassVar[Sequence[str]] = ()
    label_is: ClassVar[str] = "name"

    # ---- what the record keeps ---------------------------------------------------------------

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> object:
        """Make what the record keeps of a finished run: a `run`, or None for nothing."""
        del tested, data
        return None

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> object:
        """Make what the record keeps of the comparison: a `comparison`, or None for nothing.

        Args:
            tested: The finished runs, mixer by mixer.
            data: The data.
        """
        del tested, data
        return None

    def chosen(self, answers: Answers, number: int) -> Sequence[int]:
        """Choose test images on which attention is shown: evenly spread, as far as there are.

        Args:
            answers: Of any run, for the truth, on which alone the choice rests.
            number: How many at most.
        """
        images = len(answers.index)
        return sorted({i * images // number for i in range(number)} if images else ())

    def label(self, data: ImageData, i: int) -> str:
        """Say under a test image what it is."""
        return data.test.ids(i)

    def said(self, answers: Answers, chosen: Sequence[int]) -> Sequence[Said]:
        """Say in a few words what a run answered to some test images; nothing to leave it out."""
        del answers, chosen
        return ()

    def gallery(self, data: ImageData, tested: Sequence[RunAnswers]) -> Mapping[str, Gallery]:
        """Draw test images that the answers of many runs choose: galleries by name.

        Args:
            data: The data.
            tested: The finished runs of the mixers to choose by, mixer by mixer.
        """
        del data, tested
        return {}

    def drawn(self, tested: Sequence[RunAnswers]) -> Mapping[int, str]:
        """Choose test images of which the models' answers are drawn; none to draw nothing.

        Args:
            tested: As for `gallery`.

        Returns:
            Their positions, each with a few words on why it was chosen, or none.
        """
        del tested
        return {}

    def draw(self, data: ImageData, given: ImageOutputs) -> Mapping[str, Gallery]:
        """Draw the models' answers to the images of `drawn`: galleries by name."""
        del data, given
        return {}

    def check(self, record: Results, *, where: str) -> None:
        """Refuse a record whose own parts do not fit.

        Raises:
            UserError: Naming the key.
        """
        if self.comparison is not None:
            record.own.read(self.comparison, where=where)
        for run in record.runs:
            if self.run is not None and isinstance(run, DoneRun):
                run.own.read(self.run, where=f"{where}: {run.folder}")

    # ---- what the report says ----------------------------------------------------------------

    def about_data(self, data: DataRecord) -> str:
        """Say what there is to answer, behind the size of the images: ``10 classes``."""
        del data
        return ""

    def missing(self, record: Results) -> str:
        """Name what the test split lacks, or what no model has found; empty for nothing."""
        del record
        return ""

    def failing(self, record: Results, row: OutcomeRow) -> str:
        """Say that a mixer's models do not work, such as ``right no more often than by chance``.

        Empty if they do, and where that is not known.
        """
        del record, row
        return ""

    # ---- what the report shows ---------------------------------------------------------------

    def classes(self, record: Results) -> ClassScores | None:
        """Return the scores of each class; None without classes, or without a finished run."""
        del record
        return None

    def sections(self, record: Results, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Make the task's sections, in order."""
        del record, looks
        return ()


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What sections are made from: results, pictures, how the mixers look, the task's page."""

    record: Results
    pictures: Pictures
    looks: Mapping[str, Look]
    page: Page

    @classmethod
    def of(cls, record: Results, pictures: Pictures) -> Shown:
        """Give every mixer of a comparison its look."""
        drawn = looks(
            record.labels,
            baseline=record.baseline,
            controls=record.controls,
            references=record.trained_references,
        )
        page = page_of(record.task_kind)
        return cls(record=record, pictures=pictures, looks=drawn, page=page)


def packed_shares(shares: FloatArray) -> str:
    """Write numbers from 0 to 1 as base64 of little-endian uint16, `SHARES` for 1."""
    levels = np.round(np.clip(shares, 0.0, 1.0) * SHARES).astype("<u2")
    return base64.b64encode(levels.tobytes()).decode("ascii")


def page_of(task: Task) -> Page:
    """Open a task's page; the one without sections where it has none."""
    return cast(Page, task.load("page")) if task.has("page") else Page()
