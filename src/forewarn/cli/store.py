"""`forewarn store`: the store itself, while no service has it open."""

import os
import secrets
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from forewarn.cli.exit_codes import Usage, needs_server_parts
from forewarn.cli.offline import on_store
from forewarn.errors import StoreLost, StoreUnusable

if TYPE_CHECKING:
    from forewarn.web.service import Service

app = typer.Typer(help="The store itself, without a service: restore.", no_args_is_help=True)

Backup = Annotated[str, typer.Argument(metavar="BACKUP", help="The file that a backup has made.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="The store, as `serve --store` has it, or the path of its file."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a store that exists. It is kept under another name."),
]
KeepTokens = Annotated[
    bool, typer.Option("--keep-tokens", help="Keep the backup's tokens, also those revoked since.")
]
COMMAND = "store restore"
SECRET_BYTES = 32
ADMIN = "restored-{:%Y%m%d-%H%M%S}"
ASIDE = "{}.replaced-{:%Y%m%dT%H%M%SZ}"


class Restored(NamedTuple):
    """The number of all documents, the revoked tokens, and the new admin's token, if any."""

    number: int
    revoked: list[str]
    token: str


@app.callback()
def store() -> None:
    """The store itself, without a service: restore."""


@app.command()
def restore(
    backup: Backup, target: Target, *, force: Force = False, keep_tokens: KeepTokens = False
) -> None:
    """Put a backup in the place of the store. The service must be stopped.

    Copying the file back would bring back old document numbers, so that clients would miss events,
    and revoked tokens. This raises the numbers above all that was shown, revokes all tokens and
    makes a new one for an admin.
    """
    with needs_server_parts(COMMAND):
        from forewarn.engine.clock import RealClock
        from forewarn.store.copy import restoring
    source, path = _path("BACKUP", backup), _path("TARGET", target)
    aside, secret = ASIDE.format(path, RealClock().now()), secrets.token_hex(SECRET_BYTES)
    with restoring(source, path, aside=aside, may_replace=force) as copy:
        above = _shown_by(path)
        done = on_store(
            COMMAND,
            f"sqlite:///{copy}",
            lambda service: _renew(service, above, source, "" if keep_tokens else secret),
        )
    _tell(done, source, path, aside, keep_tokens=keep_tokens)


def _path(what: str, given: str) -> str:
    from forewarn.store.open import path_of

    path = path_of(given)
    if not path and (given in ("", "memory") or "://" in given):
        raise Usage(
            f"{what}: {given!r} is not a file; expected sqlite:///PATH or the path of a file"
        )
    return os.path.realpath(path or given)


async def _renew(service: "Service", above: int, source: str, secret: str) -> Restored:
    """What must change in a backup before it is served: the world has gone on since.

    Tokens revoked after the backup would be good again, so all are revoked. Entries of the history
    get numbers that were given before, so the store gets a new identity for webhooks.
    """
    from forewarn.engine.restore import raise_incarnations
    from forewarn.history.webhooks import IDENTITY_KEY

    number = await raise_incarnations(
        service.engine, above=above, source=source, delete=[IDENTITY_KEY]
    )
    if not secret:
        return Restored(number, [], "")
    name = ADMIN.format(service.engine.clock.now())
    return Restored(number, *await service.tokens.replace_all(name, secret=secret, by=COMMAND))


def _shown_by(path: str) -> int:
    """The highest document number that the store to be replaced has shown;

    0 if there is none or it cannot be read.
    """
    from forewarn.engine.restore import highest_incarnation

    async def look(service: "Service") -> int:
        return highest_incarnation(service.engine)

    if not os.path.exists(path):
        return 0
    try:
        return on_store(COMMAND, f"sqlite:///{path}", look)
    except (StoreUnusable, StoreLost) as problem:
        typer.echo(
            f"the store to be replaced cannot be read, so only the backup's numbers count: {problem.message}",
            err=True,
        )
        return 0


def _tell(done: Restored, source: str, path: str, aside: str, *, keep_tokens: bool) -> None:
    typer.echo(f"{path} is restored from {source}")
    if os.path.exists(aside):
        typer.echo(f"the previous store was saved as {aside}")
    typer.echo(
        f"document numbers continue at {done.number}, above those of the backup and of the store it replaces"
    )
    if keep_tokens:
        typer.echo("the tokens are those of the backup: revoke again what was revoked since")
    if done.revoked:
        typer.echo(f"revoked tokens: {', '.join(done.revoked)}")
        typer.echo(f"the new admin token, shown this once: {done.token}")
    more = ", make new tokens with this one" if done.token else ""
    typer.echo(
        f"next: start the service{more}, and look at `forewarn event list` and `forewarn vm list`:"
        " changes made after the backup are missing"
    )
