"""Line charts with logarithmic axes, as SVG text.

Both axes end at powers of ten: what grows with the fleet rises by one power of ten in each column.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 84, 48, 78, 56
LEGEND_COLUMN = 240
COLORS = ("#1f5fa8", "#c2571a", "#2f855a", "#8b3a8f")
DASHES = ("", "6 4", "2 3", "9 3 2 3")
"""Lines differ in more than their color: print, and readers who do not see colors."""

Points = Sequence[tuple[float, float]]


class Axis:
    """Values to pixels, from the power of ten at or below all of them to the one above."""

    def __init__(self, values: Sequence[float], first_pixel: float, last_pixel: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)
        self._first = first_pixel
        self._step = (last_pixel - first_pixel) / (self.high - self.low)

    def pixel(self, value: float) -> float:
        return round(self._first + (math.log10(value) - self.low) * self._step, 1)

    def powers(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]

    def steps(self) -> list[float]:
        """The powers of ten, and 2 and 5 times each where there are only a few."""
        factors = (1, 2, 5) if self.high - self.low <= 2 else (1,)
        steps = [factor * power for power in self.powers()[:-1] for factor in factors]
        return [*steps, 10.0**self.high]


def draw(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """A chart of these lines by name. All values are positive."""
    points = [point for line in lines.values() for point in line]
    x = Axis([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = Axis([point[1] for point in points], HEIGHT - BOTTOM, TOP)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(title)}"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#222">'
    )
    return "\n".join(
        [
            opening,
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            text(LEFT, 24, title, "start", 'font-size="15" font-weight="600"'),
            *legend(list(lines)),
            *grid(x, y),
            text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label),
            text(20, middle, y_label, "middle", f'transform="rotate(-90 20 {middle:g})"'),
            *(
                part
                for number, line in enumerate(lines.values())
                for part in curve(number, [(x.pixel(at), y.pixel(value)) for at, value in line])
            ),
            "</svg>\n",
        ]
    )


def grid(x: Axis, y: Axis) -> list[str]:
    """A line and a label for each step."""
    columns = [
        part
        for value in x.powers()
        for part in (
            stroke(x.pixel(value), TOP, x.pixel(value), HEIGHT - BOTTOM),
            text(x.pixel(value), HEIGHT - BOTTOM + 19, show(value)),
        )
    ]
    rows = [
        part
        for value in y.steps()
        for part in (
            stroke(LEFT, y.pixel(value), WIDTH - RIGHT, y.pixel(value)),
            text(LEFT - 8, y.pixel(value) + 4, show(value), "end"),
        )
    ]
    return [*columns, *rows]


def legend(names: Sequence[str]) -> list[str]:
    """The name of each line next to a piece of it, above the chart, two in a row."""
    parts = []
    for number, name in enumerate(names):
        left, top = LEFT + number % 2 * LEGEND_COLUMN, 44 + number // 2 * 18
        parts += curve(number, [(left, top), (left + 28, top)], is_marked=False)
        parts.append(text(left + 34, top + 4, name, "start"))
    return parts


def curve(number: int, pixels: Points, *, is_marked: bool = True) -> list[str]:
    color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
    path = " ".join(f"{x:g},{y:g}" for x, y in pixels)
    line = (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"'
        f' stroke-dasharray="{dash or "none"}"/>'
    )
    marks = [f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{color}"/>' for x, y in pixels]
    return [line, *marks] if is_marked else [line]


def stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#ddd"/>'


def text(x: float, y: float, content: str, anchor: str = "middle", more: str = "") -> str:
    attributes = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" {more}'.rstrip()
    return f"<text {attributes}>{escape(content)}</text>"


def show(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
