# SPDX-License-Identifier: Apache-2.0
"""Logarithmic charts: scales, round values, names that keep apart."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from each import together
from keymix.report.log_plots import floor, log_curves, outside
from keymix.report.plots import Line, Look, looks
from keymix.report.svg import LogScale, log_ticks, spread


def lines(**curves: list[float]) -> list[Line]:
    table = looks(list(curves), baseline="softmax", controls=["identity", "pooling"])
    return [Line(name, table[name], [10, 100, 1000], ys) for name, ys in curves.items()]


def test_equal_factors_are_equal_lengths() -> None:
    scale = LogScale(1, 100, 50, 250)
    assert [scale(v) for v in (1, 10, 100)] == pytest.approx([50, 150, 250])
    assert LogScale(5, 5, 0, 10)(5) == 5


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


def test_a_control_far_below_leaves_the_chart_and_is_told() -> None:
    drawn = lines(softmax=[1, 10, 100], ska=[2, 20, 200], identity=[0.001] * 3, pooling=[0.2, 2, 9])
    assert floor(drawn) == pytest.approx(0.1)
    assert [line.label for line in outside(drawn)] == ["identity"]
    chart = log_curves(drawn, x_label="x", y_label="y", name="n")
    assert set(re.findall(r"<title>([^<]*)</title>", chart)) == {"softmax", "ska", "pooling"}
    numbers = [float(v) for v in re.findall(r'y="([-\d.]+)"', chart)]
    assert max(numbers) <= 300


def test_controls_alone_and_zeros_are_drawn() -> None:
    chart = log_curves(lines(identity=[0, 0.1, 1]), x_label="x", y_label="y", name="n")
    assert "nan" not in chart
    assert math.isfinite(float(re.findall(r'd="M([\d.]+)', chart)[0]))


def test_names_stand_at_the_ends_and_never_on_each_other() -> None:
    made = {f"mixer_number_{i}": [1.0, 5, 50 + i / 10] for i in range(12)}
    chart = log_curves(lines(**made), x_label="x", y_label="y", name="n")
    spots = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*class="label', chart)
    ys = sorted(float(y) for _, y in spots)
    assert len(ys) == 12
    assert all(b - a >= 12 for a, b in itertools.pairwise(ys))
    assert len({x for x, _ in spots}) == 1


def test_points_are_marked_where_asked() -> None:
    drawn = lines(softmax=[1, 10, 100], ska=[2, 20, 200])
    chart = log_curves(drawn, x_label="x", y_label="y", name="n", marked=["softmax"])
    assert re.findall(r'class="dot (\w+)', chart) == ["ink"] * 3
    lonely = [Line("one", Look("c0", "square", "one"), [49], [3.0])]
    assert 'class="dot c0"' in log_curves(lonely, x_label="x", y_label="y", name="n")
