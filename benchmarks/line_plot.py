"""Lines over two logarithmic axes, as SVG. Pure: numbers in, text out."""

import math
from collections.abc import Mapping, Sequence

Point = tuple[float, float]

_COLOURS = ("#3366cc", "#dc7633", "#229954", "#884ea0", "#7f8c8d", "#c0392b", "#1abc9c", "#b7950b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 400, 70, 40, 480, 350


def line_plot(title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """Return a plot of `lines` by their names; every coordinate is more than 0."""
    points = [point for line in lines.values() for point in line]
    x_ticks, y_ticks = _ticks([x for x, _ in points], 2.0), _ticks([y for _, y in points], 10.0)
    across = _Axis(x_ticks[0], x_ticks[-1], _LEFT, _RIGHT)
    up = _Axis(y_ticks[0], y_ticks[-1], _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{title}</text>',
        f'<text x="{(_LEFT + _RIGHT) / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">{x_name}</text>',
        f'<text x="12" y="{_TOP - 6}">{y_name}</text>',
    ]
    for x in x_ticks:
        place = across.place(x)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{_BOTTOM}" stroke="#dddddd"/>')
        parts.append(f'<text x="{place:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>')
    for y in y_ticks:
        place = up.place(y)
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{place:.1f}" y2="{place:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{y:,g}</text>')
    for index, (name, line) in enumerate(lines.items()):
        parts += _line(name, [(across.place(x), up.place(y)) for x, y in line], index)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(name: str, places: Sequence[Point], index: int) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    key = _TOP + 14 + 18 * index
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<line x1="{_RIGHT + 12}" x2="{_RIGHT + 30}" y1="{key}" y2="{key}" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{_RIGHT + 36}" y="{key + 4}">{name}</text>',
    ]


class _Axis:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._high, self._start, self._end = math.log(low), math.log(high), start, end

    def place(self, value: float) -> float:
        return self._start + (self._end - self._start) * (math.log(value) - self._low) / (self._high - self._low)


def _ticks(values: Sequence[float], base: float) -> list[float]:
    """Return powers of `base` around all values, two at least."""
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = max(low + 1, math.ceil(math.log(max(values), base) - 1e-9))
    return [base**power for power in range(low, high + 1)]
