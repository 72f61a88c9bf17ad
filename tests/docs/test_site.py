# SPDX-License-Identifier: Apache-2.0
"""The documentation builds strictly, and nobody but its own host is asked when it is read."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from runpy import run_path

import pytest
import yaml
from documents import DOCS, ROOT

BROWSER = run_path(str(ROOT / "tests" / "report" / "browser.py"))
LOADS = {"src", "srcset", "data", "poster", "background", "manifest"}
"""Attributes whose address is loaded with the page; that of a link loads for these kinds."""
LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
ASKS = {"source"}
"""Components of the theme whose script asks other hosts: for the stars of a repository."""
_ELSEWHERE = re.compile(r"(?:https?:)?//")
_IN_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")


class Loaded(HTMLParser):
    """What a page loads from elsewhere when it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = LOADS - ({"data"} if tag != "object" else set())
        if tag == "link" and LINKS & set(given.get("rel", "").split()):
            names = names | {"href"}
        for name in names & given.keys():
            if _ELSEWHERE.match(given[name]):
                self.found.append(f"{tag} {name}={given[name]}")
        self.found += _IN_CSS.findall(given.get("style", ""))
        if given.get("data-md-component") in ASKS:
            self.found.append(f"the theme's {given['data-md-component']}")


def loaded_from_elsewhere(text: str) -> list[str]:
    parser = Loaded()
    parser.feed(text)
    return parser.found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('<script src="https://cdn.example/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example/css">', 1),
        ('<link rel="preconnect" href="https://fonts.example" crossorigin>', 1),
        ('<img srcset="https://a.example/x.png 2x" src="x.png">', 1),
        ("<div style=\"background: url('https://a.example/x.png')\">", 1),
        ('<a data-md-component="source" href="https://code.example">', 1),
        ('<a href="https://arxiv.org/abs/1">paper</a><img src="data:,"><script src="x.js">', 0),
        ('<link rel="canonical" href="https://a.example">', 0),
    ],
)
def test_what_a_page_loads_is_seen(text: str, count: int) -> None:
    assert len(loaded_from_elsewhere(text)) == count


def test_the_hook_leaves_links_and_takes_what_asks_other_hosts() -> None:
    hook = run_path(str(DOCS / "_site" / "offline.py"))["on_post_page"]
    page = '<a href="https://code.example" class="md-source" data-md-component="source">code</a>'
    assert not loaded_from_elsewhere(hook(page))
    assert 'href="https://code.example"' in hook(page)


def test_every_page_has_one_place_in_the_navigation() -> None:
    class Loose(yaml.SafeLoader):
        """Reads the file without the tags of its plugins."""

    Loose.add_multi_constructor("", lambda loader, tag, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loose)["nav"]
    assert [next(iter(each)) for each in nav if isinstance(each, dict)] == [
        "Start",
        "Guides",
        "Concepts",
        "Results",
        "Reference",
    ]

    def pages(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        for each in node if isinstance(node, list) else []:
            yield from pages(each)
        for each in node.values() if isinstance(node, dict) else []:
            yield from pages(each)

    listed = list(pages(nav))
    assert sorted(listed) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site, and give its address."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    found = {str(path): loaded_from_elsewhere(path.read_text("utf-8")) for path in pages}
    found |= {str(path): _IN_CSS.findall(path.read_text("utf-8")) for path in site.rglob("*.css")}
    assert not {path: what for path, what in found.items() if what}


@pytest.mark.slow
def test_a_reader_asks_the_sites_own_host_alone(site: Path) -> None:
    with served(site) as own, BROWSER["started"]() as driver:
        for page in ("index.html", "mechanisms/static_key/index.html", "gallery/index.html"):
            driver.get_log("performance")
            driver.get(own + page)
            asked = BROWSER["asked"](driver)
            assert own + page in asked
            assert not [a for a in asked if not a.startswith((own, "data:", "blob:"))]


def test_formulas_of_docstrings_are_drawn() -> None:
    rewrite = run_path(str(DOCS / "_site" / "mathematics.py"))["on_page_content"]
    code = '<div class="highlight"><pre><span></span><code>a = \\frac{1}{2}\n</code></pre></div>'
    for page in (f"<p>.. math::</p>\n{code}", "<p>.. math:: a = b</p>", "<p>.. math::\n    a</p>"):
        made = rewrite(page)
        assert made.startswith("<math")
        assert "<code>" not in made
        assert "</p>" not in made
    assert rewrite(f"<p>.. math:: a</p>\n{code}").endswith(code)  # code after it is no formula


def test_no_table_has_a_column_without_a_name() -> None:
    line = re.compile(r"^\|(.*)\|$\n\|[-:| ]+\|$", re.MULTILINE)
    for path in DOCS.rglob("*.md"):
        for found in line.finditer(path.read_text(encoding="utf-8")):
            names = [name.strip() for name in re.split(r"(?<!\\)\|", found[1])]
            assert all(names), f"{path.name}: {found[0]}"


@pytest.mark.slow
def test_what_the_theme_leaves_out_is_named_and_in_reach_of_the_keyboard(site: Path) -> None:
    names = "return [...document.querySelectorAll('nav')].map((each) => each.ariaLabel)"
    unreached = (
        "return [...document.querySelectorAll('.md-typeset__scrollwrap, pre > code')].filter("
        "(each) => each.scrollWidth > each.clientWidth && each.tabIndex < 0).length"
    )
    with served(site) as own, BROWSER["started"]() as driver:
        BROWSER["look"](driver, width=BROWSER["PHONE"])
        driver.get(f"{own}analyze/index.html")
        BROWSER["wait_until"](driver, "return document.querySelector('.md-code__nav[aria-label]')")
        found = driver.execute_script(names)
        assert len(set(found)) == len(found)
        assert all(found)
        assert driver.execute_script(unreached) == 0
        assert BROWSER["find"](driver, ".md-search").get_attribute("aria-label") == "Search"
