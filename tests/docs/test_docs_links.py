# SPDX-License-Identifier: Apache-2.0
"""Links inside the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from documents import DOCUMENTS, ROOT, prose

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_OUTSIDE = re.compile(r"^(https?|mailto):")


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", prose(path), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(re.sub(r"\s+", "-", plain.strip()))
    return found


def broken(path: Path) -> list[str]:
    found = []
    text = re.sub(r"`[^`]*`", "", prose(path))
    for target in _LINK.findall(text):
        if _OUTSIDE.match(target):
            continue
        place, _, anchor = target.partition("#")
        goal = (path.parent / place).resolve() if place else path
        if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            found.append(target)
    return found


def test_internal_links_resolve() -> None:
    assert len(DOCUMENTS) > 20
    found = {str(path.relative_to(ROOT)): broken(path) for path in DOCUMENTS}
    assert not {path: links for path, links in found.items() if links}


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n[a](#page) [b](gone.md) [c](page.md#gone) `[d](x)`\n", "utf-8")
    assert broken(page) == ["gone.md", "page.md#gone"]


def test_the_readme_fits_its_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert len(" ".join(lines).split()) <= 700


def test_contributing_fits_two_screens() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
