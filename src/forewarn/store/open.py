"""The store that a URL names, as `--store` takes it."""

import os
import re
from collections.abc import Callable

from forewarn.errors import Invalid
from forewarn.option_kind import STORE
from forewarn.store.base import Store, Upgrade
from forewarn.store.etcd_options import EtcdOptions
from forewarn.store.memory import MemoryStore
from forewarn.store.sqlite import SqliteStore

SQLITE = "sqlite:///"
ETCD = re.compile(r"etcd://([^/@,\s]+(?:,[^/@,\s]+)*)/([\w./-]*\w)/?")
ETCD_PORT = "2379"


async def open_store(
    url: str,
    upgrade: Upgrade | None = None,
    etcd: EtcdOptions | None = None,
    *,
    may_create: bool = True,
    before_create: Callable[[], None] = lambda: None,
) -> Store:
    """Open the store. `upgrade` rewrites the values of an older one.

    `before_create` is called if there is none. What it raises leaves nothing behind.
    An error repeats only the scheme of the URL: the rest may hold a secret.
    """
    if url == "memory":
        return MemoryStore()
    path = path_of(url)
    if path:
        if not os.path.exists(path):
            before_create()
        return await SqliteStore.open(path, upgrade=upgrade)
    match = ETCD.fullmatch(url)
    if match:
        options, hosts = etcd or EtcdOptions(), match[1].split(",")
        return await _open_etcd(hosts, match[2], options, before_create, may_create=may_create)
    scheme, colon, _ = url.partition(":")
    shown = f"{scheme}:…" if colon else scheme
    raise Invalid(f"{shown!r} is not a store URL; expected {STORE.expects}", scheme=scheme)


async def _open_etcd(
    hosts: list[str],
    prefix: str,
    options: EtcdOptions,
    before_create: Callable[[], None],
    *,
    may_create: bool,
) -> Store:
    # Commands that the service starts do not use gRPC, which would log a line for each of them.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        from forewarn.store.etcd import EtcdStore
    except ImportError as error:
        raise Invalid(
            f"the etcd store needs the extra: pip install 'forewarn[etcd]' ({error})"
        ) from error
    addresses = [host if re.search(r":\d+$", host) else f"{host}:{ETCD_PORT}" for host in hosts]
    return await EtcdStore.open(addresses, prefix, options, before_create, may_create=may_create)


def path_of(url: str) -> str:
    """The file of an SQLite store; empty for other stores."""
    return url.removeprefix(SQLITE) if url.startswith(SQLITE) else ""


def describe_url(url: str) -> str:
    """The store in a line for operators. The URL of a store cannot contain a password."""
    path = path_of(url)
    return f"{SQLITE}{os.path.abspath(path)}" if path else url
