"""How answers are shown: tables on a terminal, aligned text in a pipe, JSON for programs."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="The API's own JSON, for programs.")]


def show_list(
    answer: Mapping[str, Any], noun: str, columns: Sequence[str], *, as_json: bool
) -> None:
    """The list that an answer holds under its noun, one line each."""
    if as_json:
        show_json(answer)
        return
    rows = [[_text(one[column]) for column in columns] for one in answer[noun]]
    _show_rows([column.replace("_", " ").upper() for column in columns], rows)
    if answer["total"] > len(rows):
        typer.echo(
            f"{len(rows)} of {answer['total']} {noun} are shown; --limit shows more", err=True
        )


def show_one(answer: Mapping[str, Any], *, as_json: bool) -> None:
    """One thing, a line for each member."""
    if as_json:
        show_json(answer)
        return
    width = max(len(name) for name in answer)
    for name, value in answer.items():
        typer.echo(f"{name.replace('_', ' '):{width}}  {_text(value)}")


def show_events(
    answer: Mapping[str, Any], nothing: str = "", *, done: str = "", as_json: bool
) -> None:
    """What came of an operation: a sentence for each event.

    `done` tells what became of an event that is shown as it last was.
    """
    if as_json:
        show_json(answer)
        return
    told = [event for event in answer.get("events", [answer.get("event")]) if event is not None]
    for event in told:
        when = (
            f", not before {event['not_before']}"
            if event["status"] == "Scheduled" and not done
            else ""
        )
        typer.echo(
            f"{event['type']} {event['id']} of {_text(event['resources'])} is {done or event['status']}{when}"
        )
    if not told:
        typer.echo(nothing)


def show_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))


def _show_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
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
        typer.echo(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _text(value: object) -> str:
    """A value in words."""
    if isinstance(value, Mapping):
        return "; ".join(
            f"{name.replace('_', ' ')} {_text(member)}" for name, member in value.items()
        )
    if isinstance(value, list):
        return ", ".join(_text(member) for member in value) or "-"
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return plain(str(value))


def plain(text: str) -> str:
    """What a terminal would obey instead of showing it is replaced."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
