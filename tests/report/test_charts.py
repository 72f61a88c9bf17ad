# SPDX-License-Identifier: Apache-2.0
"""Charts: scales and round ticks, labels that keep apart, marks where they belong, quantities."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from each import together
from keymix.report import formats, pictures
from keymix.report.charts import (
    Line,
    Look,
    Point,
    Row,
    curves,
    floor,
    log_curves,
    looks,
    outside,
    pareto,
    scatter,
    strips,
)
from keymix.report.labels import CHAR_WIDTH, place_labels, spread
from keymix.report.svg import Scale, el, log_ticks, ticks, whole_ticks
from keymix.task import FRACTION, Score

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["softmax", "static_key", "conv_static_key", "re_attention", "key_value", "identity"]
LOOKS = looks(NAMES, baseline="softmax", controls=["identity"])


def _points(xs: list[float], ys: list[float]) -> list[Point]:
    return [Point(n, LOOKS[n], x, y, 0.01) for n, x, y in zip(NAMES, xs, ys, strict=False)]


def test_pareto_front_by_hand():
    points = _points([1, 2, 3, 4, 1], [0.5, 0.7, 0.6, 0.9, 0.4])
    assert [p.label for p in pareto(points)] == ["softmax", "static_key", "re_attention"]


def test_of_two_equals_one_is_on_the_front():
    assert len(pareto(_points([1, 1], [0.5, 0.5]))) == 1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0.932, 0.951, [0.935, 0.94, 0.945, 0.95]), (3, 3, [3])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(("ys", "lowest"), [([0.0, 0.0], 0.0), ([0.01, 0.3], 0.0), ([-1, 2], -1)])
def test_an_axis_that_holds_zero_begins_there_unless_values_are_below(ys, lowest):
    line = Line("softmax", LOOKS["softmax"], [1, 2], ys)
    chart = curves([line], x_label="x", y_label="rate", name="n", holds=(0.0,))
    texts = [t for t in ET.fromstring(chart).iter(f"{SVG}text") if t.get("class") == "tick"]
    drawn = [
        float((t.text or "").replace("−", "-")) for t in texts if t.get("text-anchor") == "end"
    ]
    assert min(drawn) == lowest
    (curve,) = (p for p in ET.fromstring(chart).iter(f"{SVG}path") if "curve" in p.get("class", ""))
    foot = max(float(line.get("y1", 0)) for line in ET.fromstring(chart).iter(f"{SVG}line"))
    begins = float(curve.get("d", "").split()[1].partition("L")[0])
    assert (begins == pytest.approx(foot)) == (ys[0] == 0)


@pytest.mark.parametrize("low", [0.80, 0.875, 0.91, 0.949])
def test_percent_ticks_are_not_rounded_to_what_they_are_not(low):
    chart = scatter(_points([1, 2], [low, 0.95]), x_label="x", y_label="y", name="n")
    drawn = [
        float(t.text or "")
        for t in ET.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")
        if t.get("class") == "tick" and t.get("text-anchor") == "end"
    ]
    assert len(drawn) > 1
    assert np.diff(drawn) == pytest.approx(np.diff(drawn)[0])


def test_scale_of_one_value_does_not_divide_by_zero():
    scale = Scale.around([0.5, 0.5], 0, 100)
    assert 0 < scale(0.5) < 100


def test_text_and_attributes_are_escaped():
    made = el("text", "<b>&", title='"quoted"')
    assert "<b>" not in made
    assert ET.fromstring(made).text == "<b>&"
    assert ET.fromstring(made).get("title") == '"quoted"'


@together
@pytest.mark.parametrize("seed", range(6))
def test_labels_of_crowded_points_do_not_overlap(seed):
    rng = np.random.default_rng(seed)
    points = [(150 + 40 * rng.random(), 100 + 30 * rng.random()) for _ in NAMES]
    spots = place_labels(points, NAMES, (40, 0, 390, 240))
    boxes = []
    for spot, name in zip(spots, NAMES, strict=True):
        width = CHAR_WIDTH * len(name)
        left = {"start": spot.x, "middle": spot.x - width / 2, "end": spot.x - width}[spot.anchor]
        boxes.append((left, spot.y - 9, left + width, spot.y + 3))
        assert left >= 40 - 1e-6
        assert left + width <= 390 + 1e-6
    for a, b in itertools.combinations(boxes, 2):
        assert min(a[2], b[2]) <= max(a[0], b[0]) or min(a[3], b[3]) <= max(a[1], b[1])


def test_charts_are_well_formed_and_name_every_mixer():
    ys = [0.95, 0.94, 0.96, 0.93, 0.94, 0.3]
    chart = scatter(_points([1, 2, 3, 4, 5, 6], ys), x_label="x", y_label="y", name="n")
    text = "".join(ET.fromstring(chart).itertext())
    for name in NAMES:
        assert name in text


def test_a_control_far_below_does_not_squash_the_axis():
    ys = [0.95, 0.94, 0.96, 0.93, 0.94, 0.3]
    chart = scatter(_points([1, 2, 3, 4, 5, 6], ys), x_label="x", y_label="y", name="n")
    drawn = [t.text for t in ET.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert "identity (30.0 %)" in drawn
    assert "40" not in drawn


def test_the_front_goes_down_to_the_arrow_of_a_point_below():
    root = ET.fromstring(scatter(_points([3, 2], [0.95, 0.94]), x_label="x", y_label="y", name="n"))
    assert len(_front(root)) == 2
    points = [
        Point("softmax", LOOKS["softmax"], 3, 0.95),
        Point("identity", LOOKS["identity"], 1, 0.3),
    ]
    root = ET.fromstring(scatter(points, x_label="x", y_label="y", name="n"))
    (ax, ay), (bx, by) = _front(root)
    arrow = next(e for e in root.iter(SVG + "path") if e.get("class") == "bar ctl")
    assert arrow.get("d", "").startswith(f"M{ax:g} ")
    assert ay < 280 - 44
    assert (bx > ax, by < ay) == (True, True)


def _front(root: ET.Element) -> list[tuple[float, float]]:
    (line,) = [e for e in root.iter(SVG + "path") if e.get("class") == "front"]
    steps = line.get("d", "").replace("M", "").split("L")
    return [(float(step.split()[0]), float(step.split()[1])) for step in steps]


@pytest.mark.parametrize("draw", ["curves", "scatter"])
def test_tick_labels_keep_clear_of_the_axis_title(draw):
    values = [2.3149, 2.31492]
    if draw == "curves":
        lines = [Line("softmax", LOOKS["softmax"], [1, 2], values)]
        chart = curves(lines, x_label="epoch", y_label="training loss", name="n")
    else:
        narrow = [0.13149, 0.1314902]
        points = [
            Point(n, LOOKS[n], i, v) for i, (n, v) in enumerate(zip(NAMES, narrow, strict=False))
        ]
        chart = scatter(points, x_label="x", y_label="y", name="n")
    for tick in ET.fromstring(chart).iter(SVG + "text"):
        if tick.get("class") == "tick" and tick.get("text-anchor") == "end":
            assert float(tick.get("x", "")) - 6.4 * len(tick.text or "") > 15


def strips_of(*rows: Row, **more: Any) -> dict[str, ET.Element]:
    return {name: ET.fromstring(svg) for name, svg in strips(rows, **more).drawn.items()}


def classes(root: ET.Element, tag: str) -> list[str]:
    return [e.get("class") or "" for e in root.iter(SVG + tag)]


def test_a_strip_has_both_intervals_and_every_seed_and_survives_missing_ones():
    drawn = strips_of(
        Row("static_key", LOOKS["static_key"], 0.01, (-0.3, 0.32), (0.0, 0.02), (0.0, 0.01, 0.02)),
        Row("key_value", LOOKS["key_value"], -0.01, None, None),
        Row("identity", LOOKS["identity"], -0.6, (-0.7, -0.5), (-0.65, -0.55)),
    )
    first, bare, control = drawn.values()
    lines = classes(first, "line")
    assert sum(c.startswith("images") for c in lines) == 1
    assert sum(c.startswith("seeds") for c in lines) == 2  # the interval, and the mean
    assert len(classes(first, "circle")) == 3
    assert first.get("aria-label") == (
        "static_key: +1.0 points; over images 0.0 to +2.0; over seeds and images −30.0 to +32.0"
    )
    assert [c for c in classes(bare, "line") if not c.startswith("zero")] == [
        f"seeds {LOOKS['key_value'].colour}"
    ]
    assert "−60.0" in (control.get("aria-label") or "")
    assert any(c.startswith("bar") for c in classes(control, "path"))  # an arrow at the edge


@pytest.mark.parametrize("difference", [0.0, 4e-4, -4e-4])
def test_no_difference_has_no_sign(difference):
    (drawn,) = strips_of(Row("key_value", LOOKS["key_value"], difference, None, None)).values()
    assert drawn.get("aria-label") == "key_value: 0.0 points"


def test_strips_share_one_axis_and_a_control_within_it_is_drawn_there():
    rows = [
        Row("static_key", LOOKS["static_key"], -0.02, (-0.12, 0.08), (-0.04, 0.0)),
        Row("key_value", LOOKS["key_value"], -0.03, (-0.09, 0.03), (-0.05, -0.01)),
        Row("identity", LOOKS["identity"], -0.085, (-0.09, -0.08), (-0.1, -0.07)),
    ]
    drawn = strips_of(*rows)
    zero = {
        line.get("x1")
        for root in drawn.values()
        for line in root.iter(SVG + "line")
        if line.get("class") == "zero"
    }
    assert len(zero) == 1
    assert not classes(drawn["identity"], "path")
    found = strips(rows)
    assert found.low < -0.1 < 0 < found.high


def test_curves_of_one_epoch_and_of_constant_values_are_drawn():
    line = Line("softmax", LOOKS["softmax"], [1.0], [0.5])
    flat = Line("key_value", LOOKS["key_value"], [1, 2], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5])
    for lines in ([line], [flat]):
        ET.fromstring(curves(lines, x_label="epoch", y_label="y", name="n", percent=True))


def test_no_axis_goes_beyond_what_a_score_can_be():
    line = Line("key_value", LOOKS["key_value"], [1, 2], [0.97, 0.98], [0.9, 0.9], [1.04, 1.06])
    drawn = curves([line], x_label="x", y_label="y", name="n", percent=True, within=(0.0, 1.0))
    bands = re.findall(r'<path d="([^"]*)" class="band', drawn)
    heights = [float(y) for band in bands for y in re.findall(r"[ML][\d.]+ ([\d.]+)", band)]
    assert min(heights) >= 12.0  # the frame's top
    row = Row("key_value", LOOKS["key_value"], 0.3, (-1.0, 1.0), (-0.9, 1.0))
    found = strips([row])
    assert -1.0 <= found.low < found.high <= 1.0


def test_points_of_reference_that_coincide_are_named_together():
    points = [
        Point("softmax", LOOKS["softmax"], 1.0, 0.5),
        Point("x", LOOKS["key_value"], 2.0, 0.5),
    ]
    drawn = scatter(
        points,
        x_label="x",
        y_label="y",
        name="n",
        levels={"largest class": 0.5, "logistic regression": 0.5},
    )
    assert ">largest class, logistic regression<" in drawn


def test_every_mixer_has_a_marker_of_its_own():
    names = [f"mixer_{i}" for i in range(8)]
    both = looks([*names, "identity", "plain"], controls=["identity"], references=["plain"])
    assert len({look.marker for look in both.values()}) == 10


def test_looks_are_distinct_and_baseline_and_controls_stand_apart():
    assert len({(look.colour, look.marker) for look in LOOKS.values()}) == len(NAMES)
    assert LOOKS["softmax"].colour == "ink"
    assert LOOKS["identity"].colour == "ctl"
    both = looks(
        ["a", "identity", "plain network"], controls=["identity"], references=["plain network"]
    )
    assert len({each.colour for each in both.values()}) == 3
    assert [each.neutral for each in both.values()] == [False, True, True]


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
    empty = (formats.percent, formats.points, formats.count, formats.rate, formats.mib)
    assert {write(None) for write in empty} == {formats.MISSING}


DISTANCE = Score(
    key="d", name="distance", short="d", label="distance", better="less", high=None, unit="mm"
)


def test_where_less_is_better_the_front_is_below_and_a_far_control_leaves_at_the_top():
    points = _points([1, 2, 3, 4], [2.5, 2.1, 2.3, 1.9])
    assert [p.y for p in pareto(points, score=DISTANCE)] == [2.5, 2.1, 1.9]
    far = replace(points[0], look=replace(points[0].look, colour="ctl"), y=40.0)
    chart = scatter([far, *points[1:]], x_label="x", y_label="y", name="n", score=DISTANCE)
    assert "(40.0 mm)" in chart
    assert "%" not in chart.replace("100%", "")
    scatter([replace(far, y=0.1), *points[1:]], x_label="x", y_label="y", name="n", score=DISTANCE)


def test_a_strip_of_an_error_is_in_its_unit():
    look = looks(["softmax", "ska"], baseline="softmax")["ska"]
    row = Row("ska", look, -0.4, (-0.9, 0.1), (-0.5, -0.3))
    (drawn,) = strips_of(row, score=DISTANCE, units="cases").values()
    assert drawn.get("aria-label") == (
        "ska: −0.4 mm; over cases −0.5 to −0.3; over seeds and cases −0.9 to +0.1"
    )


def test_what_is_better_and_cheaper_than_the_baseline_is_shaded():
    points = _points([3, 1, 2], [0.6, 0.5, 0.7])
    root = ET.fromstring(scatter(points, x_label="x", y_label="y", name="n", baseline="softmax"))
    (shade,) = [e for e in root.iter(SVG + "rect") if e.get("class") == "better"]
    right = float(shade.get("x", "")) + float(shade.get("width", ""))
    foot = float(shade.get("y", "")) + float(shade.get("height", ""))
    (dot,) = [e for e in root.iter(SVG + "circle") if e.get("class") == "dot ink"]
    assert (right, foot) == pytest.approx((float(dot.get("cx", "")), float(dot.get("cy", ""))))


# ---- logarithmic axes ---------------------------------------------------------------------


def log_lines(**series: list[float]) -> list[Line]:
    table = looks(list(series), baseline="softmax", controls=["identity", "pooling"])
    return [Line(name, table[name], [10, 100, 1000], ys) for name, ys in series.items()]


def test_equal_factors_are_equal_lengths() -> None:
    scale = Scale(1, 100, 50, 250, log=True)
    assert [scale(v) for v in (1, 10, 100)] == pytest.approx([50, 150, 250])
    assert Scale(5, 5, 0, 10, log=True)(5) == 5


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.5, 2000, [1, 10, 100, 1000]),
        (0.5, 40, [1, 3, 10, 30]),
        (1.5, 12, [2, 5, 10]),
        (0.002, 0.3, [0.003, 0.01, 0.03, 0.1, 0.3]),
    ],
)
def test_ticks_are_round_and_at_least_three_where_they_can(low, high, wanted) -> None:
    assert log_ticks(low, high) == pytest.approx(wanted)


@together
@pytest.mark.parametrize(
    "wanted",
    [[10.0, 11, 12], [0, 0, 0, 0], [99, 100, 100], [5, 50, 51, 95], [100, 0, 50, 50, 50, 50]],
)
def test_places_keep_apart_and_in_order(wanted: list[float]) -> None:
    placed = spread(wanted, 12, 0, 100)
    ordered = sorted(placed)
    assert all(b - a >= 12 - 1e-6 for a, b in itertools.pairwise(ordered))
    assert min(placed) >= 0
    assert max(placed) <= 100 + 1e-6
    by_wish = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert [placed[i] for i in by_wish] == ordered


def test_places_that_fit_stay() -> None:
    assert spread([10, 40, 90], 12, 0, 100) == [10, 40, 90]
    assert spread([], 12, 0, 100) == []


def test_a_control_far_below_leaves_the_chart_and_is_named() -> None:
    drawn = log_lines(
        softmax=[1, 10, 100], ska=[2, 20, 200], identity=[0.001] * 3, pooling=[0.2, 2, 9]
    )
    assert floor(drawn) == pytest.approx(0.1)
    assert [line.label for line in outside(drawn)] == ["identity"]
    chart = log_curves(drawn, x_label="x", y_label="y", name="n")
    assert set(re.findall(r"<title>([^<]*)</title>", chart)) == {"softmax", "ska", "pooling"}
    numbers = [float(v) for v in re.findall(r'y="([-\d.]+)"', chart)]
    assert max(numbers) <= 300


def test_controls_alone_and_zeros_are_drawn() -> None:
    chart = log_curves(log_lines(identity=[0, 0.1, 1]), x_label="x", y_label="y", name="n")
    assert "nan" not in chart
    assert math.isfinite(float(re.findall(r'd="M([\d.]+)', chart)[0]))


def test_names_stand_at_the_ends_and_never_on_each_other() -> None:
    made = {f"mixer_number_{i}": [1.0, 5, 50 + i / 10] for i in range(12)}
    chart = log_curves(log_lines(**made), x_label="x", y_label="y", name="n")
    spots = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*class="label', chart)
    ys = sorted(float(y) for _, y in spots)
    assert len(ys) == 12
    assert all(b - a >= 12 for a, b in itertools.pairwise(ys))
    assert len({x for x, _ in spots}) == 1


def test_points_are_marked_where_asked() -> None:
    drawn = log_lines(softmax=[1, 10, 100], ska=[2, 20, 200])
    chart = log_curves(drawn, x_label="x", y_label="y", name="n", marked=["softmax"])
    assert re.findall(r'class="dot (\w+)', chart) == ["ink"] * 3
    lonely = [Line("one", Look("c0", "square", "one"), [49], [3.0])]
    assert 'class="dot c0"' in log_curves(lonely, x_label="x", y_label="y", name="n")


@pytest.mark.parametrize(("low", "high"), [(-9.3, 14.1), (0.41, 0.59), (0, 1), (96.2, 99.4)])
def test_an_axis_has_three_ticks_or_more(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 7
    assert all(low <= value <= high for value in found)


@pytest.mark.parametrize(("low", "high"), [(1.2, 2.3), (0.16, 1.16), (49, 196), (1, 1e6)])
def test_a_logarithmic_axis_has_three_ticks_or_more(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low * 0.99 <= value <= high * 1.01 for value in found)


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


def test_blocks_have_whole_ticks() -> None:
    assert whole_ticks(1, 12) == [2, 4, 6, 8, 10, 12]
    assert whole_ticks(1, 3) == [1, 2, 3]
    assert whole_ticks(0.5, 0.9) == []
    assert whole_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
