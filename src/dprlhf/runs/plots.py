"""Line plots as inline SVG, without a library and without a script.

Colours, fonts and line styles come from the page's style sheet through the classes ``s0``, ``s1``,
...: the plots follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 22, 38
STYLES = 6
"""Number of line styles; further series use them again from the first."""


@dataclass(frozen=True)
class Series:
    """A line of a plot.

    Attributes:
        name: Name in the legend.
        points: Points (x, y, half-width of the band around y, or None for no band), by rising x.
    """

    name: str
    points: list[tuple[float, float, float | None]]


def line_plot(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    from_zero: bool = False,
    steps: bool = False,
) -> str | None:
    """Return an SVG element that fills the width of its container; None without any point.

    Args:
        series: The lines of the plot.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
        from_zero: Whether the vertical axis includes 0.
        steps: Whether a line keeps a value up to the next point, as a staircase.
    """
    points = [p for line in series for p in line.points]
    if not points:
        return None
    x_ticks = ticks(min(p[0] for p in points), max(p[0] for p in points))
    low, high = (f(y + s * (e or 0.0) for _, y, e in points) for f, s in ((min, -1), (max, 1)))
    y_ticks = ticks(min(low, 0.0), max(high, 0.0)) if from_zero else ticks(low, high)

    def x(value: float) -> float:
        share = (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(t)}" y2="{y(t)}"/>'
        f'<text x="{_LEFT - 6}" y="{y(t) + 4}" text-anchor="end">{t:g}</text>'
        for t in y_ticks
    ]
    parts += [
        f'<text x="{x(t)}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{t:g}</text>'
        for t in x_ticks
        if t == int(t)  # x counts rounds
    ]
    for index, line in enumerate(series):
        parts += _elements(line, f"s{index % STYLES}", x, y, steps=steps)
    label = html.escape(f"{y_label} by {x_label}: {', '.join(s.name for s in series)}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f'<text x="4" y="13">{html.escape(y_label)}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">'
        f"{html.escape(x_label)}</text>{''.join(parts)}</svg>"
    )


def _elements(
    line: Series,
    style: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
    *,
    steps: bool,
) -> list[str]:
    """Return the SVG elements of a line: its band, the line itself, and a dot at each point.

    Args:
        line: The line.
        style: Class of its style, ``s0`` and so on.
        x: Returns the horizontal position of a value in the plot.
        y: Returns the vertical one.
        steps: As for :func:`line_plot`.
    """
    parts = []
    banded = [(px, py, e) for px, py, e in line.points if e is not None]
    if len(banded) > 1:
        edge = [(px, py + e) for px, py, e in banded]
        edge += [(px, py - e) for px, py, e in reversed(banded)]
        outline = " ".join(f"{x(px)},{y(py)}" for px, py in edge)
        parts.append(f'<polygon class="band {style}" points="{outline}"/>')
    corners = [(px, py) for px, py, _ in line.points]
    if steps:
        late = [(px, py) for (_, py), (px, _) in pairwise(corners)]
        corners = [p for both in zip_longest(corners, late) for p in both if p is not None]
    path = " ".join(f"{x(px)},{y(py)}" for px, py in corners)
    parts.append(f'<polyline class="line {style}" points="{path}"/>')
    for px, py, e in line.points:
        spread = "" if e is None else f" ± {e:.3g}"
        parts.append(
            f'<circle class="dot {style}" cx="{x(px)}" cy="{y(py)}" r="2.6">'
            f"<title>{html.escape(line.name)}: {px:g}, {py:.4g}{spread}</title></circle>"
        )
    return parts


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from at most ``low`` to at least ``high``.

    >>> ticks(0.0, 12.0)
    [0.0, 5.0, 10.0, 15.0]
    >>> ticks(-0.3, 0.42)
    [-0.4, -0.2, 0.0, 0.2, 0.4, 0.6]
    """
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        room = max(abs(low) * 0.5, 1e-9) if low else 1.0
        low, high = low - room, high + room
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]
