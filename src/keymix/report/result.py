# SPDX-License-Identifier: Apache-2.0
"""What keymix computes, in Python: an answer, tables and figures. No torch.

A `Result` prints in a few lines, shows itself in a notebook, gives tidy `pandas` frames and
`matplotlib` axes, and writes its page, tables, figures and JSON into a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import escape

from keymix.analysis.study_record import numbers
from keymix.errors import UserError, unknown
from keymix.records import to_json
from keymix.report import formats
from keymix.report.charts import Chart
from keymix.report.page import environment, paragraphs
from keymix.report.svg import with_legend
from keymix.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

WIDTH, MOST_ROWS = 100, 15
"""Columns and rows of a printed table."""


class Result:
    """What was computed: an answer, tables and figures, each by its name.

    The first table is the one that is printed. A subclass gives what it has.
    """

    name = "result"
    """What the names of its files begin with."""

    @property
    def _package(self) -> str:
        """The package whose ``templates`` say it in words; empty for one's own."""
        package = type(self).__module__.rpartition(".")[0]
        return package if package.startswith("keymix.") else ""

    def words(self, name: str, *values: object) -> list[str]:
        """Write a macro of ``words.txt.j2``, which gets the result, by paragraphs."""
        if not self._package:
            return []
        shared = {"formats": formats, "numbers": numbers}
        made = environment(self._package).get_template("own/words.txt.j2").make_module(shared)
        macro = getattr(made, name, None)
        return [] if macro is None else paragraphs(macro, self, *values)

    @property
    def answer(self) -> str:
        """What came out, in a few sentences, a line each."""
        return " ".join(self.words("answer"))

    @property
    def tables(self) -> Mapping[str, Table]:
        """Tables, by name."""
        return {}

    @property
    def figures(self) -> Mapping[str, Chart]:
        """Charts, by name."""
        return {}

    @property
    def notes(self) -> Sequence[str]:
        """What could not be done, in words."""
        return ()

    @property
    def data(self) -> object:
        """Everything as a record, which JSON takes."""
        return {}

    @property
    def page(self) -> Path | None:
        """The file of its HTML page; None where none is written."""
        return None

    def html(self) -> str:
        """Return its HTML page; empty where it has none."""
        return ""

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
        return {"answer": self.answer, **to_json(self.data)}

    def files(self) -> dict[str, str | bytes]:
        """Make its page, tables as CSV, figures as SVG, and JSON, by the names of the files."""
        made: dict[str, str | bytes] = {
            f"{self.name}-{key}.csv": table.csv()
            for key, table in self.tables.items()
            if table.saved
        }
        made |= {f"{self.name}-{key}.svg": chart.file for key, chart in self.figures.items()}
        made[f"{self.name}.json"] = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
        if page := self.html():
            made[f"{self.name}.html"] = page
        return made

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
            UserError: If it has no page, or there is no browser.
        """
        import webbrowser

        page = self.page
        if page is None and (made := self.html()):
            import tempfile

            page = Path(tempfile.mkdtemp(prefix="keymix-")) / f"{self.name}.html"
            page.write_text(made, encoding="utf-8")
        if page is None or not page.is_file():
            raise UserError("this result has no page; `save` writes its tables and figures")
        if not webbrowser.open(page.resolve().as_uri()):
            raise UserError(f"no browser was found to open {str(page)!r}")
