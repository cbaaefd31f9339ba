"""The store that a URL names, as `--store` takes it."""

import os
import re

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
) -> Store:
    """Open the store. `upgrade` rewrites the values of an older one.

    An error repeats only the scheme of the URL: the rest may hold a secret.
    """
    if url == "memory":
        return MemoryStore()
    path = path_of(url)
    if path:
        return await SqliteStore.open(path, upgrade=upgrade)
    match = ETCD.fullmatch(url)
    if match:
        options = etcd or EtcdOptions()
        return await _open_etcd(match[1].split(","), match[2], options, may_create=may_create)
    scheme, colon, _ = url.partition(":")
    shown = f"{scheme}:…" if colon else scheme
    raise Invalid(f"{shown!r} is not a store URL; expected {STORE.expects}", scheme=scheme)


async def _open_etcd(
    hosts: list[str], prefix: str, options: EtcdOptions, *, may_create: bool
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
    return await EtcdStore.open(addresses, prefix, options, may_create=may_create)


def path_of(url: str) -> str:
    """The file of an SQLite store; empty for other stores."""
    return url.removeprefix(SQLITE) if url.startswith(SQLITE) else ""
