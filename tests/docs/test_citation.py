# SPDX-License-Identifier: Apache-2.0
"""CITATION.cff is read by citation tools, and agrees with the package and the pages."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from documents import DOCS, ROOT

from keymix import __version__


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return found


def test_the_file_has_what_its_format_requires(citation: dict[str, Any]) -> None:
    assert citation["cff-version"] == "1.2.0"
    for entry in (citation, *citation["references"]):
        assert entry["title"]
        assert all(
            "name" in who or {"family-names", "given-names"} <= who.keys()
            for who in entry["authors"]
        )
    assert citation["message"]
    assert citation["type"] == "software"
    assert {entry["type"] for entry in citation["references"]} <= {"article", "conference-paper"}


def test_version_licence_and_name_are_the_packages(citation: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert citation["title"].startswith(project["name"])


def test_the_papers_are_those_of_the_page_on_papers(citation: dict[str, Any]) -> None:
    table = (DOCS / "papers.md").read_text(encoding="utf-8").partition("\n## ")[0]
    linked = set(re.findall(r"arxiv\.org/abs/([\d.]+)", table))
    cited = {entry["url"].rpartition("/")[2] for entry in citation["references"]}
    assert cited == linked
    assert len(cited) == 4
