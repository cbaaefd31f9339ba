"""What all nouns have: `list` and `show`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from forewarn.cli.api import connect
from forewarn.cli.output import Json, show_list, show_one

Limit = Annotated[int, typer.Option(help="At most so many.", min=1, max=1_000_000)]
NotBefore = Annotated[
    str | None,
    typer.Option(
        help="The earliest moment, such as 2030-01-31T12:00:00Z; later than the notice asks, never sooner."
    ),
]


def noun(name: str, help_: str, columns: Sequence[str]) -> typer.Typer:
    """The commands of a noun, with its `list` and `show`."""
    app = typer.Typer(help=help_, no_args_is_help=True)
    kind = f"{name}s"

    @app.command("list", help=f"All {kind} and what there is to know in a line.")
    def list_all(context: typer.Context, *, limit: Limit = 1000, as_json: Json = False) -> None:
        show_list(connect(context).list(kind, limit), kind, columns, as_json=as_json)

    @app.command("show", help=f"One {name} and all there is to know.")
    def show(
        context: typer.Context,
        which: Annotated[str, typer.Argument(metavar=name.upper())],
        *,
        as_json: Json = False,
    ) -> None:
        show_one(connect(context).get(kind, which), as_json=as_json)

    return app
