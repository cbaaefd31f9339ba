"""How responses are printed: tables on a terminal, aligned text in a pipe, JSON for programs.

Works without typer and rich, for `forewarn conform`. On a terminal, times are relative to the time
of the service, which in a lab is not the real time.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from forewarn.cli.times import TIME, format_relative, format_utc

SERVICE_TIME = ContextVar("service_time", default=lambda: datetime.now(UTC))
GUID = re.compile(r"\b([0-9A-Fa-f]{8})(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
ITEMS_SHOWN_MAX = 5
UNBROKEN_LENGTH_MAX = 24
"""Longer cells are wrapped at spaces, or anywhere. Ids, times and states are shorter."""


def show_list(
    response: Mapping[str, Any], kind: str, columns: Sequence[str], *, as_json: bool = False
) -> None:
    """The items of a list, one per line. A narrow terminal shows the first columns."""
    if as_json:
        show_json(response)
        return
    now = SERVICE_TIME.get()() if sys.stdout.isatty() and response[kind] else None
    rows = [
        [_format_cell(column, item[column], now) for column in columns] for item in response[kind]
    ]
    _show_rows([column.replace("_", " ").upper() for column in columns], rows)
    if response["total"] > len(rows):
        text = f"showing {len(rows)} of {response['total']} {kind}; use --limit to see more"
        print(text, file=sys.stderr)


def _format_cell(column: str, value: object, now: datetime | None) -> str:
    if isinstance(value, list) and len(value) > ITEMS_SHOWN_MAX:
        return f"{len(value)} {column.replace('_', ' ')}"
    if now and isinstance(value, str) and TIME.fullmatch(value):
        return format_relative(value, now)
    text = _format(value)
    if column == "problems":
        return text  # it may contain ids of libvirt, and virsh accepts only whole ones
    return shorten(text)


def show_one(item: Mapping[str, Any]) -> None:
    """One item, a line for each member."""
    width = max(len(name) for name in item)
    for name, value in item.items():
        is_time = isinstance(value, str) and TIME.fullmatch(value)
        relative = f" ({format_time(value)})" if is_time and sys.stdout.isatty() else ""
        print(f"{name.replace('_', ' '):{width}}  {_format(value)}{relative}")


def show_events(
    response: Mapping[str, Any], if_none: str = "", result: str = "", done: str = "restarted"
) -> None:
    """The events of an operation, one per line. `result` replaces the status if the event ended.

    `done` is what happens to the VM, for an operation without an event.
    """
    events = response.get("events", [response.get("event")])
    events = [event for event in events if event is not None]
    for event in events:
        status, start = result or event["status"], format_time(event["not_before"])
        notice = f", {'starts' if sys.stdout.isatty() else 'not before'} {start}"
        notice = notice if status == "Scheduled" else ""
        resources = _format(event["resources"])
        print(f"{event['type']} {shorten(event['id'])} of {resources} is {status}{notice}")
    reason = response.get("reason")
    if reason:
        when = "" if response.get("waits_for") else " now"
        silent = f"the VM is {done}{when}, without an event: " if reason["code"] != "ended" else ""
        print(printable(f"{silent}{shorten(reason['message'])}"))
    elif not events:
        print(if_none)
    if response.get("waits_for"):
        print(printable(f"the impact waits for {response['waits_for']}"))


def show_warnings(response: Mapping[str, Any]) -> None:
    """What an operation that was accepted does not cover."""
    for warning in response.get("warnings", ()):
        print(printable(f"warning: {warning}"))


def format_time(text: str) -> str:
    """How far away a time is, on a terminal; the time, in a pipe."""
    return format_relative(text, SERVICE_TIME.get()()) if sys.stdout.isatty() else format_utc(text)


def show_json(response: object) -> None:
    print(json.dumps(response, indent=2, ensure_ascii=False))


def shorten(text: str) -> str:
    """Text in which ids have 8 characters, which every command of Forewarn accepts."""
    return GUID.sub(r"\1", text)


def printable(text: str) -> str:
    """Text without characters that control a terminal."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _show_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        widths = fit_columns(titles, rows, console.width)
        for title, width in zip(titles, widths, strict=False):
            table.add_column(title, width=width, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row[: len(widths)]))
        console.print(table)
        return
    lengths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = (f"{cell:{length}}" for cell, length in zip(row, lengths, strict=True))
        print("  ".join(cells).rstrip())


def fit_columns(titles: Sequence[str], rows: Sequence[Sequence[str]], width_max: int) -> list[int]:
    """The widths of the first columns, as many as fit with a gap of 2. At least one."""
    widths, longest = list[int](), list[int]()
    for title, *cells in zip(titles, *rows, strict=True):
        cell = max(map(len, cells), default=0)
        width = max(*map(len, title.split()), min(cell, UNBROKEN_LENGTH_MAX))
        if widths and sum(widths) + 2 * len(widths) + width > width_max:
            break
        widths.append(width)
        longest.append(max(len(title), cell))
    left = width_max - sum(widths) - 2 * (len(widths) - 1)
    for index, width in enumerate(widths):
        widths[index] = min(longest[index], width + max(left, 0))
        left -= widths[index] - width
    return widths


def _format(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(
            f"{name.replace('_', ' ')} {_format(part)}" for name, part in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(_format, value)) or "-"
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    text = printable(str(value))
    return format_utc(text) if TIME.fullmatch(text) else text
