"""`forewarn token`: who may call the control API.

With `--store` it works on the store itself, without a service.
"""

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from forewarn.cli.api import connect
from forewarn.cli.exit_codes import Usage
from forewarn.cli.offline import on_store
from forewarn.cli.output import Json, show_json, show_list

if TYPE_CHECKING:
    from forewarn.web.service import Service

T = TypeVar("T")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Of a-z, 0-9 and -; it stands in the history.")
]
RoleOption = Annotated[str, typer.Option(help="viewer, operator or admin.", metavar="ROLE")]
Expires = Annotated[
    str | None,
    typer.Option(help="For how long, such as 90d or 12h; without it for good.", metavar="SPAN"),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="The store itself, as `serve --store` has it; no service is asked.", metavar="URL"
    ),
]
COLUMNS = ("name", "role", "created_at", "expires_at", "is_expired")
BY = "command line"
SECRET_BYTES = 32

app = typer.Typer(
    help="Tokens, who may call the control API: create, list, revoke.", no_args_is_help=True
)


@app.command()
def create(
    context: typer.Context,
    name: Name,
    *,
    role: RoleOption,
    expires: Expires = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Make a token and show it, this once.

    The first has to be an admin's; from then on every request needs one.
    """
    said = {"name": name, "role": role, "expires": expires}
    answer = (
        connect(context).post("tokens", said=said) if store is None else _create_on(store, said)
    )
    if as_json:
        show_json(answer)
        return
    typer.echo(answer["text"])
    typer.echo("this is shown once; FOREWARN_TOKEN hands it to the other commands", err=True)


@app.command("list")
def list_all(context: typer.Context, *, store: Store = None, as_json: Json = False) -> None:
    """All tokens, without their secrets."""
    answer = connect(context).get("tokens") if store is None else _on(store, _list)
    show_list(answer, "tokens", COLUMNS, as_json=as_json)


@app.command()
def revoke(context: typer.Context, name: Name, *, store: Store = None) -> None:
    """End a token, at once and everywhere. The last admin's goes last."""
    if store is None:
        connect(context).delete("tokens", name)
    else:
        _on(store, lambda service: service.tokens.revoke(name, by=BY))
    typer.echo(f"{name} is revoked")


def _create_on(store: str, said: Mapping[str, str | None]) -> Any:
    if _is_missing(store):
        typer.echo(f"there is no store {store} yet: it is made now", err=True)
    return _on(store, lambda service: _create(service, said), may_make=True)


def _is_missing(store: str) -> bool:
    path = store.removeprefix("sqlite:///")
    return path not in (store, "") and not Path(path).exists()


def _on(store: str, work: "Callable[[Service], Awaitable[T]]", *, may_make: bool = False) -> T:
    """Do it on the store itself. A name with a slip in it makes no new one."""
    if store == "memory":
        raise Usage("--store: a store in memory is nobody else's; expected sqlite:///PATH")
    if not may_make and _is_missing(store):
        raise Usage(
            f"--store: there is no file {store.removeprefix('sqlite:///')}; expected the store of a service"
        )
    return on_store("token --store", store, work)


async def _create(service: "Service", said: Mapping[str, str | None]) -> Any:
    """As the API would."""
    from msgspec import to_builtins

    from forewarn.web.control.checks import read_strictly
    from forewarn.web.control.routes.token import NewToken, make

    new = read_strictly(json.dumps(said).encode(), NewToken)
    secret = secrets.token_hex(SECRET_BYTES)
    return to_builtins(await make(service.engine, service.tokens, new, secret=secret, by=BY))


async def _list(service: "Service") -> Any:
    from msgspec import to_builtins

    from forewarn.web.control.routes.token import listed

    return to_builtins(listed(service.engine, service.tokens))
