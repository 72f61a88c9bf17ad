# SPDX-License-Identifier: Apache-2.0
"""The page is complete in itself, escapes every text, and shows what the record says."""

from __future__ import annotations

import html.parser
import json
import re

import jinja2
import pytest
from synthetic import ACCURACY, OTHER_MACHINE, lose, make_record, render

from keymix.errors import UserError
from keymix.report.page import digest

pytestmark = pytest.mark.usefixtures("undrawn")

VOID = {"meta", "link", "img", "br", "wbr", "input"}


class Reader(html.parser.HTMLParser):
    """Collects tags, addresses and text, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def words(page: str) -> str:
    return " ".join(" ".join(read(page.replace("<wbr>", "")).text).split())


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_record())


def test_tags_nest(page):
    assert read(page).open == []


@pytest.mark.usefixtures("drawn")
def test_templates_are_compiled_once_a_process(page, monkeypatch):
    monkeypatch.setattr(jinja2.Environment, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert render(make_record()) == page


def test_page_asks_nothing_of_the_network(page):
    reader = read(page)
    assert reader.addresses
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert "@import" not in page
    assert not re.search(r"url\((?!['\"]?(data:|#))", page)


def test_the_policy_lets_the_page_s_own_script_run_and_nothing_else(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy[1]).split(";"))
    stored, code = read(page).scripts
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert rules["script-src"] == f"'{digest(code)}'"
    assert json.loads(stored)["baseline"] == "softmax"


def test_page_shows_the_verdicts_the_numbers_and_the_record(page):
    record = make_record()
    text = words(page)
    for row in record["outcome"]["last"]:
        assert f"{row['top1']['mean'] * 100:.1f}" in text
    for word in (
        record["command"],
        record["environment"]["packages"],
        "0123abcd",
        "With 3 seeds a difference is provisional at best",
        "static_key: −",
        "against softmax (95 %",
        "Obuchowski and Rockette",
        "1,000 images train, 100 validate, 360 test",
    ):
        assert word in text


EVIL = "<script>alert('x')</script>&\"'"


def evil_record() -> dict:
    """Make a record in which every text tries to be more than text."""
    names = (EVIL, '"><img src=x onerror=alert(1)>', "</script><script>alert(2)</script>")
    accuracy = {"softmax": 0.9, EVIL: 0.8, "identity": 0.4, "gone": 0.7}
    record = make_record(accuracy=accuracy, classes=(*names, "]]>"))
    for key in ("command", "created"):
        record[key] = EVIL
    record["cannot_sit"] = [EVIL]
    record["data"] |= {"spec": EVIL, "notes": [EVIL]}
    record["data_check"] = {
        "findings": [
            {"level": "warning", "what": EVIL, "count": 1, "where": [EVIL], "remedy": EVIL}
        ],
        "too_narrow": True,
        "looked_at": {},
        "not_looked_at": [EVIL],
    }
    record["environment"][EVIL] = EVIL
    record["trained_with"][0] = {EVIL: EVIL}
    record["recipe"]["model"]["options"][EVIL] = EVIL
    record["data"]["left_out"] = [{"id": EVIL, "reason": EVIL}]
    lose(record, EVIL, 0, "failed", EVIL)
    for seed in range(3):
        lose(record, "gone", seed, "missing", EVIL)
    record["attention"]["images"][0] |= {"label": EVIL, "id": EVIL}
    record["attention"]["missing"]["identity"] = EVIL
    record["attention"]["layers"] = [f"{EVIL} {i}" for i in range(4)]
    record["collapse"]["pairs"] = [EVIL, "2–3", "3–4"]
    record["collapse"]["missing"] = {"identity": EVIL}
    for cost in record["costs"].values():
        cost["note"] = EVIL
    for mixer in record["mixers"]:
        mixer["note"] = EVIL
    return record


def test_every_text_of_the_record_is_escaped():
    page = render(evil_record())
    reader = read(page)
    assert reader.open == []
    assert reader.tags.count("script") == page.count("<script") == 2
    assert "onerror" not in " ".join(reader.scripts[1:])
    assert not re.search(r"<img[^>]*onerror", page)
    assert words(page).count("alert('x')") > 30
    assert EVIL in json.loads(reader.scripts[0])["classes"]["names"]


def test_a_class_named_like_a_mixer_is_no_mixer():
    page = render(make_record(classes=["identity", "softmax", "cat"]))
    for name in ("identity", "softmax", "cat"):
        assert f'<th scope="row" data-value="{name}"><bdi>{name}</bdi></th>' in page


def test_an_attention_image_that_is_no_picture_is_refused():
    record = make_record()
    record["attention"]["images"][1]["png"] = 'data:image/png;base64,AAAA"); } body { x: url("y'
    with pytest.raises(UserError, match="row 1"):
        render(record)


def test_every_mixer_has_its_chart_points_and_maps(page):
    assert len(re.findall(r'<svg [^>]*role="img"', page)) == 9
    for label in ACCURACY:
        assert page.count(f">{label}<") >= 4
    mapped = [m for m in ACCURACY if m != "identity"]
    assert page.count('class="heat"') == len(mapped) * 4 * 2


def test_failed_and_missing_runs_are_named_in_words_and_never_as_figures():
    record = make_record()
    lose(record, "re_attention", 2, "failed", "RuntimeError: out of luck")
    for seed in range(3):
        lose(record, "key_value", seed, "missing", "it was not started")
    page = render(record)
    text = words(page)
    assert "1 of 18 runs failed" in text
    assert "3 of 18 runs are not finished" in text
    assert "re_attention , seed 2: RuntimeError: out of luck" in text
    assert "14 of 18 runs finished" in text
    assert "not finished : it was not started" in text
    assert "Not drawn, since no run finished: key_value" in text
    accuracy = page.split("Scores after the last epoch</caption>")[1].split("</table>")[0]
    row = accuracy.split('data-value="key_value"')[1].split("</tr>")[0]
    assert "no run finished" in row
    assert "0 of 3" in row
    assert not re.search(r">\s*0\.0", row)
    assert "2 of 3" in accuracy.split('data-value="re_attention"')[1].split("</tr>")[0]


def test_a_comparison_of_which_nothing_finished_is_still_a_page():
    record = make_record(seeds=1)
    for mixer in ACCURACY:
        lose(record, mixer, 0, "failed", "OSError: disk full")
    record["attention"] = record["collapse"] = None
    record["trained_with"] = []
    text = words(render(record))
    assert "6 of 6 runs failed" in text
    assert "0 of 6 runs finished" in text
    assert "By class" not in text


def test_unlike_environments_are_shown_with_what_differs(page):
    text = words(page)
    assert "Different: packages, machine." in text
    assert "softmax seeds 0, 2" in text
    for line in (OTHER_MACHINE["packages"], OTHER_MACHINE["machine"]):
        assert f'<dd class="differs">{line}</dd>' in page
    assert f"<dd>{OTHER_MACHINE['python']}</dd>" in page


def test_images_left_out_are_counted_and_named():
    record = make_record()
    assert "1 image that could not be read" in words(render(record))
    record["data"]["left_out_count"] = 1234
    text = words(render(record))
    assert "1,234 images that could not be read" in text
    assert "The first 1 7/torn.png : broken PNG file" in text
    record["data"] |= {"left_out": [], "left_out_count": 0}
    assert "could not be read" not in words(render(record))


def test_a_record_without_maps_costs_or_spread_renders():
    record = make_record(seeds=1)
    record["attention"] = record["collapse"] = None
    for cost in record["costs"].values():
        cost.update(dict.fromkeys(("macs", "latency_ms", "latency_low_ms", "peak_mib")))
    page = render(record)
    assert "Where they look" not in page
    assert not re.search(r"\d ± \d", words(page))


def test_a_model_of_two_blocks_has_no_similarity_to_follow():
    record = make_record()
    record["collapse"]["pairs"] = ["1–2"]
    record["collapse"]["similarity"] = {m: [0.437] for m in record["collapse"]["similarity"]}
    assert "Do deep layers repeat themselves?" not in render(record)


def test_mixers_without_maps_have_their_reason_once_and_an_empty_section_is_left_out():
    record = make_record()
    why = "they cut the image into other windows"
    missing = {m["label"]: why for m in record["mixers"]} | {"identity": "it forms no map"}
    similar = {"softmax": record["collapse"]["similarity"]["softmax"]}
    missing.pop("softmax")
    record["collapse"] |= {"similarity": similar, "missing": missing}
    section = words(render(record)).partition("Do deep layers repeat themselves?")[2]
    assert section.count(why) == 1  # with all labels that it holds for
    assert "static_key , conv_static_key" in section.partition(why)[0]
    assert "identity : it forms no map" in section
    record["collapse"]["similarity"] = {}
    assert "Do deep layers repeat themselves?" not in render(record)


def test_equal_differences_show_a_dash_and_the_reason():
    record = make_record()
    note = "the difference is the same at every seed, so its spread cannot be estimated"
    row = next(r for r in record["outcome"]["last"] if r["mixer"] == "static_key")
    row["seeds"] |= {"low": None, "high": None, "p": None, "p_holm": None, "note": note}
    page = render(record)
    section = words(page).partition("After the last epoch")[2].partition("best on validation")[0]
    assert f"– over seeds of static_key : {note}." in section
    assert "over seeds of static_key" not in words(render(make_record()))
    one = make_record(seeds=1)
    assert "– over seeds of" not in words(render(one))  # the caution says it of all


@pytest.mark.usefixtures("drawn")
def test_rendering_is_deterministic():
    assert render(make_record()) == render(make_record())


def test_five_seeds_show_no_caution():
    assert "provisional at best" in render(make_record(4))
    assert "provisional at best" not in render(make_record(5))


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, as WCAG 2.2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_names_in_the_colours_of_mixers_can_be_read_in_both_themes():
    style = render(make_record()).partition("</style>")[0]
    themes = re.findall(r"--paper: (#\w+);(.*?)--accent", style, re.DOTALL)
    assert len({paper for paper, _ in themes}) >= 2
    for given, colours in themes:
        paper = given if len(given) == 7 else "#ffffff"  # of the print
        found = re.findall(r"--(c\d|ctl|ref|soft): (#\w{6})", colours)
        assert len(found) >= 10
        for name, colour in found:
            light, dark = sorted((luminance(paper), luminance(colour)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, colour, paper)
