# SPDX-License-Identifier: Apache-2.0
"""What keymix computes, in Python: an answer, tables and figures. No torch.

A `Result` prints in a few lines, shows itself in a notebook, gives tidy `pandas` frames and
`matplotlib` axes, and writes its page, tables, figures and JSON into a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from markupsafe import escape

from keymix.analysis.study_record import StudyRecord, numbers
from keymix.errors import UserError, unknown
from keymix.records import to_json
from keymix.report import formats
from keymix.report.charts import Chart, Look
from keymix.report.page import environment, paragraphs, render_page
from keymix.report.svg import with_legend
from keymix.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

WIDTH, MOST_ROWS = 100, 15
"""Columns and rows of a printed table."""


class Result:
    """What was computed: an answer, tables and figures, each by its name.

    The first table is the one that is printed, the first two figures begin the page, which shows
    the others below. A subclass gives what it has. Every sentence of keymix's own is a macro of
    ``templates/words.txt.j2`` in its folder, which gets the result.
    """

    name = "result"
    """What the names of its files begin with."""

    templates: ClassVar[str] = ""
    """The package whose ``templates`` have its words; empty where it has all itself."""

    made_by: StudyRecord | None = None
    """By which command, when and on what it was made; None in Python."""

    def words(self, name: str, *values: object) -> list[str]:
        """Write a macro of ``words.txt.j2``, which gets the result, by paragraphs."""
        if not self.templates:
            return []
        listed = partial(formats.listing, most=4)
        shared = {"formats": formats, "numbers": numbers, "listed": listed}
        made = environment(self.templates).get_template("own/words.txt.j2").make_module(shared)
        macro = getattr(made, name, None)
        return [] if macro is None else paragraphs(macro, self, *values)

    @property
    def answer(self) -> str:
        """What came out, in a few sentences, a line each."""
        return "\n".join(self.words("answer"))

    @property
    def tables(self) -> Mapping[str, Table]:
        """Tables, by name."""
        return {}

    @property
    def figures(self) -> Mapping[str, Chart]:
        """Charts, by name."""
        return {}

    @property
    def facts(self) -> Sequence[str]:
        """What stands below the answer on its page, a few words each."""
        return self.words("facts")

    @property
    def warnings(self) -> Sequence[str]:
        """What a reader must know before all else, on its page."""
        return self.words("warnings")

    @property
    def sentences(self) -> Mapping[str, Sequence[str]]:
        """What was found beyond the answer, in sentences by label."""
        return {}

    @property
    def method(self) -> Sequence[str]:
        """How it was measured, for its page."""
        return self.words("method")

    @property
    def looks(self) -> Mapping[str, Look]:
        """How mixers or models look in its figures, by label."""
        return {}

    @property
    def left_out(self) -> Sequence[str]:
        """Which inputs could not be read, and why."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """What could not be done, in words."""
        return ()

    @property
    def data(self) -> object:
        """Everything as a record, which JSON takes."""
        return {}

    def view(self) -> Mapping[str, object]:
        """Return what else its page shows, where that has a template of its own."""
        return {}

    def machine(self, lines: Mapping[str, str]) -> Mapping[str, str]:
        """Return of the environment what it depends on."""
        return lines

    def framed(self) -> StudyRecord:
        """Return by which command, when and on what it was made."""
        from keymix.train.environment import frame

        made = self.made_by or frame()
        return replace(made, environment=self.machine(made.environment))

    def html(self) -> str:
        """Return its HTML page."""
        figures, view = self.figures, self.view()
        answer, *more = self.answer.splitlines() or [self.name]
        shared = {"name": self.name, "result": self, "answer": answer, "looks": self.looks}
        record = {"r": self.data, "frame": self.framed(), "facts": [*more, *self.facts]}
        drawn = {"tables": self.tables, "figures": figures, "charts": [*figures.values()][:2]}
        template = "own/page.html.j2" if view else "result.html.j2"
        everything = {**shared, **record, **drawn, "legend": self.looks, **view}
        return render_page(template, everything, package=self.templates if view else "")

    def __repr__(self) -> str:
        drawn = [table.head(MOST_ROWS).text(WIDTH) for table in [*self.tables.values()][:1]]
        return "\n\n".join([*drawn, self.answer])

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        from pandas import DataFrame

        said = "".join(f"<p>{escape(line)}</p>" for line in self.answer.splitlines())
        shown = [
            DataFrame(table.cells()[:MOST_ROWS], columns=table.headings()).to_html(
                index=False, border=0
            )
            for table in [*self.tables.values()][:1]
        ]
        return said + "".join(shown)

    def frame(self, name: str = "") -> DataFrame:
        """Return a table as a frame: values as they are, one column each.

        Args:
            name: One of ``tables``; the first if empty.

        Raises:
            UserError: If there is no such table.
        """
        from pandas import DataFrame

        name = name or next(iter(self.tables), "")
        if name not in self.tables:
            raise unknown("table", name, list(self.tables))
        header, *rows = self.tables[name].plain()
        return DataFrame(rows, columns=header)

    def plot(self, name: str = "", ax: Axes | None = None) -> Axes:
        """Draw a figure.

        Args:
            name: One of ``figures``; the first if empty.
            ax: Where to draw; a new figure if None.

        Returns:
            The axes.

        Raises:
            UserError: If there is no such figure.
        """
        name = name or next(iter(self.figures), "")
        if name not in self.figures:
            raise unknown("figure", name, list(self.figures))
        if ax is None:
            from matplotlib import pyplot as plt

            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        with_legend(ax, self.figures[name].draw)
        return ax

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain data, as JSON takes it."""
        made = {} if self.made_by is None else to_json(self.framed())
        return {"answer": self.answer, **made, **to_json(self.data)}

    def files(self) -> dict[str, str | bytes]:
        """Make its page, tables as CSV, figures as SVG, and JSON, by the names of the files."""
        made: dict[str, str | bytes] = {
            f"{self.name}-{key}.csv": table.csv()
            for key, table in self.tables.items()
            if table.saved
        }
        made |= {f"{self.name}-{key}.svg": chart.file for key, chart in self.figures.items()}
        everything = {**to_json(self.framed()), **self.to_dict()}
        made[f"{self.name}.json"] = json.dumps(everything, indent=2, ensure_ascii=False) + "\n"
        return made | {f"{self.name}.html": self.html()}

    def save(self, folder: str | Path) -> None:
        """Write its page, every table as CSV, every figure as SVG, and everything as JSON.

        Args:
            folder: Where; it is made if it is not there.
        """
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            raw = content.encode() if isinstance(content, str) else content
            (out / name).write_bytes(raw)

    def open(self) -> None:
        """Open its page in the browser.

        Raises:
            UserError: If there is no browser.
        """
        import tempfile
        import webbrowser

        page = Path(tempfile.mkdtemp(prefix="keymix-")) / f"{self.name}.html"
        page.write_text(self.html(), encoding="utf-8")
        if not webbrowser.open(page.resolve().as_uri()):
            raise UserError(f"no browser was found to open {str(page)!r}")
