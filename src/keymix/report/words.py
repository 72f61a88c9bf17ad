# SPDX-License-Identifier: Apache-2.0
"""The sentences on a comparison, for page, terminal and notes: macros of ``*.txt.j2``, as text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from keymix.analysis.certainty import CLEAR_SEEDS, PROVISIONAL_SEEDS
from keymix.data.kinds import IMAGE
from keymix.data.record import DataRecord, counts_left_out
from keymix.report import formats
from keymix.report.page import environment, paragraphs
from keymix.report.part import page_of
from keymix.report.record import Finding, Results


def say(name: str, *about: Any, **more: Any) -> str:
    """Write a macro of the sentences on one line; empty where it says nothing."""
    return " ".join(said(name, *about, **more))


def said(name: str, *about: Any, **more: Any) -> list[str]:
    """Write a macro of the sentences, a text for each line that is not empty."""
    text = getattr(_sentences(), name)(*about, **more)
    lines = (re.sub(r" +", " ", line).strip(" ") for line in text.split("\n"))
    return [line for line in lines if line]


def unit_of(data: DataRecord) -> str:
    """Return the noun of what chance is of on a test split; an image is called as its kind is."""
    unit = data.task_kind.unit
    return data.kind.noun if unit == IMAGE.noun else unit


def control_name(label: str) -> str:
    """Name a control by what it is: ``no mixing at all (identity)``, ``the control random``."""
    return "no mixing at all (identity)" if label == "identity" else f"the control {label}"


def _module(template: str, **more: object) -> Any:
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
    return environment().get_template(template).make_module(names | more)


_sentences = functools.cache(functools.partial(_module, "words.txt.j2"))


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
    macro = getattr(_module("findings.txt.j2", r=record), finding.kind)
    heading, text, remedy = paragraphs(macro, finding.numbers)
    return FindingText(kind=finding.kind, heading=heading, text=text, remedy=remedy)


def sentence(record: Results, name: str, *values: object) -> str:
    """Say a sentence of the first screen, by the name of its macro."""
    return " ".join(paragraphs(getattr(_module("answer.txt.j2", r=record), name), *values))
