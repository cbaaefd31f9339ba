"""The report of a run as one HTML file: a timeline with a lane for each VM, and the verdicts.

The file loads nothing and runs no script. Names and texts come from scenarios and from software
under test, so everything that is not a number goes through `escape`. Positions are percentages:
the browser scales the lanes to the width of the page without distorting their marks.
"""

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from importlib import resources
from itertools import zip_longest
from string import Template

from forewarn.duration import format_duration
from forewarn.junit import printable
from forewarn.lab.names import count
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.schema import Scenario, list_vms
from forewarn.lab.scenario.timeline import ENDINGS, Timeline, TrackedEvent, is_good, is_poll
from forewarn.lab.scenario.verdict import RunResult, VerdictOutcome
from forewarn.lab.transcript import TranscriptKind

LANES_MAX, END = 100, 100.0
POSITIONS, CROSSES = 500, 60
"""How many marks fit into a row: what is closer together is one mark."""
TICKS_MAX = 6
TICK_SECONDS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 604_800)
ROW, POLLS, TOP = 20, 16, 18
LABEL_PERCENT, FAULT_LABEL_PERCENT, TICK_LABEL_PERCENT_MAX = 22, 12, 95
SHAPES = {
    "step": "M-5 -5h10l-5 9z",
    "approval": "M0 -6l6 6-6 6-6-6z",
    "refused": "M-4 -4l8 8M4 -4l-8 8",
    "poll": "M0 -5v10",
    "bad": "M0 -5v10",
}


def render_html(scenario: Scenario, result: RunResult, console: Console) -> bytes:
    """Render the report. `console` has the lines of the run."""
    chart = Chart(result.timeline)
    busy = {vm for event in result.timeline.events.values() for vm in event.resources}
    vms = sorted(list_vms(*scenario.fleets), key=lambda vm: vm not in busy)
    more = f"<p>{len(vms) - LANES_MAX} more VMs</p>" if len(vms) > LANES_MAX else ""
    verdicts = [(verdict.outcome, verdict.expected, verdict.reason) for verdict in result.verdicts]
    verdicts += [(VerdictOutcome.NOT_REACHED, step, "") for step in result.skipped]
    outcome = "passed" if result.is_passed else "failed"
    template = (resources.files(__package__) / "report.html").read_text(encoding="utf-8")
    page = Template(template).substitute(
        title=escape(scenario.file.name),
        about=escape(scenario.file.about),
        ending=escape(result.ending),
        outcome=outcome,
        lanes="\n".join([chart.draw_axis(), *map(chart.draw_lane, vms[:LANES_MAX]), more]),
        verdicts="\n".join(
            f'<li class="{outcome.replace(" ", "-")}"><b>{outcome}</b> {escape(expected)}'
            f"<small>{escape(reason)}</small></li>"
            for outcome, expected, reason in verdicts
        ),
        lines=escape("\n".join(console.lines)),
    )
    return page.encode()


class Chart:
    """Draws the lanes of one timeline, as SVG."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        whole = timeline.seconds
        step = next((each for each in TICK_SECONDS if whole / each <= TICKS_MAX), int(whole) + 1)
        self._ticks = [(100 * at / (whole or 1), at) for at in range(0, int(whole) + 1, step)]

    def draw_axis(self) -> str:
        """Draw the times, and the steps below them."""
        parts = [
            f'<text class="muted" x="{x:.2f}%" y="12">+{format_duration(timedelta(0, at))}</text>'
            for x, at in self._ticks
            if x <= TICK_LABEL_PERCENT_MAX
        ]
        steps = [mark for mark in self._timeline.marks if mark.kind is TranscriptKind.STEP]
        texts = [(each.at, f"{each.what} {each.detail}") for each in steps]
        parts += self._draw_marks("step", 26, texts)
        return draw_row("steps", f"{len(steps)} in all", 36, parts)

    def draw_lane(self, vm: str) -> str:
        """Draw the faults, events, polls and approvals of a VM."""
        timeline = self._timeline
        polls = [each for each in timeline.requests[vm] if is_poll(each)]
        rows = stack([e for e in timeline.events.values() if vm in e.resources], timeline.end)
        bottom = TOP + ROW * max(len(rows), 1)
        parts = [
            f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{bottom + POLLS}"/>'
            for x, _ in self._ticks
        ]
        parts += self._draw_faults(vm, bottom + POLLS)
        for row, events in enumerate(rows):
            for event, following in zip_longest(events, events[1:]):
                free = self._x(following.at) if following else END
                parts += self._draw_event(event, TOP + ROW * row, free)
            approvals = [each for each in timeline.approvals if each.vm == vm]
            texts = [(a.at, timeline.format_approval(a)) for a in approvals if a.event in events]
            parts += self._draw_marks("approval", TOP + ROW * row + 8, texts)
        for style, is_wanted in (("poll", True), ("bad", False)):
            texts = [(each.at, str(each.status)) for each in polls if is_good(each) == is_wanted]
            parts += self._draw_marks(style, bottom + 8, texts)
        refusals = [(each.at, each.how) for each in timeline.refusals if each.vm == vm]
        parts += self._draw_marks("refused", bottom + 8, refusals)
        return draw_row(vm, count(len(polls), "poll"), bottom + POLLS, parts)

    def _draw_event(self, event: TrackedEvent, y: int, free: float) -> Iterator[str]:
        """Draw the notice and the impact as bars, and a label where there is room up to `free`."""
        timeline, started = self._timeline, event.find_change("started")
        end = event.find_change(*ENDINGS) or timeline.end
        changes = [f"{each.what} at {timeline.format_time(each.at)}" for each in event.changes]
        title = escape(f"{event}: {', '.join(changes)}")
        style = "notice canceled" if event.find_change("canceled") else "notice"
        yield self._draw_box(event.at, started or end, (y, 16), style, title)
        if started is not None:
            yield self._draw_box(started, end, (y, 16), "impact", title)
        left, right = self._x(event.at), self._x(end)
        places = (
            (f'x="{right}%" dx="5"', free - right),
            (f'x="{left}%" dx="-5" text-anchor="end"', left if free == END else 0),
            (f'x="{left}%" dx="18"', right - left),
        )
        label = escape(f"{event.name} {event.type}".strip())
        where = next((place for place, room in places if room >= LABEL_PERCENT), None)
        if where is not None:
            yield f'<text {where} y="{y + 12}">{label}</text>'

    def _draw_faults(self, vm: str, height: int) -> Iterator[str]:
        """A fault ends when it is removed, or with the last request that it affected."""
        marks = [each for each in self._timeline.marks if each.kind is TranscriptKind.FAULT]
        ends = {each.detail: each.at for each in marks if each.what == "removed"}
        free = 0.0
        for mark in marks:
            if mark.what != "added" or (mark.vm and vm not in mark.vm.split(", ")):
                continue
            kind = mark.detail.partition(" ")[2]
            affected = [each.at for each in self._timeline.requests[vm] if kind in each.faults]
            end = ends.get(mark.detail) or max(affected, default=self._timeline.end)
            yield self._draw_box(mark.at, end, (0, height), "fault", escape(mark.detail))
            x = self._x(mark.at)
            if x >= free:
                free = x + FAULT_LABEL_PERCENT
                yield f'<text class="muted" x="{x}%" dx="3" y="11">{escape(kind)}</text>'

    def _draw_box(
        self, begin: datetime, end: datetime, rows: tuple[int, int], style: str, title: str
    ) -> str:
        x, width = self._x(begin), max(self._x(end) - self._x(begin), 0.3)
        return (
            f'<rect class="{style}" x="{x}%" width="{width:.2f}%" y="{rows[0]}"'
            f' height="{rows[1]}" rx="2"><title>{title}</title></rect>'
        )

    def _draw_marks(self, style: str, y: int, texts: list[tuple[datetime, str]]) -> Iterator[str]:
        """Draw shapes that keep their size: SVGs of their own, at positions in percent."""
        counts: Counter[float] = Counter()
        titles: dict[float, str] = {}
        for at, text in texts:
            x = self._x(at, CROSSES if style == "refused" else POSITIONS)
            counts[x] += 1
            if x not in titles:
                titles[x] = escape(f"{self._timeline.format_time(at)}: {text}")
        for x, title in titles.items():
            more = f" and {counts[x] - 1} more" if counts[x] > 1 else ""
            path = f'<path class="{style}" d="{SHAPES[style]}"><title>{title}{more}</title></path>'
            yield f'<svg x="{x}%" y="{y}">{path}</svg>'

    def _x(self, time: datetime, positions: int = POSITIONS) -> float:
        """Return one of these positions, in percent."""
        timeline = self._timeline
        share = (time - timeline.start) / max(timeline.end - timeline.start, timedelta(0, 0, 1))
        return round(min(max(share, 0), 1) * positions) * 100 / positions


def stack(events: Sequence[TrackedEvent], end: datetime) -> list[list[TrackedEvent]]:
    """Put the events of a VM into rows in which none overlaps another."""
    rows: list[list[TrackedEvent]] = []
    for event in events:
        free = [row for row in rows if (row[-1].find_change(*ENDINGS) or end) <= event.at]
        if not free:
            free = [[]]
            rows += free
        free[0].append(event)
    return rows


def draw_row(name: str, note: str, height: int, parts: Sequence[str]) -> str:
    label = f"<b>{escape(name)}<small>{note}</small></b>"
    return f'<div class="lane">{label}<svg height="{height}">{"".join(parts)}</svg></div>'


def escape(text: str) -> str:
    return html.escape(printable(text))
