"""`forewarn store`, and work on a store without a service."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from forewarn.cli.exit_codes import Usage, needs_extra
from forewarn.cli.options import read_config, with_options
from forewarn.cli.progress import show_progress
from forewarn.config import Config, options
from forewarn.errors import Refused

if TYPE_CHECKING:
    from forewarn.history.transfer import Finish
    from forewarn.store.base import Store
    from forewarn.web.service import Service

T = TypeVar("T")
Work = Callable[["Service"], Awaitable[T]]
DEFAULTS = Config()

app = typer.Typer(
    help="The store, without a service: backup, check, copy, restore.", no_args_is_help=True
)
ETCD_OPTIONS = [each.name for each in options(Config) if each.name.startswith("etcd_")]

# fmt: off
Url = Annotated[str, typer.Argument(metavar="URL", help="The store, as in `serve --store`.")]
From = Annotated[str, typer.Argument(metavar="SOURCE", help="The store, as in `serve --store`.")]
To = Annotated[str, typer.Argument(metavar="TARGET", help="An empty store, of any kind.")]
BackupFile = Annotated[str, typer.Argument(metavar="FILE", help="The file to create.")]
Backup = Annotated[str, typer.Argument(metavar="BACKUP", help="A backup's file, or any store.")]
KeepTokens = Annotated[bool, typer.Option(
    "--keep-tokens", help="Keep the tokens of the backup, even those revoked since.")]
# fmt: on
RESTORE = "store restore"
SECRET_BYTES = 32
ADMIN = "restored-{:%Y%m%d-%H%M%S}"


@app.command()
def backup(url: Url, file: BackupFile) -> None:
    """Copy an SQLite store into a new file, also while it is served. `restore` reads it.

    Example: forewarn store backup sqlite:///forewarn.db backup.db
    """
    with needs_extra("store backup"):
        from forewarn.store.open import path_of
        from forewarn.store.sqlite_file import back_up
    check_exists("URL", url)
    if not path_of(url):
        raise Usage(f"URL: expected sqlite:///PATH, got {url}; for etcd: etcdctl snapshot save")
    try:
        back_up(os.path.realpath(path_of(url)), os.path.abspath(file))
    except OSError as error:
        raise Usage(f"FILE: cannot create {file}: {error.strerror}; expected a new file") from error
    print(f"{file} is a backup of {url}; check it with: forewarn store check sqlite:///{file}")


@app.command()
@with_options(Config, only=ETCD_OPTIONS)
def restore(
    context: typer.Context, backup: Backup, target: To, *, keep_tokens: KeepTokens = False
) -> None:
    """Copy a backup into an empty store. Stop the service and move the old store away first.

    Do not just copy the file: old document numbers would return, so that clients miss events, and
    revoked tokens would be valid again. This command raises the numbers above all that clients have
    seen, revokes all tokens and creates a new admin token.

    Example: forewarn store restore backup.db sqlite:///forewarn.db
    """
    with needs_extra(RESTORE):
        from forewarn.store.open import path_of
        from forewarn.store.sqlite_file import back_up
    backup = backup if "://" in backup else f"sqlite:///{backup}"
    check_exists("BACKUP", backup)

    report = list[str]()

    async def finish(store: "Store") -> None:
        secret = "" if keep_tokens else secrets.token_hex(SECRET_BYTES)
        report.extend(await _renew(store, backup, secret))

    with TemporaryDirectory() as folder:
        source, path = backup, path_of(backup)
        if path:  # a copy of an older version is upgraded, and the backup stays as it is
            back_up(os.path.realpath(path), f"{folder}/backup.db")
            source = f"sqlite:///{folder}/backup.db"
        _copy(context, source, target, finish)
    print(
        f"{target} is restored from {backup}",
        *report,
        "next: start the service, and check `forewarn event list` and `forewarn vm list`: changes"
        " made after the backup are missing",
        sep="\n",
    )


@app.command()
@with_options(Config, only=ETCD_OPTIONS)
def check(context: typer.Context, url: Url) -> None:
    """Read the whole store and report what is wrong with it. Servers may be using it.

    Example: forewarn store check sqlite:///forewarn.db
    """
    with needs_extra("store check"):
        from forewarn.history.integrity import inspect
    check_exists("URL", url)
    config = read_config(context, Config).config
    counts, problems = run_on_store(
        "store check", url, lambda service: inspect(service.engine), config, may_change=False
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

    Example: forewarn store copy sqlite:///forewarn.db etcd://10.0.0.1:2379/forewarn
    """
    check_exists("SOURCE", source)
    _copy(context, source, target)
    print("the copy is complete; start the service on it, and not on the source")


def _copy(context: typer.Context, source: str, target: str, finish: "Finish | None" = None) -> None:
    """Copy, compare, and print what both stores hold."""
    with needs_extra("store copy"):
        from forewarn.engine.migration import UPGRADE
        from forewarn.history.transfer import copy_store
        from forewarn.server import etcd_options
        from forewarn.store.open import open_store
    check_exists("TARGET", target, may_create=True)
    etcd = etcd_options(read_config(context, Config).config)

    async def run() -> tuple[str, str]:
        async with AsyncExitStack() as stack:
            original = await open_store(source, UPGRADE if finish else None, etcd, may_create=False)
            stack.push_async_callback(original.close)
            copied = await open_store(target, etcd=etcd)
            stack.push_async_callback(copied.close)
            return await copy_store(original, copied, finish, update)

    with show_progress("copying") as update:
        in_source, in_target = asyncio.run(run())
    print(f"source: {in_source}\ntarget: {in_target}")
    if in_source != in_target:
        raise Refused("the copy differs from the source; delete the target and copy again")


def check_exists(argument: str, url: str, *, may_create: bool = False) -> bool:
    """Whether the store exists, as far as its name tells. A typing error must not create it."""
    path = url.removeprefix("sqlite:///")
    if url == "memory":
        raise Usage(f"{argument}: a memory store belongs to one process; expected sqlite:///PATH")
    exists = path in (url, "") or os.path.exists(path)
    if not exists and not may_create:
        raise Usage(f"{argument}: no such file: {path}; expected the store of a service")
    return exists


def run_on_store(
    command: str, url: str, work: "Work[T]", config: Config = DEFAULTS, *, may_change: bool = True
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
        store = await open_store(
            url, UPGRADE if may_change else None, etcd_options(config), may_create=may_change
        )
        async with open_service(store, RealClock(), Timing(), make_id) as service:
            return await work(service)

    return asyncio.run(run())


async def _renew(store: "Store", source: str, secret: str) -> list[str]:
    """Change what must not return with a backup. Returns what the operator must know.

    Tokens that were revoked after the backup would be valid again, so all are revoked, unless the
    secret of a new one is empty.
    """
    from forewarn.core.timing import Timing
    from forewarn.engine.clock import RealClock
    from forewarn.engine.restore import raise_incarnations
    from forewarn.server import make_id
    from forewarn.web.service import build_service

    service = build_service(store, RealClock(), Timing(), make_id)
    await service.engine.load()
    number = await raise_incarnations(service.engine, source)
    report = [f"document numbers continue at {number}, above those of the backup"]
    if not secret:
        return [*report, "tokens are those of the backup: revoke again what was revoked since"]
    name = ADMIN.format(service.engine.clock.now())
    revoked, token = await service.tokens.replace_all(name, secret=secret, by=RESTORE)
    if revoked:
        report += [
            f"revoked tokens: {', '.join(revoked)}",
            f"new admin token, printed once: {token}",
        ]
    return report
