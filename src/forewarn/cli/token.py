"""`forewarn token`: who may call the control API.

With `--store` it works on the store itself, without a service.
"""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from forewarn.cli.api import connect
from forewarn.cli.options import Json, check_store_kind, read_config, with_options
from forewarn.cli.output import show_json, show_list
from forewarn.cli.store import ETCD_OPTIONS, Work, check_exists, run_on_store
from forewarn.config import Config

if TYPE_CHECKING:
    from forewarn.web.service import Service

T = TypeVar("T")

# fmt: off
Name = Annotated[str, typer.Argument(
    metavar="NAME", help="Of a-z, 0-9 and -; it appears in the history.")]
RoleOption = Annotated[Literal["viewer", "operator", "admin", "host"], typer.Option(
    help="viewer, operator or admin; host for a host daemon.", metavar="ROLE",
    case_sensitive=False)]
HostOption = Annotated[str | None, typer.Option(
    "--host", help="With the role host: the host that the daemon runs on.", metavar="HOST")]
Scopes = Annotated[list[str] | None, typer.Option(
    "--scope", help="With the role host: place VMs only in this scope or in one of their own;"
    " may be repeated.", metavar="SCOPE")]
Expires = Annotated[str | None, typer.Option(
    help="Expire after this time, such as 90d or 12h.", metavar="DURATION")]
Store = Annotated[str | None, typer.Option(
    help="Work on this store, as in `serve --store`, not on a service.", metavar="URL")]
# fmt: on
COLUMNS = ("name", "role", "created_at", "expires_at", "is_expired", "host", "scopes")
BY = "command line"

app = typer.Typer(
    help="Tokens, who may call the control API: create, list, revoke.", no_args_is_help=True
)


@app.command()
@with_options(Config, only=ETCD_OPTIONS)
def create(
    context: typer.Context,
    name: Name,
    *,
    role: RoleOption,
    host: HostOption = None,
    scope: Scopes = None,
    expires: Expires = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Create a token and print it, once.

    The first token must be an admin's. From then on every request needs a token.

    Example: forewarn token create ann --role operator --expires 90d
    """
    body = {"name": name, "role": role, "host": host, "scopes": scope or [], "expires": expires}
    if store is None:
        response = connect(context).post("tokens", body=body, may_repeat=False)
    else:
        response = _run_on(context, store, lambda on: _create(on, body), may_create=True)
    if as_json:
        show_json(response)
        return
    print(response["text"])
    print("this is printed once; set FOREWARN_TOKEN to use it", file=sys.stderr)


@app.command("list")
@with_options(Config, only=ETCD_OPTIONS)
def list_all(context: typer.Context, *, store: Store = None, as_json: Json = False) -> None:
    """List all tokens, without their secrets.

    Example: forewarn token list
    """
    response = connect(context).get("tokens") if store is None else _run_on(context, store, _list)
    show_list(response, "tokens", COLUMNS, as_json=as_json)


@app.command()
@with_options(Config, only=ETCD_OPTIONS)
def revoke(context: typer.Context, name: Name, *, store: Store = None) -> None:
    """Revoke a token. It is refused from now on.

    The last admin token can be revoked when there are no other tokens.

    Example: forewarn token revoke ann
    """
    if store is None:
        connect(context).delete("tokens", name)
    else:
        _run_on(context, store, lambda service: service.tokens.revoke(name, by=BY))
    print(f"{name} is revoked")


def _run_on(context: typer.Context, store: str, work: Work[T], *, may_create: bool = False) -> T:
    exists = check_exists("--store", store, may_create=may_create)
    resolved = read_config(context, Config)
    # Else a token is created that no server knows, or one is revoked that servers still accept.
    check_store_kind(context, resolved)
    if not exists:
        print(f"creating the store {store}", file=sys.stderr)
    return run_on_store("token --store", store, work, resolved.config)


async def _create(service: "Service", body: Mapping[str, Any]) -> Any:
    """As the API does it."""
    from msgspec import to_builtins

    from forewarn.web.control.checks import decode_strictly
    from forewarn.web.control.routes.token import NewToken, create_token

    new = decode_strictly(json.dumps(body).encode(), NewToken)
    return to_builtins(await create_token(service, new, by=BY))


async def _list(service: "Service") -> Any:
    from msgspec import to_builtins

    from forewarn.web.control.routes.token import token_list

    return to_builtins(token_list(service))
