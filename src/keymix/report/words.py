# SPDX-License-Identifier: Apache-2.0
"""The sentences on a comparison, for page, terminal and notes: macros of ``*.txt.j2``, as text."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keymix.analysis.certainty import CLEAR_SEEDS, PROVISIONAL_SEEDS
from keymix.data.record import counts_left_out
from keymix.report import formats
from keymix.report.page import environment
from keymix.report.part import page_of
from keymix.report.record import Finding, Results
from keymix.report.wording import control_name, unit_of


def say(name: str, *about: Any, **more: Any) -> str:
    """Write a macro of the sentences on one line; empty where it says nothing."""
    return " ".join(said(name, *about, **more))


def said(name: str, *about: Any, **more: Any) -> list[str]:
    """Write a macro of the sentences, a text for each line that is not empty."""
    text = getattr(_sentences(), name)(*about, **more)
    lines = (re.sub(r" +", " ", line).strip(" ") for line in text.split("\n"))
    return [line for line in lines if line]


@functools.cache
def _sentences() -> Any:
    names = {
        "CLEAR": CLEAR_SEEDS,
        "FEWEST": PROVISIONAL_SEEDS,
        "formats": formats,
        "control_name": control_name,
        "finding": finding_text,
        "unit_of": unit_of,
        "page_of": page_of,
        "left_out": counts_left_out,
    }
    return environment().get_template("words.txt.j2").make_module(names)


# ---- findings, and the first screen ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FindingText:
    """A finding in words, with commands between backticks; `remedy` is what to do about it."""

    kind: str
    heading: str
    text: str
    remedy: str


def finding_text(record: Results, finding: Finding) -> FindingText:
    """Say a finding."""
    heading, text, remedy = _paragraphs(record, "findings.txt.j2", finding.kind, finding.numbers)
    return FindingText(kind=finding.kind, heading=heading, text=text, remedy=remedy)


def sentence(record: Results, name: str, *values: object) -> str:
    """Say a sentence of the first screen, by the name of its macro."""
    return " ".join(_paragraphs(record, "answer.txt.j2", name, *values))


def _paragraphs(record: Results, template: str, name: str, *values: object) -> list[str]:
    """Render a macro of a template as plain text, and part it where a line is empty."""
    score, unit, kind = record.task_kind.score, unit_of(record.data), record.data.kind
    limited = record.data.limit is not None
    more = "--limit" if limited else "--data.test_fraction" if record.data.test_fraction else ""

    def ends(found: Any) -> str:
        low, high = (
            (found["low"], found["high"]) if isinstance(found, Mapping) else (found.low, found.high)
        )
        return formats.span(low, high, score) if low is not None else "no interval"

    words = {
        "score": score,
        "baseline": record.baseline,
        "margin": record.margin,
        "found": record.found,
        "blind_baseline": "baseline_at_chance" in record.found,
        "nothing": {"nothing_learned", "one_unit"} & {*record.found},
        "unit": unit,
        "units": f"{unit}s",
        "input": kind.noun,
        "inputs": kind.nouns,
        "more_test": more,
        "clear_seeds": CLEAR_SEEDS,
        "least_seeds": PROVISIONAL_SEEDS,
        "points": lambda difference: score.changed(difference, sign=False),
        "signed": score.changed,
        "ends": ends,
        "seeds": formats.seeds,
        "share": formats.share,
        "listing": formats.listing,
        "control": control_name,
    }
    module = environment().get_template(template).make_module(words)
    text = getattr(module, name)(*values).strip()
    return [re.sub(r"[ \n]+", " ", part).strip() for part in re.split(r"\n\s*\n", text)]
