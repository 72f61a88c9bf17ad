# SPDX-License-Identifier: Apache-2.0
"""Every mixer has its page, and the numbers on the pages are counted again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import DOCS, ROOT, prose, table

import keymix
from each import each
from keymix.errors import GridNeeded
from keymix.mixers.registry import aliases_of, get_mixer_class
from keymix.mixers.site import Site
from keymix.mixers.user_mixers import RULES

HEADINGS = ["Idea", "Equation", "Cost", "When to use and when not", "Measured"]
PAGES = sorted(p for p in (DOCS / "mechanisms").glob("*.md") if p.stem != "index")
SPEED = (DOCS / "results" / "speed.md").read_text(encoding="utf-8")
INDEX = (DOCS / "mechanisms" / "index.md").read_text(encoding="utf-8")


def own_mixers(domain: str | None = None) -> list[str]:
    """The mixers of keymix itself; a test or a user may have registered more."""
    return [
        name
        for name in keymix.list_mixers(domain=domain)
        if get_mixer_class(name).__module__.startswith("keymix.mixers.")
    ]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_every_mixer_has_a_page_and_every_page_a_mixer() -> None:
    assert [page.stem for page in PAGES] == own_mixers()


def test_every_page_is_in_the_index_and_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"]({page.name})" in INDEX
        assert f"- mechanisms/{page.name}\n" in navigation


def test_the_index_reports_every_name() -> None:
    for name in own_mixers():
        names = ", ".join(f"`{n}`" for n in (name, *aliases_of(name)))
        assert f"| {names} |" in INDEX


def test_the_index_groups_mixers_by_family() -> None:
    rows = [(row[0], row[2].split(",")[0].strip("`")) for row in table(INDEX, "families -->")]
    assert sorted(name for _, name in rows) == own_mixers()
    assert [family for family, name in rows if get_mixer_class(name).family != family] == []
    families = [family for family, _ in rows]
    assert len(
        [f for f, before in zip(families, ["", *families], strict=False) if f != before]
    ) == len(set(families))  # one run of rows each


def faster_from(name: str) -> str:
    """The fewest tokens at which the table of speed has a mixer faster than fused softmax."""
    section = SPEED.partition("\n## Mixers and self-attention\n")[2].partition("\n## ")[0]
    row = re.search(rf"^\| `{name}`(?:, fused)? \| (.+) \|$", section, re.MULTILINE)
    if name == "softmax" or get_mixer_class(name).traits.domain == "spiking":
        return "–"
    if row is None:
        return "not measured yet"
    ratios = zip(("196", "784", "3,136"), row[1].split(" | ")[:3], strict=True)
    faster = (tokens for tokens, ratio in ratios if "*" not in ratio and float(ratio) < 1)
    return next(faster, "not up to 3,136")


def test_the_index_says_where_each_mixer_fits() -> None:
    rows = {row[0].strip("`"): row[2:] for row in table(INDEX, "traits -->")}
    assert sorted(rows) == own_mixers()
    for name, cells in rows.items():
        try:
            keymix.create_mixer(name, Site(dim=8, num_heads=2))
            needs_grid = False
        except GridNeeded:
            needs_grid = True
        mixer = keymix.create_mixer(
            name, Site(dim=8, num_heads=2, grid=(4, 4), num_prefix_tokens=1)
        )
        claims = mixer.claims
        facts = [needs_grid, claims.maskable, not mixer.tied_to_grid, claims.mixes_prefix]
        facts += [mixer.forms_map(), True]  # test_a_mixer_exports has every one
        assert [cell.startswith("yes") for cell in cells[:-1]] == facts, name
        assert cells[-1] == faster_from(name), name


@each("page", {page.stem: (page,) for page in PAGES})
def test_page_has_the_five_headings_in_order(page: Path) -> None:
    assert re.findall(r"^## (.+)$", prose(page), re.MULTILINE) == HEADINGS


@each("page", {page.stem: (page,) for page in PAGES})
def test_page_reports_names_and_file_of_its_mixer(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in (page.stem, *aliases_of(page.stem)):
        assert f"`{name}`" in text
    assert f"`mixers/{page.stem}.py`" in text
    assert f"`{get_mixer_class(page.stem).__name__}`" in text


@each("page", {page.stem: (page,) for page in PAGES})
def test_measured_numbers_have_their_command(page: Path) -> None:
    measured = prose(page).partition("## Measured")[2].strip()
    assert measured == "Not yet measured." or "keymix " in measured or "../results/" in measured


def test_the_cost_table_has_every_mixer_that_fits_the_model() -> None:
    result = {row[0].strip("`") for row in table(INDEX, "cost-table")}
    assert result == set(own_mixers("dense"))


@pytest.mark.slow
@each("row", {row[0]: (row,) for row in table(INDEX, "cost-table")})
def test_the_cost_table_is_what_count_says(row: list[str]) -> None:
    mixer, *numbers = row
    model = keymix.create_model("vit_micro_p4_32", mixer=mixer.strip("`"))
    cost = keymix.count(model)
    assert [number(cell) for cell in numbers] == [cost.params, cost.macs, cost.activation_bytes]


def test_the_api_pages_report_every_public_name() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    missing = [
        name
        for name in keymix.__all__
        if not name.startswith("_") and not re.search(rf"\b{name}\b", text)
    ]
    assert not missing


def test_the_reference_lists_every_public_name_with_its_page() -> None:
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    listed = []
    for names, page in re.findall(r"^\| (`.+?`) \| .+ \| \[.+\]\((\w+\.md)\) \|$", index, re.M):
        text = (DOCS / "api" / page).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), (name, page)
            listed.append(name)
    assert sorted(listed) == sorted(n for n in keymix.__all__ if not n.startswith("_"))


def test_the_page_of_ones_own_mixers_lists_the_rules() -> None:
    text = (DOCS / "own-mixer.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z_ ]+)` \|", text.partition("| rule |")[2], re.MULTILINE) == [
        rule.name for rule in RULES
    ]


def test_a_picture_of_the_gallery_stands_with_its_command() -> None:
    page = DOCS / "gallery.md"
    sections = page.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) >= 5
    for section in sections:
        assert re.search(r"^!\[[^\]]{20,}\]\(", section, re.MULTILINE)
        assert re.search(r"^keymix (analyze|predict) ", section, re.MULTILINE)
    drawn = list((DOCS / "figures" / "gallery").iterdir())
    linked = re.findall(r"\]\((figures/gallery/[^)]+)\)", page.read_text(encoding="utf-8"))
    assert sorted(path.relative_to(DOCS).as_posix() for path in drawn) == sorted(linked)
    assert sum(path.stat().st_size for path in drawn) < 1_000_000
