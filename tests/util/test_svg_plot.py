"""Plots: scales and ticks of whatever numbers a file claims, and curves with gaps."""

from __future__ import annotations

import math
import re
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
    stacked_bar,
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
    assert round_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-HUGE, HUGE), (0.0, SMALLEST), (1e300, 1.1e300), (5.0, 5.0)])
def test_a_scale_stays_between_its_ends(ends: tuple[float, float]) -> None:
    place = linear_scale(*ends, 10, 20)
    assert all(10 <= place(value) <= 20 for value in (*ends, ends[0] / 2 + ends[1] / 2))


def test_a_logarithmic_scale_has_equal_steps_for_equal_factors() -> None:
    place = log_scale(0.01, 100.0, 0, 40)
    assert [round(place(value), 6) for value in (0.001, 0.01, 1.0, 100.0)] == [0, 0, 20, 40]


def test_values_that_are_not_finite_are_gaps_and_marked() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, -math.inf), (5, 3.0)]
    drawn = ElementTree.fromstring(document(line_panel("x", {"": points}, PLAIN, Mark(5, 3.0, "best")), 480, 170))
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


PANEL = """\
<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="12" fill="#1f2430" width="480" \
height="170" viewBox="0 0 480 170" role="img" aria-label="t">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="62" y="118" font-weight="600">loss</text>
<text x="464" y="118" text-anchor="end" fill="#5b6472">best</text>
<polyline points="62.0,242.0 464.0,242.0" stroke="#dfe3e8"/>
<text x="54" y="246.0" text-anchor="end" fill="#5b6472">1</text>
<polyline points="62.0,188.0 464.0,188.0" stroke="#dfe3e8"/>
<text x="54" y="192.0" text-anchor="end" fill="#5b6472">2</text>
<polyline points="62.0,134.0 464.0,134.0" stroke="#dfe3e8"/>
<text x="54" y="138.0" text-anchor="end" fill="#5b6472">3</text>
<text x="62" y="262.0" fill="#5b6472">step 10</text>
<text x="464" y="262.0" text-anchor="end" fill="#5b6472">step 40</text>
<polyline points="62.0,242.0 196.0,134.0" fill="none" stroke="#2563a8" stroke-width="2" stroke-linejoin="round"/>
<circle cx="62.0" cy="242.0" r="2.5" fill="#2563a8"/>
<circle cx="196.0" cy="134.0" r="2.5" fill="#2563a8"/>
<polyline points="464.0,188.0" fill="none" stroke="#2563a8" stroke-width="2" stroke-linejoin="round"/>
<circle cx="464.0" cy="188.0" r="2.5" fill="#2563a8"/>
<path d="M326.0 238l8 8m0 -8l-8 8" fill="none" stroke="#b3261e" stroke-width="2"><title>step 30: nan</title></path>
<circle cx="62.0" cy="242.0" r="5.5" fill="#ffffff" stroke="#d1495b" stroke-width="3"><title>step 10: 1</title></circle>
</svg>
"""


def test_a_curve_is_drawn_to_scale_below_its_title_with_its_steps_ticks_gaps_and_mark() -> None:
    points = [(10, 1.0), (20, 3.0), (30, math.nan), (40, 2.0)]
    assert (
        document(line_panel("loss", {"": points}, PLAIN, Mark(10, 1.0, "best"), top=100), 480, 170, title="t") == PANEL
    )
    single = list(line_panel("loss", {"": [(5, 2.0)]}, PLAIN, width=400))  # in the middle, and its step once
    assert '<circle cx="223.0" cy="88.0" r="2.5" fill="#2563a8"/>' in single
    assert [element for element in single if "step" in element] == [
        '<text x="62" y="162.0" fill="#5b6472">step 5</text>'
    ]
    assert '<text x="62" y="18" font-weight="600">loss</text>' in single
    nothing = "".join(line_panel("loss", {"": [(1, math.nan), (2, math.inf)]}, PLAIN))
    assert nothing.count("<path") == 2
    assert 'fill="none" stroke="#2563a8"' not in nothing


def test_many_points_are_a_thin_line_without_dots() -> None:
    def drawn(count: int) -> tuple[int, bool]:
        panel = "".join(line_panel("x", {"": [(step, float(step % 2)) for step in range(count)]}, PLAIN))
        return panel.count("<circle"), 'stroke-width="2"' in panel

    assert [drawn(count) for count in (60, 61, 300, 301)] == [(60, True), (0, True), (0, True), (0, False)]
    alone = [(step, math.nan if step in (1, 3) else 0.0) for step in range(70)]  # a value between gaps is a dot
    assert "".join(line_panel("x", {"": alone}, PLAIN)).count("<circle") == 2


def test_several_curves_share_the_scale_and_each_has_its_colour_and_its_label() -> None:
    drawn = "".join(line_panel("x", {"a": [(1, 1.0), (2, 2.0)], "b": [], "c": [(1, 3.0), (9, 5.0)]}, PLAIN))
    assert re.findall(r'points="([^"]*)" fill="none" stroke="(#\w+)".*?<title>(\w)</title>', drawn) == [
        ("62.0,124.0 112.2,106.0", PLAIN.lines[0], "a"),
        ("62.0,88.0 464.0,52.0", PLAIN.lines[2], "c"),
    ]
    assert ">step 9<" in drawn


def test_a_bar_is_as_long_as_its_parts() -> None:
    bar = "".join(stacked_bar([("a", 1.0), ("<b>", 3.0)], PLAIN, 100, 9))
    assert re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', bar) == [("0.0", "25.0"), ("25.0", "75.0")]
    assert "<title>&lt;b&gt;: 75.0%</title>" in bar
    assert 'width="0.0"' in "".join(stacked_bar([("a", 0.0)], PLAIN, 100, 9))


def test_a_picture_says_its_title_only_if_it_has_one_and_numbers_have_one_decimal() -> None:
    alone = document([], 9.25, 9.0, PLAIN, fill="red")
    assert alone.startswith(
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="12"'
    )
    assert 'fill="red" width="9.2" height="9.0" viewBox="0 0 9.2 9">' in alone
    assert document([], 9, 9, THEMED).startswith('<svg font-family="system-ui')
    assert rectangle(1, 2.0, 3.25, 4, rx=5) == '<rect x="1" y="2.0" width="3.2" height="4" rx="5"/>'


def test_scales_map_their_ends_to_their_ends() -> None:
    place = linear_scale(2.0, 6.0, 100, 20)
    assert [place(value) for value in (2.0, 3.0, 6.0)] == [100, 80, 20]
    assert linear_scale(5.0, 5.0, 10, 20)(5.0) == 15
    assert round_ticks(0.0, 6.0) == [0, 2, 4, 6]
    assert round_ticks(0.0, 20.0) == [0, 10, 20]
    assert round_ticks(-41.0, -8.0) == [-60, -40, -20, 0]
    assert round_ticks(3.0, 1.0) == [3.0, 1.0]
    assert round_ticks(0.0, math.inf) == [0.0, math.inf]
    assert round_ticks(0.0, 0.3) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert len(round_ticks(0.0, 1e-289)) > 2
