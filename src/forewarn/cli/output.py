"""How responses are printed: tables on a terminal, aligned text in a pipe, JSON for programs.

Works without typer and rich, for `forewarn conform`.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def show_list(
    response: Mapping[str, Any], kind: str, columns: Sequence[str], *, as_json: bool = False
) -> None:
    """The items of a list, one per line."""
    if as_json:
        show_json(response)
        return
    rows = [
        [
            format_age(item["seen_at"]) if column == "seen" else _format(item[column])
            for column in columns
        ]
        for item in response[kind]
    ]
    _show_rows([column.replace("_", " ").upper() for column in columns], rows)
    if response["total"] > len(rows):
        text = f"showing {len(rows)} of {response['total']} {kind}; use --limit to see more"
        print(text, file=sys.stderr)


def format_age(timestamp: str | None) -> str:
    """How long ago something was, in the largest unit that fits."""
    if timestamp is None:
        return "never"
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{max(seconds, 0)}s ago"


def show_one(item: Mapping[str, Any]) -> None:
    """One item, a line for each member."""
    width = max(len(name) for name in item)
    for name, value in item.items():
        print(f"{name.replace('_', ' '):{width}}  {_format(value)}")


def show_events(response: Mapping[str, Any], if_none: str = "", result: str = "") -> None:
    """The events of an operation, one per line. `result` replaces the status if the event ended."""
    events = response.get("events", [response.get("event")])
    events = [event for event in events if event is not None]
    for event in events:
        status = result or event["status"]
        notice = f", not before {event['not_before']}" if status == "Scheduled" else ""
        resources = _format(event["resources"])
        print(f"{event['type']} {event['id']} of {resources} is {status}{notice}")
    if not events:
        print(if_none)


def show_json(response: object) -> None:
    print(json.dumps(response, indent=2, ensure_ascii=False))


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

        table = Table(*titles, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


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
    return printable(str(value))
