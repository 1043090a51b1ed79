"""Charts as SVG: small, static, in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, Literal

LIGHT: Final = {
    "ink": "#24292f", "faint": "#d0d7de",
    "s0": "#0969da", "s1": "#bc4c00", "s2": "#1a7f37", "s3": "#8250df", "s4": "#6e7781", "s5": "#bf3989",
}  # fmt: skip
DARK: Final = {
    "ink": "#d1d7e0", "faint": "#3d444d",
    "s0": "#58a6ff", "s1": "#f0883e", "s2": "#56d364", "s3": "#bc8cff", "s4": "#9198a1", "s5": "#f778ba",
}  # fmt: skip
_STYLE: Final = (
    ".c text{font:14px system-ui,sans-serif;fill:var(--ink)}.c .t{font-weight:600;font-size:15px}"
    ".c .g{stroke:var(--faint);fill:none}.c .l{fill:none;stroke-width:2}.c .d{stroke-dasharray:5 4}"
    + "".join(f".c .f{i}{{fill:var(--s{i})}}.c .s{i}{{stroke:var(--s{i})}}" for i in range(6))
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 58, 54
_LETTER: Final = 7.6  # about the width of one, in the units of the chart


@dataclass(frozen=True)
class Series:
    """One line, cloud of dots, or set of bars.

    Attributes:
        name: In the legend.
        points: (x, y) of each.
        kind: How they are drawn.
        dashed: Of a line.
        tips: What a pointer that rests on a point shows, one for each; or none.
        colour: 0 to 5; None for the series' place.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "dots", "bars"] = "line"
    dashed: bool = False
    tips: Sequence[str] = ()
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: Above it.
        x_title, y_title: Along the axes.
        series: What is drawn, in this order.
        x_log, y_log: Logarithmic axes.
        x_ticks: Value and text of each tick; None to find some.
        y_range: Lowest and highest value; None for that of the points.
        width, height: In units of the page.
    """

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    x_ticks: Sequence[tuple[float, str]] | None = None
    y_range: tuple[float, float] | None = None
    width: int = 720
    height: int = 380
    _bars: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bars", sum(one.kind == "bars" for one in self.series))

    def svg(self, *, x: int = 0) -> str:
        """The chart as an ``svg`` element; its colours are the variables of :data:`LIGHT`.

        Args:
            x: Where it stands within another one.
        """
        xs = [a for one in self.series for a, _ in one.points] + [a for a, _ in self.x_ticks or ()]
        ys = [b for one in self.series for _, b in one.points]
        pad = 0.6 if self._bars else 0.0
        px = _scale((min(xs) - pad, max(xs) + pad), self.x_log, (_LEFT, self.width - _RIGHT))
        low, high = self.y_range or _widened(min(ys), max(ys), self.y_log, zero=self._bars > 0)
        py = _scale((low, high), self.y_log, (self.height - _BOTTOM, _TOP))
        x_ticks = self.x_ticks if self.x_ticks is not None else _ticks(min(xs), max(xs), self.x_log)
        parts = [
            f'<svg class="c" x="{x}" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self.title)}">',
            f'<text class="t" x="{_LEFT}" y="18">{escape(self.title)}</text>',
            *self._legend(),
            *self._axes(px, py, x_ticks, _ticks(low, high, self.y_log)),
        ]
        bar = 0
        for number, one in enumerate(self.series):
            colour = number % 6 if one.colour is None else one.colour
            parts += self._drawn(one, colour, px, py, bar)
            bar += one.kind == "bars"
        return "".join([*parts, "</svg>"])

    def _legend(self) -> list[str]:
        out, x = [], float(_LEFT)
        for number, one in enumerate(self.series):
            colour = number % 6 if one.colour is None else one.colour
            out.append(f'<rect class="f{colour}" x="{x:.0f}" y="31" width="11" height="11" rx="2"/>')
            out.append(f'<text x="{x + 16:.0f}" y="41">{escape(one.name)}</text>')
            x += 34 + _LETTER * len(one.name)
        return out

    def _axes(
        self,
        px: Callable[[float], float],
        py: Callable[[float], float],
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
    ) -> list[str]:
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        out = []
        for value, text in y_ticks:
            y = py(value)
            out.append(f'<path class="g" d="M{_LEFT} {y:.1f}H{right}"/>')
            out.append(f'<text x="{_LEFT - 7}" y="{y + 5:.1f}" text-anchor="end">{escape(text)}</text>')
        end = -math.inf
        for value, text in x_ticks:
            x = px(value)
            out.append(f'<path class="g" d="M{x:.1f} {bottom}v5"/>')
            half = _LETTER * len(text) / 2
            if x - half >= end + 4:  # the others would run into one another
                out.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(text)}</text>')
                end = x + half
        middle = (_TOP + bottom) / 2
        out.append(f'<path class="g" d="M{_LEFT} {bottom}H{right}"/>')
        out.append(f'<text x="{right}" y="{self.height - 12}" text-anchor="end">{escape(self.x_title)}</text>')
        out.append(
            f'<text x="15" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 15 {middle:.0f})">'
            f"{escape(self.y_title)}</text>"
        )
        return out

    def _drawn(
        self, one: Series, colour: int, px: Callable[[float], float], py: Callable[[float], float], bar: int
    ) -> list[str]:
        out = []
        places = [(px(x), py(y)) for x, y in one.points]
        if one.kind == "line":
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            out.append(f'<path class="l s{colour}{" d" if one.dashed else ""}" d="M{path}"/>')
        bottom, wide = self.height - _BOTTOM, 0.8 * (px(1) - px(0)) / self._bars if self._bars else 0.0
        for number, (x, y) in enumerate(places):
            tip = f"<title>{escape(one.tips[number])}</title>" if one.tips else ""
            if one.kind == "bars":
                left = x + wide * (bar - self._bars / 2)
                out.append(
                    f'<rect class="f{colour}" x="{left:.1f}" y="{y:.1f}" width="{0.92 * wide:.1f}" '
                    f'height="{max(bottom - y, 0):.1f}">{tip}</rect>'
                )
            elif one.kind == "dots" or one.tips:
                radius = 4 if one.kind == "dots" else 3
                out.append(
                    f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}" opacity=".8">{tip}</circle>'
                )
        return out


def style(colours: dict[str, str]) -> str:
    """The variables of one set of colours, as CSS declarations."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def chart_css() -> str:
    """CSS that all charts of a page need once."""
    return _STYLE


def standalone(charts: Sequence[Chart], colours: dict[str, str]) -> str:
    """Charts side by side, as one SVG file that needs no page around it."""
    width, height = sum(chart.width for chart in charts), max(chart.height for chart in charts)
    inside, x = [], 0
    for chart in charts:
        inside.append(chart.svg(x=x))
        x += chart.width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>svg{{{style(colours)}}}{_STYLE}</style>"
        f"{''.join(inside)}</svg>\n"
    )


def _scale(data: tuple[float, float], log: bool, page: tuple[float, float]) -> Callable[[float], float]:
    low, high = (math.log(data[0]), math.log(data[1])) if log else data
    span = (high - low) or 1.0

    def place(value: float) -> float:
        return page[0] + (page[1] - page[0]) * ((math.log(value) if log else value) - low) / span

    return place


def _widened(low: float, high: float, log: bool, *, zero: bool) -> tuple[float, float]:
    if log:
        return low / 1.15, high * 1.15
    room = 0.05 * ((high - low) or abs(high) or 1.0)
    return (min(0.0, low) if zero or low == 0 else low - room), high + room


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """A few round values and their texts."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**k for k in decades for step in (1, 2, 5) if low <= step * 10.0**k <= high]
        if len(found) > 9:
            found = [value for value in found if math.log10(value).is_integer()]
        if len(found) > 2:
            return [(value, f"{value:g}") for value in found]
    rough = ((high - low) or 1.0) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough)
    first = math.ceil(low / step - 1e-9)
    return [(step * k, f"{step * k:g}") for k in range(first, math.floor(high / step + 1e-9) + 1)]
