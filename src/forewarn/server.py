"""The parts put together, by hand: store, engine, loops, two listeners.

Started in that order, stopped in the other.
"""

import asyncio
import gc
import logging
import os
import random
import stat
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from forewarn.campaign.worker import HealthCheck
from forewarn.config import Address, Config, Identify, is_loopback
from forewarn.core.event import EventType
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock, RealClock
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Note
from forewarn.engine.keeping import kept
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import Invalid, StoreUnusable, Unavailable
from forewarn.fleetfile import schema as fleet
from forewarn.fleetfile.files import digest_of, read_sources
from forewarn.history.cloudevents import parse_secrets
from forewarn.log import set_up_log
from forewarn.platform.base import Platform
from forewarn.platform.open import health_platform, real_platform
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

log = logging.getLogger("forewarn")

APPLY_TRIES_MAX = 10
OPERATOR_CONNECTIONS_MAX = 1024
DESCRIPTORS_KEPT_MAX = 4096
DESCRIPTORS_MAX = 1 << 20
"""What Linux allows a process unless it is told otherwise (fs.nr_open)."""


class Addresses(NamedTuple):
    """Where the two listeners really stand."""

    metadata: Address
    control: Address


class Service(NamedTuple):
    """The parts at work, but for the doors: nobody can call them yet."""

    engine: Engine
    operations: Operations


async def serve(
    config: Config,
    on_ready: Callable[[Addresses], None],
    on_change: Callable[[Note], None] = lambda note: None,
) -> None:
    """Run the service until cancelled; then answer what is in flight, and let go of everything."""
    set_up_log(config.log_format, config.log_level)
    descriptors = allow_many_connections()
    clock = RealClock()
    timing = Timing.at_rate(
        config.rate, retry_window=timedelta(seconds=config.impact_retry_seconds_max)
    )
    certificate = read_certificate(config)
    async with collector_paused(), opened(await open_store(config.store), clock, timing) as engine:
        warn_of_readable_store(config.store)
        refuse_open_door(engine, config.control, config.store)
        if not is_loopback(config.control.host) and certificate is None:
            log.warning(
                "tokens can be read on the way: no TLS",
                extra={"facts": {"control": str(config.control)}},
            )
        engine.listeners.append(on_change)
        operations = Operations(engine, make_id)
        await apply_fleet_file(operations, config.fleet)
        resume_collector()
        worker = f"server-{uuid.uuid4()}"
        async with (
            at_work(config, engine, make_platform(config, clock, engine), worker) as work,
            kept(
                config,
                engine,
                worker=worker,
                secrets=webhook_secrets(config),
                make_id=make_id,
                chance=random.random,
            ) as history,
        ):
            service = Service(engine, operations)
            async with listening(*listeners(config, service, certificate, descriptors)) as (
                metadata,
                operators,
            ):
                on_ready(Addresses(metadata.address, operators.address))
                async with told_to_systemd(
                    f"metadata {metadata.address}, control {operators.address}"
                ):
                    await first_end(work, history, metadata.wait(), operators.wait())


@asynccontextmanager
async def told_to_systemd(words: str) -> AsyncIterator[None]:
    """Within this systemd knows that we are ready, and that our event loop turns: it is that loop
    which feeds the watchdog.
    """
    notifier = Notifier(os.environ, pid=os.getpid())
    notifier.ready(words)

    async def feed(pause_seconds: float) -> None:
        while True:  # ends when cancelled
            notifier.feed()
            await asyncio.sleep(pause_seconds)

    feeding = asyncio.create_task(feed(notifier.feed_seconds)) if notifier.feed_seconds else None
    try:
        yield
    finally:
        notifier.stopping("answering what is in flight")
        if feeding is not None:
            feeding.cancel()


@asynccontextmanager
async def opened(store: Store, clock: Clock, timing: Timing) -> AsyncIterator[Engine]:
    """An engine that shows all that its store holds."""
    engine = Engine(store, clock, timing)
    try:
        await engine.load()
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def at_work(
    config: Config, engine: Engine, platform: Platform, worker: str
) -> AsyncIterator[asyncio.Task[None]]:
    """Within this the loops run, in the task that is given: whoever waits for it learns if they
    break.
    """
    limit = timedelta(seconds=config.impact_seconds_max)
    loops = Worker(
        engine,
        platform,
        worker=worker,
        impacts_max=config.impacts_max,
        impact_limit=limit,
        health=make_health_check(config),
    )
    work = asyncio.create_task(loops.run())
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def make_platform(config: Config, clock: Clock, engine: Engine) -> Platform:
    """What carries the impacts out."""
    board = engine.board

    def hosts() -> Iterator[str]:
        return chain(board.hosts, board.declared_hosts)

    real = real_platform(config, clock, hosts=hosts, wanted=engine.shelf.turns, environ=os.environ)
    if real is not None:
        return real
    durations = {
        **engine.timing.duration,
        **{EventType(name): span for name, span in config.simulate_duration},
    }
    for name in config.simulate_failure:
        if name not in board.vms:
            log.warning(
                "no VM to fail", extra={"facts": {"option": "simulate_failure", "vm": name}}
            )
    return SimulatedPlatform(
        clock,
        durations=durations,
        hosts=hosts,
        wanted=engine.shelf.turns,
        failing=config.simulate_failure,
    )


def make_health_check(config: Config) -> HealthCheck | None:
    """What is run after each host of a campaign: a command of our own configuration, or nothing."""
    platform = health_platform(config, os.environ)
    return (
        None
        if platform is None
        else HealthCheck(platform, timedelta(seconds=config.campaign_health_seconds_max))
    )


@asynccontextmanager
async def listening(*doors: Listener) -> AsyncIterator[tuple[Listener, ...]]:
    """Within this the doors are open."""
    try:
        for door in doors:
            await door.start()
        yield doors
    finally:
        for ended in await asyncio.gather(*(door.stop() for door in doors), return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("listener did not stop cleanly", exc_info=ended)


async def first_end(*works: Awaitable[None]) -> None:
    """Until the first of them ends; what broke it is raised."""
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(work) for work in works], return_when=asyncio.FIRST_COMPLETED
    )
    for one in done:
        one.result()


def listeners(
    config: Config, service: Service, certificate: Certificate | None, descriptors: int
) -> tuple[Listener, Listener]:
    """The VMs' door and the operators' door: two sockets, two applications, nothing in common but
    the engine.
    """
    vms, operators = connection_limits(config, descriptors)
    from forewarn.web.control.routes.metrics import make_metrics_route

    metadata = Metadata(service.engine, config, read_key(config.proxy_key_file))
    polls = Polls(service.engine, config, vms)
    return (
        Listener(
            metadata, config.metadata, polls, server_name=SERVER_METADATA, on_stop=metadata.stop
        ),
        operators_door(
            service,
            config.control,
            [make_metrics_route(service.engine, metadata, polls)],
            certificate,
            operators,
        ),
    )


def connection_limits(config: Config, descriptors: int) -> tuple[Limits, Limits]:
    """The limits for VMs and for operators, if the process may have so many file descriptors open:
    a connection takes one.

    Operators have an eighth that VMs cannot take, and a quarter is left to the store and the
    platform: a service that VMs have filled up must still carry impacts out. A VM, where it is
    known by its address, gets an eighth of the VMs' part.
    """
    operators = min(descriptors // 8, OPERATOR_CONNECTIONS_MAX)
    vms = max(1, descriptors - operators - min(descriptors // 4, DESCRIPTORS_KEPT_MAX))
    is_by_address = set(config.identify) == {
        Identify.ADDRESS
    }  # else many VMs may come from the address of one proxy
    each = max(1, min(config.connections_per_address_max, vms // 8 if is_by_address else vms))
    limits = Limits(
        idle_seconds=config.idle_seconds,
        stall_seconds=config.header_seconds,
        connections_max=vms,
        connections_per_address_max=each,
    )
    each = min(config.connections_per_address_max, operators)
    return limits, replace(limits, connections_max=operators, connections_per_address_max=each)


def operators_door(
    service: Service,
    address: Address,
    more: Sequence[Any] = (),
    certificate: Certificate | None = None,
    limits: Limits = Limits(),  # noqa: B008, frozen
) -> Listener:
    """The control listener, with `more` routes.

    Its framework is imported here: it takes longer than all the rest.
    """
    from forewarn.web.control.app import make_app
    from forewarn.web.control.routes.fleet import FLEET_BYTES_MAX

    refuse_open_door(service.engine, address)
    app = make_app(service.operations, service.engine, host=address.host, more=more)
    guard = ConnectionPolicy(
        replace(limits, body_bytes_max=FLEET_BYTES_MAX),
        control_body,
        service.engine.throttled_log,
    )
    end_streams = service.engine.tail.stop
    return Listener(
        app,
        address,
        guard,
        server_name=SERVER_CONTROL,
        on_stop=end_streams,
        certificate=certificate,
    )


def refuse_open_door(engine: Engine, address: Address, store: str = "URL") -> None:
    """Beyond loopback nobody is let in without a token, so there must be one."""
    if engine.tokens or is_loopback(address.host):
        return
    make = f"make a token first: forewarn token create NAME --role admin --store {store}"
    way = (
        "a store that outlives the process: one in memory has no tokens"
        if store == "memory"
        else make
    )
    why = "there are no tokens, so whoever reaches it could do anything"
    raise Invalid(
        f"control is {address}: {why}; expected a loopback address, or {way}", option="control"
    )


def warn_of_readable_store(url: str) -> None:
    """A store made by an earlier version, or copied, may be open to every user of the machine.

    It stays as its owner left it.
    """
    path = path_of(url)
    mode = stat.S_IMODE(os.stat(path).st_mode) if path else 0
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        facts = {"file": path, "mode": f"{mode:04o}", "fix": f"chmod 600 {path}"}
        log.warning(
            "other users can read the store: digests of tokens, user data of VMs",
            extra={"facts": facts},
        )


def read_certificate(config: Config) -> Certificate | None:
    if config.control_certificate_file is None or config.control_key_file is None:
        return None
    return Certificate(config.control_certificate_file, config.control_key_file)


async def apply_fleet_file(operations: Operations, path: Path | None) -> None:
    """Make the fleet as the file says, or the folder's files together, unless it is what was
    applied last.

    What happened since then stands.
    """
    if path is None:
        return
    sources = read_sources(path)
    digest = digest_of(sources)
    if digest == operations.applied_digest():
        return
    wanted = fleet.parse_all(sources)
    del sources  # a large fleet need not be in memory twice
    for turn in range(APPLY_TRIES_MAX):
        if digest == operations.applied_digest():
            return  # as before, or by another server that was started with us
        try:
            difference = await operations.apply(wanted, by="fleet file", digest=digest)
            break
        except StoreUnusable:
            raise
        except Unavailable:
            if turn == APPLY_TRIES_MAX - 1:
                raise
            await asyncio.sleep(1)
            await operations.reload()
    facts = {"file": path.name, "added": len(difference.added), "changed": len(difference.changed)}
    log.info("fleet applied", extra={"facts": {**facts, "removed": len(difference.removed)}})


def webhook_secrets(config: Config) -> tuple[bytes, ...]:
    path = config.webhook_secret_file
    return () if path is None else parse_secrets(read_file(path, "webhook secret file"), str(path))


def read_key(path: Path | None) -> bytes:
    return b"" if path is None else read_file(path, "proxy key file").strip()


def read_file(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Invalid(
            f"the {what} {path} cannot be read: {error.strerror or error}", file=str(path)
        ) from error


def make_id() -> str:
    """A new EventId: upper case, as on the wire."""
    return str(uuid.uuid4()).upper()


def allow_many_connections() -> int:
    """Every VM may hold a connection open, so take as many file descriptors as the system lets us
    have; how many that is.
    """
    import resource  # POSIX only; the lab imports this module on Windows too

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard


@asynccontextmanager
async def collector_paused() -> AsyncIterator[None]:
    """Within this the garbage collector rests until `resume_collector`.

    While a fleet is loaded it would find nothing.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resume_collector() -> None:
    """The fleet lives as long as we do: keep the garbage collector from looking at all of it again
    and again.
    """
    gc.freeze()
    gc.enable()
