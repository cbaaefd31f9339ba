"""`forewarn store`, and work on a store without a service."""

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from forewarn.cli.exit_codes import Usage, needs_extra
from forewarn.cli.options import read_config, with_options
from forewarn.config import Config, options
from forewarn.errors import Refused, StoreLost, StoreUnusable

if TYPE_CHECKING:
    from forewarn.web.service import Service

T = TypeVar("T")
Work = Callable[["Service"], Awaitable[T]]
DEFAULTS = Config()

app = typer.Typer(help="The store, without a service: check, copy, restore.", no_args_is_help=True)
ETCD_OPTIONS = [each.name for each in options(Config) if each.name.startswith("etcd_")]

# fmt: off
Backup = Annotated[str, typer.Argument(metavar="BACKUP", help="The file that a backup created.")]
Target = Annotated[str, typer.Argument(
    metavar="TARGET", help="The store, as in `serve --store`, or its file.")]
Force = Annotated[bool, typer.Option(
    "--force", help="Replace an existing store. It is kept under another name.")]
Url = Annotated[str, typer.Argument(metavar="URL", help="The store, as in `serve --store`.")]
From = Annotated[str, typer.Argument(metavar="SOURCE", help="The store, as in `serve --store`.")]
To = Annotated[str, typer.Argument(metavar="TARGET", help="An empty store, of any kind.")]
KeepTokens = Annotated[bool, typer.Option(
    "--keep-tokens", help="Keep the tokens of the backup, even those revoked since.")]
# fmt: on
COMMAND = "store restore"
SECRET_BYTES = 32
ADMIN = "restored-{:%Y%m%d-%H%M%S}"
REPLACED = "{}.replaced-{:%Y%m%dT%H%M%SZ}"


class Restored(NamedTuple):
    """The number of all documents, the revoked tokens, and the new admin's token, if any."""

    number: int
    revoked: list[str]
    token: str


@app.command()
def restore(
    backup: Backup, target: Target, *, force: Force = False, keep_tokens: KeepTokens = False
) -> None:
    """Replace the store with a backup. Stop the service first.

    Do not just copy the file: old document numbers would return, so that clients miss events, and
    revoked tokens would be valid again. This command raises the numbers above all that clients have
    seen, revokes all tokens and creates a new admin token.
    """
    with needs_extra(COMMAND):
        from forewarn.engine.clock import RealClock
        from forewarn.store.copy import restoring
    source, path = _parse_path("BACKUP", backup), _parse_path("TARGET", target)
    aside, secret = REPLACED.format(path, RealClock().now()), secrets.token_hex(SECRET_BYTES)
    with restoring(source, path, aside=aside, may_replace=force) as copy:
        above = _highest_number_in(path)
        renewed = run_on_store(
            COMMAND,
            f"sqlite:///{copy}",
            lambda service: _renew(service, above, source, "" if keep_tokens else secret),
        )
    _report(renewed, source, path, aside, keep_tokens=keep_tokens)


@app.command()
@with_options(Config, only=ETCD_OPTIONS)
def check(context: typer.Context, url: Url) -> None:
    """Read the whole store and report what is wrong with it. Servers may be using it."""
    with needs_extra("store check"):
        from forewarn.history.integrity import inspect
    check_exists("URL", url)
    config = read_config(context, Config).config
    counts, problems = run_on_store(
        "store check", url, lambda service: inspect(service.engine), config, may_upgrade=False
    )
    print("\n".join([*(f"{name}: {counts[name]}" for name in sorted(counts)), *problems]))
    if problems:
        raise Refused(f"{len(problems)} problems found; expected none")
    print("ok")


@app.command()
@with_options(Config, only=ETCD_OPTIONS)
def copy(context: typer.Context, source: From, target: To) -> None:
    """Copy a store into an empty one, of any kind, and compare them. Stop the service first.

    An interrupted copy cannot be served; copy again to continue it.
    """
    with needs_extra("store copy"):
        from forewarn.history.transfer import copy_store
        from forewarn.server import etcd_options
        from forewarn.store.open import open_store
    etcd = etcd_options(read_config(context, Config).config)

    async def run() -> tuple[str, str]:
        async with AsyncExitStack() as stack:
            stores = []
            for url in (source, target):
                stores.append(await open_store(url, etcd=etcd))
                stack.push_async_callback(stores[-1].close)
            return await copy_store(*stores)

    check_exists("SOURCE", source)
    check_exists("TARGET", target, may_create=True)
    in_source, in_target = asyncio.run(run())
    print(f"source: {in_source}\ntarget: {in_target}")
    if in_source != in_target:
        raise Refused("the copy differs from the source; delete the target and copy again")
    print("the copy is complete; start the service on it, and not on the source")


def check_exists(argument: str, url: str, *, may_create: bool = False) -> None:
    """A typing error must not create a new store."""
    path = url.removeprefix("sqlite:///")
    if url == "memory":
        raise Usage(f"{argument}: a memory store belongs to one process; expected sqlite:///PATH")
    if path != url and not may_create and not os.path.exists(path):
        raise Usage(f"{argument}: no such file: {path}; expected the store of a service")


def run_on_store(
    command: str, url: str, work: "Work[T]", config: Config = DEFAULTS, *, may_upgrade: bool = True
) -> T:
    """Call `work` with a service that has loaded the store.

    Servers may be using the store at the same time.
    """
    with needs_extra(command):
        from forewarn.core.timing import Timing
        from forewarn.engine.clock import RealClock
        from forewarn.engine.migration import UPGRADE
        from forewarn.server import etcd_options, make_id, open_service
        from forewarn.store.open import open_store

    async def run() -> T:
        store = await open_store(url, UPGRADE if may_upgrade else None, etcd_options(config))
        async with open_service(store, RealClock(), Timing(), make_id) as service:
            return await work(service)

    return asyncio.run(run())


def _parse_path(argument: str, text: str) -> str:
    from forewarn.store.open import path_of

    path = path_of(text)
    if not path and (text in ("", "memory") or "://" in text):
        raise Usage(f"{argument}: {text!r} is not a file; expected sqlite:///PATH or a file name")
    return os.path.realpath(path or text)


async def _renew(service: "Service", above: int, source: str, secret: str) -> Restored:
    """Change what must not return with a backup.

    Tokens that were revoked after the backup would be valid again, so all are revoked. New history
    entries get positions that were used before, so webhooks get a new identity of the store.
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


def _highest_number_in(path: str) -> int:
    """The highest document number that clients have seen; 0 if the store is missing or broken."""
    from forewarn.engine.restore import highest_incarnation

    async def read(service: "Service") -> int:
        return highest_incarnation(service.engine)

    if not os.path.exists(path):
        return 0
    try:
        return run_on_store(COMMAND, f"sqlite:///{path}", read)
    except (StoreUnusable, StoreLost) as error:
        print(
            "cannot read the store to be replaced, so only the numbers of the backup count: "
            f"{error.message}",
            file=sys.stderr,
        )
        return 0


def _report(renewed: Restored, source: str, path: str, aside: str, *, keep_tokens: bool) -> None:
    print(f"{path} is restored from {source}")
    if os.path.exists(aside):
        print(f"the previous store was saved as {aside}")
    print(
        f"document numbers continue at {renewed.number}, above those of the backup and of the "
        "replaced store"
    )
    if keep_tokens:
        print("tokens are those of the backup: revoke again what was revoked since")
    if renewed.revoked:
        print(f"revoked tokens: {', '.join(renewed.revoked)}")
        print(f"new admin token, printed once: {renewed.token}")
    tokens = ", create new tokens with this one" if renewed.token else ""
    print(
        f"next: start the service{tokens}, and check `forewarn event list` and `forewarn vm list`:"
        " changes made after the backup are missing"
    )
