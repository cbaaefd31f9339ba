"""The composition root: builds and starts the store, the engine, the workers and two listeners.

Everything is started in that order and stopped in reverse. No other module reads the environment or
creates ids.
"""

import asyncio
import gc
import os
import random
import stat
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from forewarn.auth.tokens import Tokens
from forewarn.campaign.worker import CampaignWorker
from forewarn.config import Address, Config, Identify, is_loopback
from forewarn.core.change import ChangeKind
from forewarn.core.event import EventType
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock, RealClock
from forewarn.engine.entry import Note
from forewarn.engine.lease import run_under_lease
from forewarn.engine.migration import UPGRADE
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import Invalid, StoreUnusable, Unavailable
from forewarn.fleetfile import parser as fleet
from forewarn.fleetfile.files import compute_digest, read_sources
from forewarn.history.cloudevents import parse_secrets
from forewarn.history.retention import RetentionWorker
from forewarn.history.webhook_sender import WebhookSender
from forewarn.history.webhooks import Webhook, WebhookContext, deliver_all, get_identity
from forewarn.log import log
from forewarn.platform.base import Platform
from forewarn.platform.open import open_health_platform, open_platform
from forewarn.platform.simulated import SimulatedPlatform
from forewarn.store.base import Store
from forewarn.store.open import open_store, path_of
from forewarn.systemd import Notifier
from forewarn.web.http.admission import Limits
from forewarn.web.http.connection import ConnectionPolicy
from forewarn.web.http.listener import SERVER_CONTROL, SERVER_METADATA, Listener
from forewarn.web.http.tls import Certificate
from forewarn.web.http_status import control_body
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.service import Service, build_service

APPLY_TRIES_MAX = 10
OPERATOR_CONNECTIONS_MAX = 1024
DESCRIPTORS_RESERVED_MAX = 4096
DESCRIPTORS_MAX = 1 << 20
"""The default of Linux for one process (fs.nr_open)."""


class Addresses(NamedTuple):
    """The addresses of the two listeners, with the ports they got."""

    metadata: Address
    control: Address


async def serve(
    config: Config,
    on_ready: Callable[[Addresses], None],
    on_change: Callable[[Note], None] = lambda note: None,
) -> None:
    """Run the service until cancelled. Then finish open requests and close everything."""
    descriptors = raise_descriptor_limit()
    clock = RealClock()
    timing = Timing.at_rate(
        config.rate, retry_window=timedelta(seconds=config.impact_retry_seconds_max)
    )
    certificate = read_certificate(config)
    store = await open_store(config.store, UPGRADE)
    async with (
        pause_collector(),
        open_service(store, clock, timing, make_id) as service,
    ):
        engine, operations = service.engine, service.operations
        warn_if_store_is_readable(config.store)
        require_token_outside_loopback(service.tokens, config.control, config.store)
        if not is_loopback(config.control.host) and certificate is None:
            log.warning(
                "the control API is not encrypted: tokens can be read on the network",
                control=config.control,
            )
        engine.subscribe_entries(on_change)
        await apply_fleet_file(operations, config.fleet)
        resume_collector()
        worker = f"server-{uuid.uuid4()}"
        listeners = make_listeners(config, service, certificate, descriptors)
        async with (
            run_workers(config, service, make_platform(config, clock, service), worker) as work,
            run_history_workers(config, service) as history,
            run_listeners(*listeners) as (metadata, operators),
        ):
            on_ready(Addresses(metadata.address, operators.address))
            status = f"metadata {metadata.address}, control {operators.address}"
            async with notify_systemd(status):
                await wait_for_first(work, history, metadata.wait(), operators.wait())


@asynccontextmanager
async def notify_systemd(status: str) -> AsyncIterator[None]:
    """Report to systemd that the service is ready, and feed its watchdog from the event loop.

    A blocked event loop misses the watchdog, and systemd restarts the service.
    """
    notifier = Notifier(os.environ, pid=os.getpid())
    notifier.ready(status)

    async def feed_watchdog(interval_seconds: float) -> None:
        while True:  # ends when cancelled
            notifier.feed()
            await asyncio.sleep(interval_seconds)

    interval = notifier.feed_seconds
    feeding = asyncio.create_task(feed_watchdog(interval)) if interval else None
    try:
        yield
    finally:
        notifier.stopping("finishing open requests")
        if feeding is not None:
            feeding.cancel()


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
        await service.engine.load()
        yield service
    finally:
        await service.engine.close()


@asynccontextmanager
async def run_workers(
    config: Config, service: Service, platform: Platform, worker: str
) -> AsyncIterator[asyncio.Task[None]]:
    """Run the workers within this. Await the task to see whether one failed."""
    limit = timedelta(seconds=config.impact_seconds_max)
    impacts = Worker(
        service.engine,
        platform,
        worker=worker,
        impacts_max=config.impacts_max,
        impact_limit=limit,
    )
    campaigns = CampaignWorker(
        service.engine,
        service.campaigns,
        open_health_platform(config, os.environ),
        timedelta(seconds=config.campaign_health_seconds_max),
    )
    work = asyncio.create_task(run_together(impacts.run(), campaigns.run()))
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@asynccontextmanager
async def run_history_workers(
    config: Config, service: Service
) -> AsyncIterator[asyncio.Task[None]]:
    """Trim the history and send webhooks within this."""
    engine, feed = service.engine, service.feed
    retention = RetentionWorker(
        engine.store,
        engine.clock,
        feed,
        keep=timedelta(days=config.history_days),
        commits_max=config.history_notes_max,
    )
    works = [run_under_lease(engine.store, "retention", lambda lease: retention.run())]
    webhooks = await make_webhooks(config, service) if config.webhook else ()
    if webhooks:
        feed.webhooks = webhooks
        works.append(
            run_under_lease(engine.store, "webhooks", lambda lease: deliver_all(webhooks, lease))
        )
    work = asyncio.create_task(run_together(*works))
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for webhook in webhooks:
            await webhook.close()


async def make_webhooks(config: Config, service: Service) -> tuple[Webhook, ...]:
    """The configured webhooks, registered: they get everything that happens from now on."""
    context = WebhookContext(
        engine=service.engine,
        feed=service.feed,
        identity=await get_identity(service.engine, make_id),
        changes=webhook_changes(config.webhook_changes),
        secrets=read_webhook_secrets(config),
        random=random.random,
    )
    timeout_seconds = config.webhook_seconds_max
    webhooks = tuple(
        Webhook(url, WebhookSender(url, timeout_seconds=timeout_seconds), context)
        for url in config.webhook
    )
    for webhook in webhooks:
        await webhook.register()
    return webhooks


def webhook_changes(names: Sequence[str]) -> frozenset[ChangeKind]:
    unknown = [name for name in names if name not in list(ChangeKind)]
    if unknown:
        raise Invalid(
            f"webhook_changes: expected some of {', '.join(ChangeKind)}, got {unknown[0]!r}",
            option="webhook_changes",
        )
    return frozenset(ChangeKind(name) for name in names)


async def run_together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until cancelled; if one fails, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


def make_platform(config: Config, clock: Clock, service: Service) -> Platform:
    """The platform that carries out impacts."""
    engine, board = service.engine, service.engine.board
    priorities = service.campaigns.host_priorities

    def hosts() -> Iterator[str]:
        return chain(board.hosts, board.declared_hosts)

    for command in config.exec_command:
        if command.type != "*":
            parse_event_type("exec_command", command.type)
    real = open_platform(config, clock, hosts=hosts, avoid=priorities, environ=os.environ)
    if real is not None:
        return real
    simulated = {
        parse_event_type("simulate_duration", each.type): each.duration
        for each in config.simulate_duration
    }
    for name in config.simulate_failure:
        if name not in board.vms:
            log.warning("unknown VM in simulate_failure", option="simulate_failure", vm=name)
    return SimulatedPlatform(
        clock,
        durations={**engine.timing.duration, **simulated},
        hosts=hosts,
        avoid=priorities,
        failing=config.simulate_failure,
    )


def parse_event_type(option: str, name: str) -> EventType:
    """The config does not know the rules, so its event types are checked here."""
    try:
        return EventType(name)
    except ValueError as error:
        raise Invalid(
            f"{option}: unknown event type {name!r}; expected one of {', '.join(EventType)}",
            option=option,
        ) from error


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


def make_listeners(
    config: Config, service: Service, certificate: Certificate | None, descriptors: int
) -> tuple[Listener, Listener]:
    """The listener for VMs and the listener for operators. They share nothing but the engine."""
    vms, operators = connection_limits(config, descriptors)
    from forewarn.web.control.routes.metrics import make_metrics_route

    metadata = Metadata(service.engine, config, read_key(config.proxy_key_file))
    polls = Polls(service.engine, config, vms)
    return (
        Listener(
            metadata, config.metadata, polls, server_name=SERVER_METADATA, on_stop=metadata.stop
        ),
        make_control_listener(
            service,
            config.control,
            [make_metrics_route(service, metadata, polls)],
            certificate,
            operators,
        ),
    )


def connection_limits(config: Config, descriptors: int) -> tuple[Limits, Limits]:
    """The limits for VMs and for operators. Each connection takes a file descriptor.

    VMs cannot take everything: an eighth is reserved for operators, and a quarter for the store and
    the platform, which must work even if VMs open as many connections as they can. An address gets
    at most an eighth of the VMs' share, unless it may be a proxy for many VMs.
    """
    operators = min(descriptors // 8, OPERATOR_CONNECTIONS_MAX)
    vms = max(1, descriptors - operators - min(descriptors // 4, DESCRIPTORS_RESERVED_MAX))
    is_by_address = set(config.identify) == {Identify.ADDRESS}
    each = max(1, min(config.connections_per_address_max, vms // 8 if is_by_address else vms))
    limits = Limits(
        idle_seconds=config.idle_seconds,
        stall_seconds=config.header_seconds,
        connections_max=vms,
        connections_per_address_max=each,
    )
    each = min(config.connections_per_address_max, operators)
    return limits, replace(limits, connections_max=operators, connections_per_address_max=each)


def make_control_listener(
    service: Service,
    address: Address,
    more: Sequence[Any] = (),
    certificate: Certificate | None = None,
    limits: Limits = Limits(),  # noqa: B008, frozen
) -> Listener:
    """The control listener, with `more` routes.

    Litestar is imported here because it is slow to import.
    """
    from forewarn.web.control.app import make_app
    from forewarn.web.control.routes.fleet import FLEET_BYTES_MAX

    require_token_outside_loopback(service.tokens, address)
    app = make_app(service, host=address.host, more=more)
    guard = ConnectionPolicy(
        replace(limits, body_bytes_max=FLEET_BYTES_MAX),
        control_body,
        service.engine.throttled_log,
    )
    end_streams = service.feed.stop
    return Listener(
        app,
        address,
        guard,
        server_name=SERVER_CONTROL,
        on_stop=end_streams,
        certificate=certificate,
    )


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


def read_certificate(config: Config) -> Certificate | None:
    if config.control_certificate_file is None or config.control_key_file is None:
        return None
    return Certificate(config.control_certificate_file, config.control_key_file)


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


def read_webhook_secrets(config: Config) -> tuple[bytes, ...]:
    path = config.webhook_secret_file
    return () if path is None else parse_secrets(read_file(path, "webhook secret file"), str(path))


def read_key(path: Path | None) -> bytes:
    return b"" if path is None else read_file(path, "proxy key file").strip()


def read_file(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise Invalid(f"cannot read the {what} {path}: {reason}", file=str(path)) from error


def make_id() -> str:
    """A new EventId: upper case, as on the wire."""
    return str(uuid.uuid4()).upper()


def raise_descriptor_limit() -> int:
    """Raise the limit of file descriptors as far as allowed, and return it.

    Every VM may keep a connection open.
    """
    import resource  # POSIX only; the lab imports this module on Windows too

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard


@asynccontextmanager
async def pause_collector() -> AsyncIterator[None]:
    """Disable the garbage collector until `resume_collector`: loading a fleet makes no garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resume_collector() -> None:
    """Exclude what was loaded from collection: the fleet lives as long as the process."""
    gc.freeze()
    gc.enable()
