# SPDX-License-Identifier: Apache-2.0
"""Charts: what is drawn of what is given, how SVG of it behaves in a page; pictures, quantities."""

from __future__ import annotations

import base64
import io
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from keymix.report import formats, pictures
from keymix.report.charts import (
    Chart,
    Dots,
    Line,
    Point,
    Row,
    axis_of,
    blank,
    curves,
    differences,
    dots,
    front,
    heat_map,
    looks,
    pareto,
    raster,
    strips,
)
from keymix.report.svg import colours, svg
from keymix.task import FRACTION, Score

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["softmax", "static_key", "conv_static_key", "re_attention", "key_value", "identity"]
LOOKS = looks(NAMES, baseline="softmax", controls=["identity"])
TITLES = {"x_label": "x axis", "y_label": "y axis"}


def points_of(xs: list[float], ys: list[float]) -> list[Point]:
    return [Point(n, LOOKS[n], x, y, 0.01) for n, x, y in zip(NAMES, xs, ys, strict=False)]


def axes(draw: Callable[..., object], *what: Any, **more: Any) -> Axes:
    """Draw onto axes of a figure as a notebook has them."""
    ax = Figure().subplots()
    draw(ax, *what, **more)
    return ax


def texts(ax: Axes) -> list[str]:
    """The texts in a chart that are no ticks."""
    return [each.get_text() for each in ax.texts]


def hinted(ax: Axes, hint: str) -> list[Any]:
    """The artists that show a hint beginning so."""
    return [each for each in ax.findobj() if (each.get_gid() or "").startswith(f"hint:{hint}")]


def line_of(*ys: float, label: str = "softmax", **bands: Any) -> Line:
    return Line(label, LOOKS[label], [float(i + 1) for i in range(len(ys))], ys, **bands)


def log_lines(**series: list[float]) -> list[Line]:
    table = looks(list(series), baseline="softmax", controls=["identity", "pooling"])
    return [Line(name, table[name], [10, 100, 1000], ys) for name, ys in series.items()]


ROWS = [
    Row("static_key", LOOKS["static_key"], 0.01, (-0.3, 0.32), (0.0, 0.02), (0.0, 0.01, 0.02)),
    Row("key_value", LOOKS["key_value"], -0.01, None, None),
    Row("identity", LOOKS["identity"], -0.6, (-0.7, -0.5), (-0.65, -0.55)),
]
SCORES = points_of([1, 2, 3, 4, 5, 6], [0.95, 0.94, 0.96, 0.93, 0.94, 0.3])
CHARTS: dict[str, Callable[[Axes], object]] = {
    "pareto": lambda ax: pareto(ax, SCORES, **TITLES, levels={"largest class": 0.93}),
    "curves": lambda ax: curves(
        ax,
        [line_of(0.2, 0.4, low=[0.1, 0.3], high=[0.3, 0.5]), line_of(0.3, 0.5, label="identity")],
        **TITLES,
    ),
    "log": lambda ax: curves(ax, log_lines(ska=[2e6, 5e6, 5e7]), **TITLES, log=True),
    "differences": lambda ax: differences(ax, ROWS, baseline="softmax"),
    "dots": lambda ax: dots(
        ax, ["cat", "dog"], [Dots("ska", LOOKS["static_key"], [1, None])], x_label="x"
    ),
    "heat_map": lambda ax: heat_map(ax, [[1, None], [0.5, 0]], names=["1", "2"], label="block"),
    "raster": lambda ax: (
        blank(ax, 60, 40),
        raster(ax, [[0, 1, 1, 0], [1, 0, 0, 0]], (0, 0, 40, 20)),
    ),
}


# ---- SVG ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_has_the_same_bytes_whatever_a_user_has_set(name: str) -> None:
    made = svg(CHARTS[name], name="n")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "lines.linewidth": 9}):
        assert svg(CHARTS[name], name="n") == made
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", CHARTS)
def test_a_page_colours_it_and_a_file_has_the_colours_of_light_paper(name: str) -> None:
    chart = Chart("k", 'A "chart" <b>', CHARTS[name])
    page, file = ET.fromstring(chart.svg), chart.file
    assert not re.search(r"#[0-9a-f]{6}", chart.svg)
    assert "var(--" in chart.svg
    assert "var(--" not in file
    assert colours()["paper"] in file
    for root in (page, ET.fromstring(file)):
        assert root.get("role") == "img"
        assert root.get("aria-label") == 'A "chart" <b>'
    assert page.get("width") is None  # it is as wide as its column


@pytest.mark.parametrize("name", CHARTS)
def test_texts_stay_texts_inside_the_drawing(name: str) -> None:
    figure: list[Figure] = []
    made = svg(lambda ax: (CHARTS[name](ax), figure.append(ax.figure)), name="n")
    written = {"".join(each.itertext()) for each in ET.fromstring(made).iter(f"{SVG}text")}
    shown = [t for t in figure[0].findobj(Text) if t.get_text() and t.get_visible()]
    inside = figure[0].bbox.padded(1)
    for text in shown:
        box = text.get_window_extent()
        if text.get_text() in written:
            assert inside.contains(box.x0, box.y0), text.get_text()
            assert inside.contains(box.x1, box.y1), text.get_text()
    assert written or name == "raster"


def test_charts_of_a_page_share_no_ids() -> None:
    ids = [
        each
        for name, draw in CHARTS.items()
        for chart in (svg(draw, name=name), svg(draw, name=f"{name}, another"))
        for each in re.findall(r'\bid="([^"]*)"', chart)
    ]
    assert ids
    assert len(set(ids)) == len(ids)
    made = svg(CHARTS["curves"], name="n")
    known = set(re.findall(r'\bid="([^"]*)"', made))
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', made)) <= {
        pair for each in known for pair in ((each, ""), ("", each))
    }


def test_names_are_escaped_and_no_mathematics() -> None:
    line = replace(line_of(1, 2), label="<b>$x$&")
    made = svg(lambda ax: curves(ax, [line], x_label="$<i>$", y_label="y"), name="n")
    root = ET.fromstring(made)
    assert "<b>$x$&" in [each.text for each in root.iter(f"{SVG}title")]
    assert "$<i>$" in [each.text for each in root.iter(f"{SVG}text")]


def test_a_file_names_its_curves_in_a_legend_and_a_page_does_not() -> None:
    chart = Chart("k", "n", CHARTS["curves"])
    for text, there in ((chart.file, True), (chart.svg, False)):
        written = [each.text for each in ET.fromstring(text).iter(f"{SVG}text")]
        assert ({"softmax", "identity"} <= set(written)) == there


# ---- score and cost -------------------------------------------------------------------------


def test_pareto_front_by_hand() -> None:
    points = points_of([1, 2, 3, 4, 1], [0.5, 0.7, 0.6, 0.9, 0.4])
    assert [p.label for p in front(points)] == ["softmax", "static_key", "re_attention"]
    assert len(front(points_of([1, 1], [0.5, 0.5]))) == 1


def test_every_point_is_named_and_says_its_score() -> None:
    ax = axes(pareto, SCORES, **TITLES)
    assert {*NAMES[:-1], "identity (30.0\u00a0%)"} == set(texts(ax))
    assert hinted(ax, "static_key: 94.0\u00a0%")


def test_a_control_far_below_does_not_squash_the_axis_and_ends_the_front() -> None:
    points = [
        Point("softmax", LOOKS["softmax"], 3, 0.95),
        Point("identity", LOOKS["identity"], 1, 0.3),
    ]
    ax = axes(pareto, points, **TITLES)
    low, high = ax.get_ylim()
    assert low > 80
    (arrow,) = [each for each in ax.lines if each.get_marker() == "v"]
    assert low < arrow.get_ydata()[0] < low + 0.1 * (high - low)
    assert ax.get_xlim()[0] < 1
    (dashed,) = [each for each in ax.lines if len(each.get_xdata()) == 2 and each.is_dashed()]
    assert sorted(dashed.get_xdata()) == [1, 3]


DISTANCE = Score(
    key="d", name="distance", short="d", label="distance", better="less", high=None, unit="mm"
)


def test_where_less_is_better_the_front_is_below_and_a_far_control_leaves_at_the_top() -> None:
    points = points_of([1, 2, 3, 4], [2.5, 2.1, 2.3, 1.9])
    assert [p.y for p in front(points, score=DISTANCE)] == [2.5, 2.1, 1.9]
    far = replace(points[0], look=replace(points[0].look, colour="ctl"), y=40.0)
    ax = axes(pareto, [far, *points[1:]], **TITLES, score=DISTANCE)
    assert "softmax (40.0\u00a0mm)" in texts(ax)
    assert [each for each in ax.lines if each.get_marker() == "^"]
    assert ax.get_ylim()[1] < 10
    better = axes(pareto, [replace(far, y=0.1), *points[1:]], **TITLES, score=DISTANCE)
    assert "softmax" in texts(better)


def test_what_is_better_and_cheaper_than_the_baseline_is_shaded() -> None:
    ax = axes(pareto, points_of([3, 1, 2], [0.6, 0.5, 0.7]), **TITLES, baseline="softmax")
    (shade,) = hinted(ax, "better, cheaper")
    box = shade.get_datalim(ax.transData)
    assert (box.x1, box.y0) == pytest.approx((3, 60))
    assert (box.x0, box.y1) == pytest.approx((ax.get_xlim()[0], ax.get_ylim()[1]))


def test_levels_that_coincide_are_named_together_and_far_ones_left_out() -> None:
    levels = {"largest class": 0.94, "logistic regression": 0.94, "chance": 0.1}
    ax = axes(pareto, SCORES[:3], **TITLES, levels=levels)
    assert "largest class, logistic regression" in texts(ax)
    assert "chance" not in "".join(texts(ax))


@pytest.mark.parametrize("seed", range(4))
def test_names_of_crowded_points_do_not_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = points_of(list(1 + 0.1 * rng.random(6)), list(0.9 + 0.01 * rng.random(6)))
    found: list[Axes] = []

    def draw(ax: Axes) -> None:
        pareto(ax, [replace(p, spread=0.1) for p in points], **TITLES)
        found.append(ax)

    svg(draw, name="n")
    boxes = [Text.get_window_extent(each).padded(-1) for each in found[0].texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


# ---- curves ---------------------------------------------------------------------------------


def test_an_axis_includes_what_it_holds_and_ends_at_what_values_can_be() -> None:
    near = axes(curves, [line_of(0.94, 0.96)], **TITLES)
    assert near.get_ylim()[0] > 0.9
    held = axes(curves, [line_of(0.94, 0.96)], **TITLES, holds=(0.0, 1.0))
    assert held.get_ylim()[0] == 0
    assert held.get_ylim()[1] >= 1
    line = line_of(0.97, 0.98, low=[0.9, 0.9], high=[1.04, 1.06])
    cut = axes(curves, [line], **TITLES, percent=True, within=(0.0, 1.0))
    assert cut.get_ylim()[1] == 100


def test_bands_and_curves_are_where_their_values_are() -> None:
    ax = axes(curves, [line_of(0.2, 0.4, low=[0.1, 0.3], high=[0.3, 0.5])], **TITLES, percent=True)
    (band,) = [c for c in ax.collections if c.get_alpha() is not None]
    box = band.get_datalim(ax.transData)
    assert (box.y0, box.y1) == pytest.approx((10, 50))
    (curve, points) = hinted(ax, "softmax")
    assert curve.get_ydata() == pytest.approx([20, 40])
    assert points.get_ydata() == pytest.approx([20, 40])


def test_points_are_marked_while_they_are_few_and_epochs_are_whole() -> None:
    assert len(hinted(axes(curves, [line_of(*range(12))], **TITLES), "softmax")) == 2
    assert len(hinted(axes(curves, [line_of(*range(40))], **TITLES), "softmax")) == 1
    one = axes(curves, [line_of(0.5)], **TITLES)
    assert [each.get_marker() for each in hinted(one, "softmax")][1] == "o"
    for ax in (one, axes(curves, [line_of(1, 2, 3)], **TITLES)):
        assert all(tick == round(tick) for tick in ax.get_xticks())


# ---- intervals ------------------------------------------------------------------------------


def test_strips_are_one_for_each_mixer_and_survive_missing_intervals() -> None:
    drawn = {name: ET.fromstring(chart) for name, chart in strips(ROWS).items()}
    assert list(drawn) == ["static_key", "key_value", "identity"]
    assert {each.get("aria-hidden") for each in drawn.values()} == {"true"}


def test_differences_have_both_intervals_every_seed_and_arrows_beyond_the_axis() -> None:
    ax = axes(differences, ROWS, baseline="softmax")
    low, high = axis_of(ROWS)
    assert ax.get_xlim() == (low, high)
    assert low > -0.1  # the control does not squash the rest
    first = [each for each in ax.lines if list(each.get_ydata())[:1] == [0.0]]
    spans = [list(each.get_xdata()) for each in first if len(each.get_xdata()) == 2]
    assert [0.0, 0.02] in spans
    assert [low, high] in spans  # over few seeds, cut at both ends
    assert [0.0, 0.01, 0.02] in [list(each.get_xdata()) for each in first]
    arrows = [(e.get_marker(), e.get_ydata()[0]) for e in ax.lines if e.get_marker() in ("<", ">")]
    assert arrows == [("<", 0.0), (">", 0.0), ("<", 2)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["static_key", "key_value", "identity"]


def test_an_axis_of_differences_holds_a_near_control() -> None:
    near = Row("identity", LOOKS["identity"], -0.03, (-0.04, -0.02), (-0.035, -0.025))
    low, high = axis_of([ROWS[1], near])
    assert low < -0.04 < 0 < high
    low, high = axis_of([Row("key_value", LOOKS["key_value"], 0.0, None, None)])
    assert low < 0 < high


# ---- rows, squares --------------------------------------------------------------------------


def test_dots_lie_in_the_row_of_their_name_with_their_interval() -> None:
    series = [
        Dots("a", LOOKS["softmax"], [1.0, None], [(0.5, 2.0), None]),
        Dots("b", LOOKS["key_value"], [3.0, 4.0]),
    ]
    ax = axes(dots, ["cat", "dog"], series, x_label="x")
    places = {each.get_gid(): each for each in ax.findobj() if "hint:" in (each.get_gid() or "")}
    assert {gid.removeprefix("hint:") for gid in places} == {"a, cat: 1", "b, cat: 3", "b, dog: 4"}
    rows = {gid: round(each.get_ydata()[0]) for gid, each in places.items()}
    assert list(rows.values()) == [0, 0, 1]
    assert places["hint:a, cat: 1"].get_ydata()[0] != places["hint:b, cat: 3"].get_ydata()[0]
    assert [0.5, 2.0] in [list(each.get_xdata()) for each in ax.lines]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["cat", "dog"]


def test_heat_maps_are_opaque_by_value_and_grey_where_there_is_none() -> None:
    values = [[1.0, 0.25], [None, -0.5]]
    ax = axes(
        heat_map, values, names=["a", "b"], label="block", high=1.0, signed=True, numbers=True
    )
    mesh = ax.collections[0]
    mesh.update_scalarmappable()
    shown = [matplotlib.colors.to_hex(each[:3]) for each in mesh.get_facecolor()]
    known = colours()
    assert shown == [known["c1"], known["c1"], known["grid"], known["c0"]]
    assert [each[3] for each in mesh.get_facecolor()] == pytest.approx([1, 0.25, 1, 0.5], abs=0.03)
    assert "−0.50" in texts(ax)
    plain = axes(heat_map, [[-0.5]], names=["a"], label="block").collections[0]
    plain.update_scalarmappable()
    assert plain.get_facecolor()[0][3] == 0


def test_a_raster_has_a_box_for_each_run_of_spikes() -> None:
    ax = axes(raster, [[1, 1, 0, 1], [0, 1, 1, 1]], (10, 0, 40, 20))
    boxes = [p.get_extents().bounds for p in ax.patches[0].get_path()._iter_connected_components()]
    assert boxes == [(10, 0, 20, 10), (40, 0, 10, 10), (20, 10, 30, 10)]
    assert len(axes(raster, [[0, 0, 0, 0]], (10, 0, 40, 20)).patches) == 2


# ---- looks ----------------------------------------------------------------------------------


def test_every_mixer_has_a_marker_of_its_own():
    names = [f"mixer_{i}" for i in range(8)]
    controls = ["identity", "pooling"]
    both = looks([*names, *controls, "plain"], controls=controls, references=["plain"])
    assert len({(look.marker, look.colour == "ctl") for look in both.values()}) == 11


def test_looks_are_distinct_and_baseline_and_controls_stand_apart():
    assert len({(look.colour, look.marker) for look in LOOKS.values()}) == len(NAMES)
    assert LOOKS["softmax"].colour == "ink"
    assert LOOKS["identity"].colour == "ctl"
    both = looks(
        ["a", "identity", "plain network"], controls=["identity"], references=["plain network"]
    )
    assert len({each.colour for each in both.values()}) == 3
    assert [each.neutral for each in both.values()] == [False, True, True]


def test_a_mixer_has_one_colour_whatever_is_next_to_it() -> None:
    found = looks(["pooling", "key_value", "static_key"], controls=["pooling"])
    again = looks(["static_key", "re_attention", "key_value"], baseline="softmax")
    for name in ("key_value", "static_key"):
        assert found[name].colour == again[name].colour
    of_runs = looks(["runs/a", "runs/b"], mixers={"runs/a": "key_value", "runs/b": "static_key"})
    assert of_runs["runs/b"].colour == found["static_key"].colour


def test_labels_have_distinct_colours_as_long_as_there_are_colours() -> None:
    several = [f"static_key(pos_dim={i})" for i in range(8)]
    assert len({look.colour for look in looks(several).values()}) == 8
    assert len(looks([*several, "key_value"])) == 9


def test_a_legend_s_key_is_drawn_like_the_mixer_and_hidden_from_readers() -> None:
    key = LOOKS["key_value"].key
    assert f"var(--{LOOKS['key_value'].colour})" in key
    assert ET.fromstring(key).get("aria-hidden") == "true"


# ---- pictures, quantities -------------------------------------------------------------------


def _decode(uri: str) -> np.ndarray:
    head, _, body = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def test_a_map_s_opacity_goes_from_its_least_weight_to_its_largest():
    even = _decode(pictures.heat_uri(np.full((2, 2), 0.25)))
    faint = _decode(pictures.heat_uri(np.array([[0.26, 0.25], [0.24, 0.25]])))
    assert not even[..., 3].any()
    half = pictures.OPACITY // 2
    assert faint[..., 3].tolist() == [[pictures.OPACITY, half], [0, half]]


def test_images_are_encoded_as_they_are_and_large_ones_made_small():
    grey = np.arange(36, dtype=np.uint8).reshape(1, 6, 6)
    assert np.array_equal(_decode(pictures.image_uri(grey)), grey[0])
    large = np.zeros((3, 300, 200), dtype=np.uint8)
    assert max(_decode(pictures.image_uri(large)).shape) == pictures.MAX_SIDE


def test_a_large_image_of_many_pixels_is_a_small_jpeg():
    noise = np.random.default_rng(0).integers(0, 256, (3, 400, 600), dtype=np.uint8)
    made = pictures.image_uri(noise)
    assert made.startswith("data:image/jpeg;base64,")
    assert pictures.IMAGE.fullmatch(made)
    assert len(made) < 25_000
    tiny = pictures.image_uri(noise[:, :32, :32])
    assert np.array_equal(_decode(tiny), noise[:, :32, :32].transpose(1, 2, 0))


def test_quantities_are_written_for_people():
    assert formats.count(5384) == "5,384"
    assert formats.count(53_840) == "53.8 k"
    assert formats.count(1_234_567) == "1.23 M"
    assert formats.count(4.6e9) == "4.60 G"
    assert formats.points(-0.0123) == "−1.2"
    assert formats.span(-0.01, 0.02, FRACTION) == "−1.0 to +2.0"
    assert formats.duration(3725) == "1 h 02 min"
    assert formats.three_digits(0.1234) == "0.123"
    empty = (formats.percent, formats.points, formats.count, formats.mib)
    assert {write(None) for write in empty} == {formats.MISSING}
