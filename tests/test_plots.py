"""Plots: scales and ticks of whatever numbers a file claims, and curves with gaps."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from ckpt.util.svg_plot import (
    PLAIN,
    THEMED,
    Mark,
    document,
    line_panel,
    linear_scale,
    log_scale,
    rectangle,
    round_ticks,
)

HUGE, SMALLEST = 1.7e308, 5e-324


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, [0, 5, 10]),
        (4.3, 8.4, [4, 6, 8, 10]),
        (0.0, 0.09, [0.0, 0.05, 0.1]),
        (-3.0, 3.0, [-5, 0, 5]),
        (7.0, 7.0, [7.0]),
        (-HUGE, HUGE, [-HUGE, HUGE]),
        (0.0, SMALLEST, [0.0, SMALLEST]),
    ],
)
def test_ticks_are_round_numbers_around_all_values(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high, 4) == pytest.approx(ticks)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-HUGE, HUGE), (0.0, SMALLEST), (1e300, 1.1e300), (5.0, 5.0)])
def test_a_scale_stays_between_its_ends(ends: tuple[float, float]) -> None:
    place = linear_scale(*ends, 10, 20)
    assert all(10 <= place(value) <= 20 for value in (*ends, ends[0] / 2 + ends[1] / 2))


def test_a_logarithmic_scale_has_equal_steps_for_equal_factors() -> None:
    place = log_scale(0.01, 100.0, 0, 40)
    assert [round(place(value), 6) for value in (0.001, 0.01, 1.0, 100.0)] == [0, 0, 20, 40]


def test_values_that_are_not_finite_are_gaps_and_marked() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, -math.inf), (5, 3.0)]
    drawn = ElementTree.fromstring(document(line_panel("x", points, PLAIN, Mark(5, 3.0, "best")), 480, 170))
    space = "{http://www.w3.org/2000/svg}"
    curves = [line for line in drawn.findall(f"{space}polyline") if line.attrib.get("fill") == "none"]
    assert [len(line.attrib["points"].split()) for line in curves] == [2, 1]
    titles = [title.text for title in drawn.iter(f"{space}title")]
    assert titles == ["step 3: nan", "step 4: -inf", "step 5: 3"]


def test_a_picture_of_its_own_has_plain_colours_and_one_in_a_page_those_of_the_page() -> None:
    alone, inside = (document([rectangle(0, 0, 1, 1, "<b>", fill=of.ink)], 9, 9, of) for of in (PLAIN, THEMED))
    assert "var(" not in alone
    assert 'fill="var(--surface)"' in inside
    assert "&lt;b&gt;" in alone
