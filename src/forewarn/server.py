"""The composition root: builds and starts the store, the engine, the workers and two listeners.

Everything is started in that order and stopped in reverse. No other module reads the environment or
creates ids.
"""

import asyncio
import gc
import os
import stat
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from forewarn.auth.tokens import Tokens
from forewarn.campaign.worker import CampaignWorker
from forewarn.config import Config, NotBeforeFormat, is_loopback
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock, RealClock
from forewarn.engine.entry import Entry
from forewarn.engine.lease import run_under_lease
from forewarn.engine.migration import UPGRADE
from forewarn.engine.operations import Operations
from forewarn.engine.readability import Readability
from forewarn.engine.worker import Worker
from forewarn.errors import Invalid, StoreUnusable, Unavailable
from forewarn.fleetfile import parser as fleet
from forewarn.fleetfile.files import compute_digest, read_sources
from forewarn.history.retention import RetentionWorker
from forewarn.history.transfer import check_complete
from forewarn.history.webhooks import open_webhooks, run_webhooks
from forewarn.log import log
from forewarn.option_kind import Address
from forewarn.platform.base import Platform, SlowToStop
from forewarn.platform.open import open_health_platform, open_platform
from forewarn.server_inputs import (
    check_fleet,
    check_inputs,
    read_certificate,
    read_file,
    read_secrets,
)
from forewarn.store.base import Store
from forewarn.store.etcd_options import EtcdOptions
from forewarn.store.open import describe_url, open_store, path_of
from forewarn.systemd import Notifier
from forewarn.web.http.admission import Limits, raise_descriptor_limit, share_descriptors
from forewarn.web.http.listener import SERVER_CONTROL, SERVER_METADATA, Listener
from forewarn.web.http.tls import Certificate
from forewarn.web.http_status import control_body
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.service import Service, build_service

APPLY_TRIES_MAX = 10


async def serve(
    config: Config,
    on_ready: Callable[[Address, Address], None],
    on_change: Callable[[Entry], None] = lambda entry: None,
) -> None:
    """Run the service until cancelled. Then finish open requests and close everything.

    `on_ready` gets the addresses of the metadata and the control listener.
    """
    notifier = Notifier(os.environ, pid=os.getpid())
    descriptors = raise_descriptor_limit()
    retry_window = timedelta(seconds=config.impact_retry_seconds_max)
    back_limit = timedelta(seconds=config.back_seconds_max)
    timing = Timing.at_rate(config.rate, retry_window=retry_window, back_limit=back_limit)
    certificate = read_certificate(config)
    check_inputs(config)
    pause_collector()
    store = await open_store(
        config.store, UPGRADE, etcd_options(config), before_create=lambda: check_fleet(config)
    )
    async with open_service(store, RealClock(), timing, make_id) as service:
        check_access(config, service.tokens)
        service.engine.subscribe_entries(on_change)
        if config.store.startswith("etcd:"):  # other stores are on one machine, with one clock
            service.engine.clock_compared.clear()  # the worker of impacts sets it
        listeners = make_listeners(config, service, certificate, descriptors)
        worker, platform = f"server-{uuid.uuid4()}", make_platform(config, service)
        serving = asyncio.Event()
        works = make_workers(config, service, platform, worker, serving.is_set)
        async with run_together(*works, service.hosts.unserved.run()) as work:
            await apply_fleet_file(service.operations, config.fleet)
            check_simulated_failures(config, service)
            resume_collector()
            async with (
                run_together(*await make_history_workers(config, service)) as history,
                run_together(notifier.keep_feeding()),
                run_listeners(*listeners) as (metadata, control),
            ):
                serving.set()
                on_ready(metadata.address, control.address)
                listening = f"metadata {metadata.address}, control {control.address}"
                notifier.ready(f"{listening}, store {describe_url(config.store)}")
                try:
                    await wait_for_first(work, history, metadata.wait(), control.wait())
                finally:
                    serving.clear()
                    notifier.stopping("finishing open requests")


@asynccontextmanager
async def open_service(
    store: Store,
    clock: Clock,
    timing: Timing,
    make_id: Callable[[], str],
) -> AsyncIterator[Service]:
    """A service whose engine has loaded the store. Closes the store at the end."""
    service = build_service(store, clock, timing, make_id)
    try:
        await check_complete(store)
        await service.engine.load()
        yield service
    finally:
        await service.engine.close()


def check_access(config: Config, tokens: Tokens) -> None:
    """Refuse a control API that is open to everybody, and warn of other exposure."""
    require_token_outside_loopback(tokens, config.control, config.store)
    if not is_loopback(config.control.host) and config.control_certificate_file is None:
        log.warning(
            "the control API is not encrypted: tokens can be read on the network",
            control=config.control,
        )
    warn_if_store_is_readable(config.store)


def require_token_outside_loopback(tokens: Tokens, address: Address, store: str = "URL") -> None:
    """Without tokens every client is an admin, so only loopback may be served."""
    if tokens or is_loopback(address.host):
        return
    fix = f"a token: forewarn token create NAME --role admin --store {store}"
    if store == "memory":
        fix = "a persistent store with tokens, because a memory store has none"
    raise Invalid(
        f"control is {address}, but there are no tokens, so every client would be an admin; "
        f"expected a loopback address, or {fix}",
        option="control",
    )


def warn_if_store_is_readable(url: str) -> None:
    """Earlier versions created readable stores. The mode is not changed: it may be intended."""
    path = path_of(url)
    mode = stat.S_IMODE(os.stat(path).st_mode) if path else 0
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "other users can read the store, with token digests and user data of VMs",
            file=path,
            mode=f"{mode:04o}",
            fix=f"chmod 600 {path}",
        )


async def apply_fleet_file(operations: Operations, path: Path | None) -> None:
    """Apply the fleet file, or all files of a folder, unless they were applied last.

    Changes made since then are kept.
    """
    if path is None:
        return
    sources = read_sources(path)
    digest = compute_digest(sources)
    if digest == operations.applied_digest():
        return
    wanted = fleet.parse_all(sources)
    del sources  # do not keep a large fleet in memory twice
    for attempt in range(APPLY_TRIES_MAX):
        if digest == operations.applied_digest():
            return  # another server that started at the same time has applied it
        try:
            difference = await operations.apply(wanted, by="fleet file", digest=digest)
            break
        except StoreUnusable:
            raise
        except Unavailable:
            if attempt == APPLY_TRIES_MAX - 1:
                raise
            await asyncio.sleep(1)
    log.info(
        "fleet applied",
        file=path.name,
        added=len(difference.added),
        changed=len(difference.changed),
        removed=len(difference.removed),
    )


def check_simulated_failures(config: Config, service: Service) -> None:
    for name in config.simulate_failure:
        if name not in service.engine.board.vms:
            log.warning("unknown VM in simulate_failure", option="simulate_failure", vm=name)


def make_platform(config: Config, service: Service) -> Platform:
    """The platform that carries out impacts."""
    engine, board = service.engine, service.engine.board
    return open_platform(
        config,
        engine.clock,
        durations=engine.timing.duration,
        hosts=lambda: board.hosts,
        avoid=service.campaigns.host_priorities,
        scope_hosts=lambda scope: [vm.host for vm in board.find_scope(scope).scope.vms],
        environ=os.environ,
    )


def make_workers(
    config: Config,
    service: Service,
    platform: Platform,
    worker: str,
    is_serving: Callable[[], bool] | None = None,
) -> list[Coroutine[Any, Any, None]]:
    """What carries out impacts and campaigns.

    `is_serving`: whether VMs can reach this server. None, under a clock that is moved by hand: all
    time is notice.
    """
    hosts, readability = service.hosts, None
    if is_serving is not None:
        readability = Readability(service.engine, hosts.contacts, is_serving)
    local_stop_seconds = platform.stop_seconds if isinstance(platform, SlowToStop) else 0.0
    impacts = Worker(
        service.engine,
        hosts,
        worker=worker,
        impacts_max=config.impacts_max,
        impact_limit=timedelta(seconds=config.impact_seconds_max),
        handles=hosts.handles,
        # a daemon continues what it does, whatever happens to the servers
        stop_seconds=lambda vm: 0.0 if hosts.managed.find(vm.host) else local_stop_seconds,
        host_of=hosts.managed.host_of,
        readability=readability,
    )
    hosts.local, hosts.on_change = platform, impacts.look_at
    hosts.get_lease = lambda: impacts.lease
    campaigns = CampaignWorker(
        service.engine,
        service.campaigns,
        open_health_platform(config, os.environ),
        timedelta(seconds=config.campaign_health_seconds_max),
    )
    return [impacts.run(), campaigns.run(), hosts.run()]


async def make_history_workers(config: Config, service: Service) -> list[Coroutine[Any, Any, None]]:
    """What trims the history and sends webhooks."""
    engine, feed = service.engine, service.feed
    if config.webhook:
        secrets = read_secrets(config)
        feed.webhooks = await open_webhooks(config, engine, feed, secrets, make_id)
    retention = RetentionWorker(
        engine,
        feed,
        keep=timedelta(days=config.history_days),
        commits_max=config.history_notes_max,
    )
    works = [run_under_lease(engine, "retention", lambda lease: retention.run())]
    return [*works, run_webhooks(feed.webhooks, engine)] if config.webhook else works


def make_listeners(
    config: Config, service: Service, certificate: Certificate | None, descriptors: int
) -> tuple[Listener, Listener]:
    """The listener for VMs and the listener for operators. They share nothing but the engine."""
    from forewarn.web.control.routes.metrics import make_metrics_route

    vms, operators = share_descriptors(config, descriptors)
    proxy_key = read_file(config.proxy_key_file, "proxy key file").strip()
    on_error = service.hosts.unserved.add_error
    metadata = Metadata(service.engine, config, proxy_key, service.tokens, on_error)
    polls = Polls(service.engine, config, vms, service.tokens)
    polls.on_refused = service.hosts.unserved.add_refused_connection
    metrics = make_metrics_route(service, metadata, polls)
    is_iso = config.not_before_format is NotBeforeFormat.DOCUMENTED
    shared = config.reuse_port
    return (
        Listener(
            metadata,
            config.metadata,
            polls,
            server_name=SERVER_METADATA,
            on_stop=metadata.stop,
            reuse_port=shared,
        ),
        make_control_listener(
            service._replace(is_iso=is_iso),
            config.control,
            [metrics],
            certificate,
            operators,
            reuse_port=shared,
        ),
    )


def make_control_listener(
    service: Service,
    address: Address,
    more: Sequence[Any] = (),
    certificate: Certificate | None = None,
    limits: Limits = Limits(),  # noqa: B008, frozen
    *,
    reuse_port: bool = False,
) -> Listener:
    """The control listener, with `more` routes.

    Litestar is imported here because it is slow to import.
    """
    from forewarn.web.control.app import make_app
    from forewarn.web.control.operator_policy import OperatorPolicy
    from forewarn.web.control.routes.fleet import FLEET_BYTES_MAX

    limits = replace(limits, body_bytes_max=FLEET_BYTES_MAX)
    return Listener(
        make_app(service, host=address.host, more=more),
        address,
        OperatorPolicy(limits, control_body, service.engine.throttled_log),
        server_name=SERVER_CONTROL,
        on_stop=service.stop,
        certificate=certificate,
        reuse_port=reuse_port,
    )


@asynccontextmanager
async def run_together(*works: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run all within this; if one fails, the others are cancelled.

    Await the task to see whether one failed.
    """

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)

    task = asyncio.create_task(run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for work in works:
            work.close()  # one that never began would be reported as a bug


@asynccontextmanager
async def run_listeners(*listeners: Listener) -> AsyncIterator[tuple[Listener, ...]]:
    """Accept connections within this."""
    try:
        for listener in listeners:
            await listener.start()
        yield listeners
    finally:
        stops = (listener.stop() for listener in listeners)
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("listener did not stop cleanly", exc_info=result)


async def wait_for_first(*works: Awaitable[None]) -> None:
    """Wait until the first of them ends, and raise its exception if it failed."""
    tasks = [asyncio.ensure_future(work) for work in works]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def etcd_options(config: Config) -> EtcdOptions:
    """The options of the etcd store: those whose name starts with `etcd_`."""
    names = (each.name for each in fields(EtcdOptions))
    return EtcdOptions(**{name: getattr(config, f"etcd_{name}") for name in names})


def make_id() -> str:
    """A new EventId: upper case, as on the wire."""
    return str(uuid.uuid4()).upper()


def pause_collector() -> None:
    """Disable the garbage collector until `resume_collector`: loading a fleet makes no garbage."""
    gc.collect()
    gc.disable()


def resume_collector() -> None:
    """Exclude what was loaded from collection: the fleet lives as long as the process."""
    gc.freeze()
    gc.enable()
