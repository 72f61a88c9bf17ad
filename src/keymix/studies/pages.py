# SPDX-License-Identifier: Apache-2.0
"""What the pages of all studies share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from keymix.analysis.study_record import StudyRecord
from keymix.report.page import as_element_text, render_page
from keymix.report.plots import Look


def render_study(
    package: str | None, record: StudyRecord, looks: Mapping[str, Look], **view: Any
) -> str:
    """Render ``templates/page.html.j2`` of a study's folder."""
    entries = [{"label": label, "colour": look.colour} for label, look in looks.items()]
    return render_page(
        "own/page.html.j2",
        {"r": record, "looks": looks, **view},
        payload=as_element_text({"mixers": entries}),
        scripts=("core", "tables"),
        package=package or "",
    )


def file_words(labels: Iterable[str]) -> dict[str, str]:
    """Return for each label a word that is fit for a file's name, no two alike."""
    words: dict[str, str] = {}
    for label in labels:
        word = plain = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
        number = 1
        while word in words.values():
            number += 1
            word = f"{plain}-{number}"
        words[label] = word
    return words
