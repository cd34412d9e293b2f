"""Drawings of measurements as SVG text: gaps over time, pairs of bars, curves. Knows nothing of engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 360, 64, 16, 40, 44
COLORS = ("#1f5fa8", "#c9822b")
STYLE = "font-family:system-ui,sans-serif;font-size:13px"


def draw_gaps(
    points_ms: Sequence[tuple[float, float]], marks_ms: Mapping[str, float], during_ms: tuple[float, float], tokens: int
) -> str:
    """A dot for each (end of the gap, gap), a dashed line for each mark, a band for the time the prompt took."""
    last_ms = max(end for end, _ in points_ms)
    top_ms = 1.08 * max(*(gap for _, gap in points_ms), *marks_ms.values())

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / last_ms, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top_ms, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="{STYLE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<rect x="{x(during_ms[0])}" y="{TOP}" width="{round(x(during_ms[1]) - x(during_ms[0]), 1)}" '
        f'height="{HEIGHT - TOP - BOTTOM}" fill="#f2efe6"/>',
        f'<text x="{LEFT}" y="22">time between two tokens of the running answers; shaded: a prompt of {tokens} tokens '
        "is computed beside them</text>",
    ]
    for number in range(6):
        value_ms, time_ms = top_ms * number / 5, last_ms * number / 5
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value_ms)}" y2="{y(value_ms)}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(value_ms) + 4}" text-anchor="end">{value_ms:.0f} ms</text>',
            f'<text x="{x(time_ms)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{time_ms / 1000:.1f} s</text>',
        ]
    parts += [f'<circle cx="{x(end)}" cy="{y(gap)}" r="2" fill="#1f5fa8"/>' for end, gap in points_ms]
    for name, value_ms in marks_ms.items():
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value_ms)}" y2="{y(value_ms)}" stroke="#b3402a" '
            'stroke-dasharray="6 4"/>',
            f'<text x="{WIDTH - RIGHT}" y="{y(value_ms) - 6}" text-anchor="end" fill="#b3402a">{name}: '
            f"{value_ms:.0f} ms</text>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class Bar:
    """Two values side by side; more is better."""

    title: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve; x ascends and is above 0."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share their axes; x is logarithmic, y begins at 0."""

    title: str
    x_title: str
    lines: Sequence[Line]


def draw_bars(bars: Sequence[Bar], names: tuple[str, str], subtitle: str) -> str:
    """Pairs of bars, each pair to the scale of its longer bar, with both values and their ratio."""
    label_width, row_height, top = 300, 44, 56
    height = top + row_height * len(bars) + 8
    room = WIDTH - label_width - 170
    parts = [
        *_open_drawing(height),
        f'<text x="16" y="24">{escape(subtitle)}</text>',
        *_draw_legend(names, label_width, 44),
    ]
    for number, bar in enumerate(bars):
        y = top + row_height * number
        longest = max(bar.first, bar.second)
        parts.append(f'<text x="{label_width - 10}" y="{y + 22}" text-anchor="end">{escape(bar.title)}</text>')
        for line, (value, color) in enumerate(zip((bar.first, bar.second), COLORS, strict=False)):
            width = round(room * value / longest, 1)
            parts += [
                f'<rect x="{label_width}" y="{y + 2 + 17 * line}" width="{width}" height="15" fill="{color}"/>',
                f'<text x="{label_width + width + 6}" y="{y + 14 + 17 * line}">{value:.4g}</text>',
            ]
        ratio = f'<text x="{WIDTH - 16}" y="{y + 23}" text-anchor="end" font-weight="600">'
        parts.append(f"{ratio}{bar.first / bar.second:.2f} ×</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_panels(panels: Sequence[Panel]) -> str:
    """Panels side by side, a curve in each for each name."""
    names = tuple(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    parts = [*_open_drawing(HEIGHT), *_draw_legend(names, LEFT, 24)]
    share = WIDTH / max(1, len(panels))
    for number, panel in enumerate(panels):
        parts += _draw_panel(panel, names, share * number + LEFT, share * (number + 1) - RIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(panel: Panel, names: Sequence[str], left: float, right: float) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    places = sorted({x for x, _ in points})
    low, high = math.log(places[0]), math.log(places[-1])
    top = 1.08 * max(y for _, y in points)
    top_y, bottom_y = TOP + 20, HEIGHT - BOTTOM

    def x(value: float) -> float:
        return round(left + (right - left) * ((math.log(value) - low) / (high - low) if high > low else 0.5), 1)

    def y(value: float) -> float:
        return round(bottom_y - (bottom_y - top_y) * value / top, 1)

    parts = [f'<text x="{left}" y="{top_y - 10}" font-weight="600">{escape(panel.title)}</text>']
    for number in range(6):
        value = top * number / 5
        parts += [
            f'<line x1="{left}" x2="{right}" y1="{y(value)}" y2="{y(value)}" stroke="#ddd"/>',
            f'<text x="{left - 8}" y="{y(value) + 4}" text-anchor="end">{value:.3g}</text>',
        ]
    parts += [f'<text x="{x(at)}" y="{bottom_y + 18}" text-anchor="middle">{at:,.0f}</text>' for at in places]
    parts.append(f'<text x="{right}" y="{bottom_y + 36}" text-anchor="end">{escape(panel.x_title)}</text>')
    for line in panel.lines:
        color = COLORS[names.index(line.name) % len(COLORS)]
        path = " ".join(f"{x(at)},{y(value)}" for at, value in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(at)}" cy="{y(value)}" r="3" fill="{color}"/>' for at, value in line.points]
    return parts


def _open_drawing(height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" style="{STYLE}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]


def _draw_legend(names: Sequence[str], left: float, y: float) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x = left + 120 * number
        parts += [
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[number % len(COLORS)]}"/>',
            f'<text x="{x + 18}" y="{y + 1}">{escape(name)}</text>',
        ]
    return parts
