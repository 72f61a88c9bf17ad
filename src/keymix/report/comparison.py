# SPDX-License-Identifier: Apache-2.0
"""A finished comparison in Python: it prints as a table, and gives frames and figures. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.analysis.certainty import Decision
from keymix.arguments import checked
from keymix.errors import UserError
from keymix.report import charts, frames
from keymix.report.answer import answer
from keymix.report.charts import Chart
from keymix.report.gallery import NO_PICTURES, Pictures
from keymix.report.part import Shown
from keymix.report.record import OpenRun, Results, opened
from keymix.report.result import Result
from keymix.report.sections import cost, learning
from keymix.report.sections.mixers import decision, differences
from keymix.report.tables import Table
from keymix.report.words import said

if TYPE_CHECKING:
    from pandas import DataFrame

RESULTS, TABLE, REPORT = "results.json", "results.csv", "report.html"
DIFFERENCES = "differences.csv"


class Comparison(Result):
    """What a comparison found: `scores`, `differences`, `costs` and `findings` as frames.

    ``record`` has everything, as ``results.json`` does; ``out`` is the comparison's folder, and
    ``pictures`` is what its page shows of models and images. Figures are ``"pareto"``, ``"curves"``
    and ``"differences"``.

    Example:
        >>> result = keymix.compare(data="digits", mixers="mhsa,ska", seeds=2, out="digits-cmp")
        >>> result.differences[["mixer", "difference", "low", "high", "degree"]]
        >>> result.plot("pareto")
    """

    name = "comparison"

    def __init__(
        self,
        *,
        out: Path,
        record: Results,
        pictures: Pictures = NO_PICTURES,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.out, self.record, self.pictures, self._notes = out, record, pictures, notes

    @property
    def answer(self) -> str:
        """Title, decision and what to do next."""
        return "\n".join(said("answer", answer(self.record)))

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """The mixers against the baseline; and the frames."""
        return {"comparison": decision(self.record, further=True), **frames.tables(self.record)}

    @cached_property
    def figures(self) -> Mapping[str, Chart]:
        """Score against cost, validation by epoch, differences."""
        return _figures(Shown.of(self.record, self.pictures))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was said while the comparison ran."""
        return self._notes

    @property
    def data(self) -> Results:
        """What ``results.json`` holds."""
        return self.record

    def html(self) -> str:
        """Return its HTML page, the offline report."""
        try:
            return self.report.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{str(self.report)!r} cannot be read ({error.strerror}); "
                f"`keymix report {self.out}` writes it"
            ) from None

    @property
    def report(self) -> Path:
        """The offline HTML report."""
        return self.out / REPORT

    @property
    def scores(self) -> DataFrame:
        """One row per finished run, epoch (last or best), split and metric.

        Columns: ``mixer``, ``seed``, ``epoch``, ``split``, ``metric``, ``value``.
        """
        return self.frame("scores")

    @property
    def curves(self) -> DataFrame:
        """The columns of `scores`, for every epoch, counted from 1."""
        return self.frame("curves")

    @property
    def differences(self) -> DataFrame:
        """One row per mixer and epoch (last or best): its difference from the baseline.

        Columns: ``mixer``, ``baseline``, ``epoch``, ``seeds`` (pairs of runs), ``difference``,
        ``low`` and ``high`` (ends of the interval over seeds and test units), ``level`` (its
        confidence), ``p``, ``p_holm`` (corrected over mixers), ``degree`` (clear, provisional,
        equal, unclear), ``direction`` (better, worse or empty).
        """
        return self.frame("differences")

    @property
    def costs(self) -> DataFrame:
        """One row per mixer: parameters, multiply-adds per image, bytes, times in ms, MiB.

        Columns: ``mixer``, ``params``, ``macs``, ``activation_bytes``, ``latency_ms``,
        ``latency_low_ms``, ``latency_high_ms``, ``images_per_s``, ``step_ms``, ``peak_mib``,
        ``time_steps``; of spiking models ``firing_rate``, ``sops``, ``energy_uj``,
        ``energy_low_uj``, ``energy_high_uj``, the mean over seeds.
        """
        return self.frame("costs")

    @property
    def findings(self) -> DataFrame:
        """What the comparison found out about itself, the most serious first.

        Columns: ``kind``, ``text``, ``remedy``.
        """
        return self.frame("findings")

    @property
    def recommendation(self) -> Decision:
        """Which mixer to take, or what is missing to decide it."""
        return self.record.recommendation

    @property
    def failed(self) -> list[OpenRun]:
        """The runs that failed, with their reasons."""
        return self.record.unfinished("failed")

    @property
    def missing(self) -> list[OpenRun]:
        """The runs that have not started, or are not finished yet."""
        return self.record.unfinished("missing")


def _figures(shown: Shown) -> dict[str, Chart]:
    """Return the score against cost, validation by epoch, and the differences."""
    record = shown.record
    costs = list(cost.scatters(record, shown.looks).values())
    curves = learning.curves(record, shown.looks)
    rows = differences(record, shown.looks)
    found = {"pareto": costs[0]} if costs else {}
    if curves:
        found["curves"] = curves[-1]
    if rows:
        score, baseline = record.task_kind.score, record.baseline
        draw = partial(charts.differences, rows=rows, baseline=baseline, score=score)
        found["differences"] = Chart("differences", "", draw)
    return found


@checked
def load_results(folder: str | Path) -> Comparison:
    """Open the results of a comparison's folder; nothing is computed again.

    Args:
        folder: The folder given as ``out`` to `keymix.compare`.

    Returns:
        The results, as `keymix.compare` returned them.

    Raises:
        UserError: If the folder holds no results, or they cannot be read.

    Example:
        >>> keymix.load_results("digits-cmp").scores
    """
    out = Path(folder)
    path = out / RESULTS
    if not path.is_file():
        raise UserError(
            f"{str(out)!r} has no {RESULTS}. Name a comparison's folder; `keymix report {out}` "
            "writes the file from its runs."
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from None
    return Comparison(out=out, record=opened(values, where=repr(str(path))))
