"""Charts: where a value comes to stand, and that all of it is seen."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt.report.chart import DARK, LIGHT, Chart, Series, standalone

SVG = "{http://www.w3.org/2000/svg}"
times = st.floats(0.01, 1e6)


def drawn(chart: Chart) -> ET.Element:
    return ET.fromstring(chart.svg())


def dots(chart: Chart) -> list[tuple[float, float]]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn(chart).iter(f"{SVG}circle")]


@pytest.mark.parametrize("log", [False, True])
def test_more_is_higher_and_further_right(log: bool) -> None:
    (x1, y1), (x2, y2), (x3, y3) = dots(
        Chart("t", "x", "y", [Series("s", [(1, 10), (10, 100), (100, 1000)], "dots")], log, log)
    )
    assert x1 < x2 < x3 and y1 > y2 > y3
    if log:
        assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_every_point_is_within_the_picture(points: list[tuple[float, float]], x_log: bool, y_log: bool) -> None:
    chart = Chart("t", "x", "y", [Series("s", points, "dots")], x_log, y_log)
    for x, y in dots(chart):
        assert 0 <= x <= chart.width and 0 <= y <= chart.height


def test_bars_stand_on_the_axis_beside_one_another() -> None:
    series = [Series("a", [(0, 1.0), (1, 2.0)], "bars"), Series("b", [(0, 3.0)], "bars")]
    bars = [r for r in drawn(Chart("t", "x", "y", series)).iter(f"{SVG}rect") if "rx" not in r.attrib]
    bottoms = {round(float(r.attrib["y"]) + float(r.attrib["height"]), 1) for r in bars}
    assert len(bottoms) == 1
    heights = [float(r.attrib["height"]) for r in bars]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.3) and heights[2] == pytest.approx(3 * heights[0], abs=0.3)
    assert float(bars[0].attrib["x"]) + float(bars[0].attrib["width"]) <= float(bars[2].attrib["x"])


def test_text_is_escaped_and_tips_are_there() -> None:
    svg = Chart("a <b>", "x", "y", [Series("s & t", [(1, 1)], "dots", tips=["1 < 2"])]).svg()
    assert "a &lt;b&gt;" in svg and "s &amp; t" in svg and "<title>1 &lt; 2</title>" in svg


def test_a_file_of_its_own_has_its_colours() -> None:
    chart = Chart("t", "x", "y", [Series("s", [(1, 1), (2, 2)])])
    for colours in (LIGHT, DARK):
        svg = standalone([chart, chart], colours)
        assert ET.fromstring(svg).attrib["width"] == str(2 * chart.width)
        assert all(f"--{name}:{value}" in svg for name, value in colours.items())
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(colours)
