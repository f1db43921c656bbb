"""The roofline as a figure: FLOPs a second over FLOPs a byte, both axes logarithmic, one point a kernel or a step.

What is below the slanted roof waits for memory, what is below the flat one for matrix products. SVG without script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Any, Final

from pytest_torchcompile.page.markup import Html, join, tag
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import as_number

__all__ = ["RoofPoint", "readable_rate", "roofline_figure", "step_roofline"]

# In the units of the SVG. The left margin has room for the longest label, such as `100 TFLOP/s`.
WIDTH: Final = 460
HEIGHT: Final = 280
LEFT: Final = 84
BOTTOM: Final = 40
TOP: Final = 14
RIGHT: Final = 14
LEAST_INTENSITY: Final = 1e-3
"""A copy computes nothing; it stands at the left edge."""
_COLOURS: Final = {"memory": "#3b76c4", "compute": "#c4623b", "functions": "#c4623b", "step": "#7a3bc4"}
_FONT: Final = {"font_family": "system-ui,sans-serif", "font_size": 11}
"""Attributes, and no style: the page's own policy lets no element bring one."""


@dataclass(frozen=True)
class RoofPoint:
    """One kernel, or a whole step."""

    label: str
    intensity: float
    """FLOPs for each byte."""
    rate: float
    """FLOPs a second."""
    kind: str
    """``memory``, ``compute`` or ``functions``: what bounds a kernel; ``step``: a step as it was measured."""


@dataclass(frozen=True)
class _Scale:
    """Decades that an axis shows, and where they lie."""

    low: int
    high: int
    start: float
    length: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, length: float) -> _Scale:
        """Whole decades around the values."""
        low, high = floor(log10(min(values))), ceil(log10(max(values)))
        return cls(low, max(high, low + 1), start, length)

    def place(self, value: float) -> float:
        """Of a value on the axis; what is outside stands at its end."""
        # Lifted to the axis first: what is zero or below has no logarithm.
        share = (log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return self.start + self.length * min(1.0, share)

    @property
    def decades(self) -> range:
        """Those with a line: of many every second or third."""
        return range(self.low, self.high + 1, 1 + (self.high - self.low) // 7)


def roofline_figure(points: Sequence[RoofPoint], bandwidth: float, flops_per_second: float) -> Html:
    """The figure; ``bandwidth`` in bytes a second, ``flops_per_second`` the peak of products.

    Raises ValueError for peaks that are not positive.
    """
    if bandwidth <= 0 or flops_per_second <= 0:
        raise ValueError(f"bandwidth={bandwidth}, flops_per_second={flops_per_second}: expected positive peaks")
    ridge = flops_per_second / bandwidth
    # A copy computes nothing, and zero has no place on these axes.
    shown = []
    for point in points:
        rate = max(bandwidth * LEAST_INTENSITY, point.rate)
        shown.append(replace(point, intensity=max(LEAST_INTENSITY, point.intensity), rate=rate))
    # A decade on each side of the ridge, so that both parts of the roof are seen wherever the points lie.
    across = _Scale.of([*(point.intensity for point in shown), ridge / 10, ridge * 10], LEFT, WIDTH - LEFT - RIGHT)
    rates = [point.rate for point in shown]
    # Three decades below the peak: alone at the top a point would seem to be at the roof.
    up = _Scale.of([*rates, flops_per_second, flops_per_second / 1e3], HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT)
    parts = [*_grid(across, up), _roof(across, up, bandwidth, flops_per_second)]
    parts += [_point(point, across, up) for point in shown]
    # A step whose data lie in caches may stand above the slanted roof, which is that of the memory.
    named = f"Roofline: {count(len(points), 'point')} and a roof of {readable_rate(flops_per_second)}"
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", width=WIDTH,
               height=HEIGHT, role="img", aria_label=named, class_="figure", **_FONT)


def _grid(across: _Scale, up: _Scale) -> Iterator[Html]:
    line = {"stroke": "currentColor", "stroke_opacity": "0.15"}
    bottom = HEIGHT - BOTTOM
    for decade in across.decades:
        x = round(across.place(10.0**decade), 1)
        yield tag("line", x1=x, x2=x, y1=TOP, y2=bottom, **line)
        yield tag("text", _power(decade), x=x, y=bottom + 14, text_anchor="middle", fill="currentColor")
    for decade in up.decades:
        y = round(up.place(10.0**decade), 1)
        yield tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, **line)
        yield tag("text", readable_rate(10.0**decade), x=LEFT - 6, y=y + 4, text_anchor="end", fill="currentColor")
    yield tag("text", "FLOPs for each byte", x=(LEFT + WIDTH) / 2, y=HEIGHT - 6, text_anchor="middle",
              fill="currentColor")


def _power(decade: int) -> str:
    return f"{10.0**decade:g}"


def _roof(across: _Scale, up: _Scale, bandwidth: float, peak: float) -> Html:
    """The slanted part up to the ridge, then the flat one."""
    corners = []
    for intensity in (10.0**across.low, peak / bandwidth, 10.0**across.high):
        x, y = across.place(intensity), up.place(min(peak, bandwidth * intensity))
        corners.append(f"{x:.1f},{y:.1f}")
    return tag("polyline", points=" ".join(corners), fill="none", stroke="currentColor", stroke_width=2)


def _point(point: RoofPoint, across: _Scale, up: _Scale) -> Html:
    x, y = across.place(point.intensity), up.place(point.rate)
    title = f"{point.label}: {point.intensity:.3g} FLOPs a byte, {readable_rate(point.rate)}"
    circle = tag("circle", tag("title", title), cx=round(x, 1), cy=round(y, 1), r=5 if point.kind == "step" else 4,
                 fill=_COLOURS[point.kind], fill_opacity="0.75")
    # A kernel's name is long, and kernels lie close together; the reader sees it by pointing at one.
    if point.kind != "step":
        return circle
    return join([circle, tag("text", point.label, x=round(x + 8, 1), y=round(y + 4, 1), fill="currentColor")])


def readable_rate(rate: float) -> str:
    """FLOPs a second with a unit.

    >>> readable_rate(3.7e10), readable_rate(9.9e14), readable_rate(10)
    ('37 GFLOP/s', '990 TFLOP/s', '10 FLOP/s')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}FLOP/s"
    return f"{rate:.3g} FLOP/s"


def step_roofline(worth: Mapping[str, Any]) -> Html | None:
    """An eager and a compiled step below the roof, from a section of the check `worth`; None where it has no roof."""
    roof, work, sides = (_mapping(worth.get(name)) for name in ("roof", "work", "sides"))
    bandwidth, peak = as_number(roof.get("bandwidth")), as_number(roof.get("flops_per_second"))
    flops = as_number(work.get("flops"))
    if not bandwidth or not peak or not flops:
        return None
    points = []
    for side, moved in (("eager", work.get("bytes")), ("compiled", work.get("fused_bytes"))):
        seconds, size = as_number(_mapping(sides.get(side)).get("low")), as_number(moved)
        if seconds and size:
            points.append(RoofPoint(side, flops / size, flops / seconds, "step"))
    return roofline_figure(points, bandwidth, peak) if points else None


def _mapping(value: Any) -> Mapping[str, Any]:
    """What a report has in a place; one that was edited may have anything."""
    return value if isinstance(value, dict) else {}
