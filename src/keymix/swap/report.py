# SPDX-License-Identifier: Apache-2.0
"""What a swap did, one row per layer: origin of every weight, cost before and after, drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keymix.records import to_json
from keymix.report.charts import Chart, Line, curves, looks
from keymix.report.result import Result
from keymix.report.tables import Cell, Column, Table

SAYS_NOTHING = "the model's outputs do not vary from image to image"
"""The message about a model whose output no swap can change."""


@dataclass(frozen=True, kw_only=True)
class LayerDrift:
    """How far one layer moved, alone: it sees the tokens that the original's layer sees.

    Attributes:
        logits: Root mean square of the change of the scaled logits over that of the logits, both
            less the mean of their row, which the softmax undoes; without what the host adds to
            the logits of any mixer. None where one of the two has none, or other keys.
        map: Mean total variation distance of the rows of the attention map (after the softmax),
            half the sum of absolute changes: 0 alike, 1 disjoint. None likewise.
        output: Root mean square of the change of the layer's output over that of the output.
    """

    logits: float | None = None
    map: float | None = None
    output: float | None = None


@dataclass(frozen=True, kw_only=True)
class OutputDrift:
    """How far the whole model moved, all swapped layers together.

    Attributes:
        images: Images that it was measured on.
        image_size: Their channels, height and width in pixels.
        top1_agreement: Share of them on which the most likely class is the same; None for a model
            without class logits, or one that gives all images the same answer.
        relative: Root mean square of the change of the model's output over that of the output.
        varies: Whether the original's output varies from image to image. Where it does not, a
            model that says nothing cannot drift: ``relative`` is None.
    """

    images: int
    image_size: tuple[int, ...]
    top1_agreement: float | None
    relative: float | None
    varies: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """What became of one layer.

    Attributes:
        path: Where attention sits, such as ``blocks.3.attn``.
        block: Its number among the model's layers with attention, from 1.
        before: The mixer, or the class of the host's own attention, that sat there.
        after: The mixer that sits there now.
        copied: Tensors taken over, or modules where all of their tensors were.
        estimated: Set from calibration images, or to the neutral value that keeps the function.
        fresh: As a new model starts them.
        dropped: Of the old attention, without a place in the new mixer.
        params: Parameters before and after.
        macs: Multiply-adds of one image before and after; None where they cannot be counted.
        drift: Measured on the calibration images; None without them.
        notes: What else there is to say.
    """

    path: str
    block: int
    before: str
    after: str
    copied: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    params: tuple[int, int]
    macs: tuple[int, int] | None = None
    drift: LayerDrift | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Untouched:
    """A layer with attention that was left as it is.

    Attributes:
        path: Where.
        what: What sits there.
        why: Why it was left.
    """

    path: str
    what: str
    why: str


def _change(pair: tuple[int, int] | None) -> Cell | None:
    return None if pair is None else Cell(pair[1], f"{pair[0]:,} → {pair[1]:,}")


_NAMED = ("copied", "estimated", "fresh", "dropped")
_DRIFTS = ("logits", "map", "output")
_COLUMNS = (
    Column("block", "block", "text", where="people", sort="none"),
    Column("", "block", where="csv"),
    Column("", "layer", where="csv"),
    Column("was", "before", sort="none"),
    Column("is", "after", sort="none"),
    *(Column(name, name, sort="none") for name in _NAMED),
    Column("", "params_before", where="csv"),
    Column("parameters", "params_after", "whole", sort="none"),
    Column("", "macs_before", where="csv"),
    Column("multiply-adds", "macs_after", "whole", sort="none"),
)
_DRIFT_COLUMNS = tuple(
    Column(f"drift of {name}", f"drift_{name}", "ratio", write="{:.2g}".format, sort="none")
    for name in _DRIFTS
)


@dataclass(frozen=True, kw_only=True, repr=False)
class SwapReport(Result):
    """What a swap did: its table is ``"layers"``, its figures how far each layer moved.

    Attributes:
        model: The model's class.
        host: What errors call its family.
        init: ``"transfer"`` or ``"fresh"``.
        estimate: As asked of the swap; None where nothing was estimated.
        rows: The swapped layers, in the model's order.
        untouched: The others.
        params: Parameters of the whole model before and after.
        macs: Multiply-adds of the whole model before and after; None if they cannot be counted.
        output: Drift of the model's output; None without calibration images.
        unread: What could not be counted, measured or read.
        new_tensors: Parameters that the model trains and did not have before.
        silent_hooks: Paths of replaced modules whose forward hooks no longer run.
        swapped: The model itself, with its new mixers; None of a report that was read.
    """

    model: str
    host: str
    init: str
    estimate: str | None
    rows: tuple[LayerRow, ...]
    untouched: tuple[Untouched, ...]
    params: tuple[int, int]
    macs: tuple[int, int] | None
    output: OutputDrift | None
    unread: tuple[str, ...] = ()
    new_tensors: int = 0
    silent_hooks: tuple[str, ...] = ()
    swapped: Any = field(default=None, compare=False)

    name = "swap"
    templates = "keymix.swap"

    def omitted(self) -> tuple[str, ...]:
        """A file has no model."""
        return ("swapped",)

    @property
    def data(self) -> dict[str, Any]:
        """Everything but the model."""
        return dict(to_json(self))

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of single layers, and what could not be counted or read."""
        of_rows = (f"{row.path}: {note}" for row in self.rows for note in row.notes)
        return (*of_rows, *self.unread)

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each swapped layer."""
        drifts = _DRIFT_COLUMNS if self.output is not None else ()
        rows = [self._cells(row) for row in self.rows]
        columns = (*_COLUMNS, *drifts)
        title, note = "What became of each block", "; ".join(self.notes)
        return {"layers": Table("layers", title, columns, rows, note=note)}

    def _cells(self, row: LayerRow) -> Sequence[Any]:
        drifts = _DRIFTS if self.output is not None else ()
        return [
            f"{row.block} ({row.path})",
            *(row.block, row.path, row.before, row.after),
            *(" ".join(getattr(row, name)) for name in _NAMED),
            *(row.params[0], _change(row.params)),
            *(row.macs and row.macs[0], _change(row.macs)),
            *(getattr(row.drift, name, None) for name in drifts),
        ]

    @property
    def figures(self) -> dict[str, Chart]:
        """How far each swapped block moved, where that was measured."""
        drawn = {}
        for key, label, about in (
            ("output", "change of the output, %", "Root mean square of the change over the output"),
            ("map", "change of the map, %", "Half the sum of absolute changes: 0 alike, 100 apart"),
        ):
            found = [
                (row.block, value)
                for row in self.rows
                if (value := getattr(row.drift, key, None)) is not None
            ]
            if not found:
                continue
            after = "/".join(dict.fromkeys(row.after for row in self.rows))
            xs, ys = zip(*found, strict=True)
            draw = partial(
                curves,
                lines=[Line(after, looks([after])[after], xs, ys)],
                x_label="block",
                y_label=label,
                percent=True,
                holds=(0.0,),
            )
            drawn[key] = Chart(
                key, f"Each swapped block, given the original’s tokens. {about}.", draw
            )
        return drawn
