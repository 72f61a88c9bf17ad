# SPDX-License-Identifier: Apache-2.0
"""What a swap did, one row per layer: origin of every weight, cost before and after, drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keymix.records import to_json

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


@dataclass(frozen=True, kw_only=True)
class SwapReport:
    """What a swap did.

    Attributes:
        model: The model's class.
        host: What errors call its family.
        init: ``"transfer"`` or ``"fresh"``.
        estimate: ``"least_squares"`` or ``"mean"``; None where no keys were estimated.
        rows: The swapped layers, in the model's order.
        untouched: The others.
        params: Parameters of the whole model before and after.
        macs: Multiply-adds of the whole model before and after; None if they cannot be counted.
        output: Drift of the model's output; None without calibration images.
        notes: What there is to say of all of it.
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
    notes: tuple[str, ...] = ()
    swapped: Any = field(default=None, repr=False, compare=False)

    def omitted(self) -> tuple[str, ...]:
        """A file has no model."""
        return ("swapped",)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it."""
        return dict(to_json(self))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows of text, for a terminal; a dash where there is nothing to say."""
        heads = ["layer", "was", "is", "copied", "estimated", "fresh", "dropped", "params", "MACs"]
        drifts = ["logits", "map", "output"] if self.output is not None else []
        lines = [
            [
                row.path,
                row.before,
                row.after,
                *(_names(n) for n in (row.copied, row.estimated, row.fresh, row.dropped)),
                _pair(row.params),
                _pair(row.macs),
                *(_share(getattr(row.drift, name, None)) for name in drifts),
            ]
            for row in self.rows
        ]
        return [*heads, *(f"drift of {name}" for name in drifts)], lines

    def __str__(self) -> str:
        """The table, and what it does not say, in lines."""
        heads, lines = self.table()
        named = self.host if self.host.endswith(f" {self.model}") else f"{self.model} ({self.host})"
        text = [
            f"{named}: {len(self.rows)} of "
            f"{len(self.rows) + len(self.untouched)} layers swapped, init={self.init}",
            *_columns([heads, *lines]),
            f"whole model: parameters {_pair(self.params)}, MACs {_pair(self.macs)}",
        ]
        if self.output is not None and self.output.varies:
            agreement = self.output.top1_agreement
            same = "" if agreement is None else f"same class on {agreement:.1%}, "
            text.append(
                f"on {self.output.images} calibration images: {same}"
                f"output moved by {_share(self.output.relative)}"
            )
        text += [f"{row.path}: {note}" for row in self.rows for note in row.notes]
        text += self.notes
        text += [f"{each.path} ({each.what}) untouched: {each.why}" for each in self.untouched]
        return "\n".join(text)


def _names(names: Sequence[str]) -> str:
    return " ".join(names) or "-"


def _pair(pair: tuple[int, int] | None) -> str:
    return "-" if pair is None else f"{pair[0]:,} → {pair[1]:,}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
