# SPDX-License-Identifier: Apache-2.0
"""The sentences on a comparison, for page, terminal and notes: macros of ``words.j2``, as text."""

from __future__ import annotations

import functools
import re
from typing import Any

import jinja2

from keymix.analysis.certainty import CLEAR_SEEDS, PROVISIONAL_SEEDS
from keymix.data.record import counts_left_out
from keymix.report import formats
from keymix.report.part import page_of
from keymix.report.wording import control_name, unit_of
from keymix.report.wording import said as finding


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
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("keymix.report", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    env.globals.update(
        CLEAR=CLEAR_SEEDS,
        FEWEST=PROVISIONAL_SEEDS,
        formats=formats,
        control_name=control_name,
        finding=finding,
        unit_of=unit_of,
        page_of=page_of,
        left_out=counts_left_out,
    )
    return env.get_template("words.j2").module
