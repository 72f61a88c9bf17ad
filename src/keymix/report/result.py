# SPDX-License-Identifier: Apache-2.0
"""What keymix computes, in Python: an answer, tables and figures. No torch.

A `Result` prints in a few lines, shows itself in a notebook, gives tidy `pandas` frames and
`matplotlib` axes, and writes its tables and figures into a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import escape

from keymix.errors import UserError, unknown
from keymix.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

WIDTH = 100
"""Columns of a printed table."""


@dataclass(kw_only=True, repr=False)
class Result:
    """What was computed.

    Args:
        answer: What came out, in a few sentences, a line each.
        tables: Tables by name, the one that is printed first.
        figures: What draws each figure onto axes, by name.
        page: Its HTML page; None where there is none.
        notes: What could not be done, in words.
    """

    answer: str
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Mapping[str, Callable[[Axes], object]] = field(default_factory=dict)
    page: Path | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        drawn = [table.text(WIDTH) for table in [*self.tables.values()][:1]]
        return "\n\n".join([*drawn, self.answer])

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        from pandas import DataFrame

        said = "".join(f"<p>{escape(line)}</p>" for line in self.answer.splitlines())
        shown = [
            DataFrame(table.cells(), columns=table.headings()).to_html(index=False, border=0)
            for table in [*self.tables.values()][:1]
        ]
        return said + "".join(shown)

    def frame(self, name: str) -> DataFrame:
        """Return a table as a frame: values as they are, one column each.

        Args:
            name: One of ``tables``.

        Raises:
            UserError: If there is no such table.
        """
        from pandas import DataFrame

        if name not in self.tables:
            raise unknown("table", name, list(self.tables))
        header, *rows = self.tables[name].plain()
        return DataFrame(rows, columns=header)

    def plot(self, name: str, ax: Axes | None = None) -> Axes:
        """Draw a figure.

        Args:
            name: One of ``figures``.
            ax: Where to draw; a new figure if None.

        Returns:
            The axes.

        Raises:
            UserError: If there is no such figure.
        """
        if name not in self.figures:
            raise unknown("figure", name, list(self.figures))
        if ax is None:
            from matplotlib import pyplot as plt

            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        self.figures[name](ax)
        return ax

    def save(self, folder: str | Path) -> None:
        """Write every table as CSV and every figure as SVG.

        Args:
            folder: Where; it is made if it is not there.
        """
        from matplotlib.figure import Figure

        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for name, table in self.tables.items():
            (out / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
        for name, draw in self.figures.items():
            drawn = Figure(figsize=(6.4, 4.2), layout="constrained")
            draw(drawn.subplots())
            drawn.savefig(out / f"{name}.svg")

    def open(self) -> None:
        """Open its page in the browser.

        Raises:
            UserError: If it has no page, or there is no browser.
        """
        import webbrowser

        if self.page is None or not self.page.is_file():
            raise UserError("this result has no page; `save` writes its tables and figures")
        if not webbrowser.open(self.page.resolve().as_uri()):
            raise UserError(f"no browser was found to open {str(self.page)!r}")
