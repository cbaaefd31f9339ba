"""The composition root of the daemon: builds and starts everything, and stops it in reverse."""

import asyncio
import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack

from forewarn.config import PlatformName
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.errors import Unavailable
from forewarn.hostd.bridge_listener import BridgeListener
from forewarn.hostd.control import ControlLoop
from forewarn.hostd.disk_lock import check_disk_lock
from forewarn.hostd.inventory import CommandSource, Inventory, Source
from forewarn.hostd.moves import Moves
from forewarn.hostd.refusals import Refusals
from forewarn.hostd.relay import Relay
from forewarn.hostd.settings import HostdConfig, identify_machine, read_token
from forewarn.hostd.unconfirmed import Unconfirmed
from forewarn.hostd.upstream import Upstream
from forewarn.hostd.worker import ImpactRunner
from forewarn.platform.base import Platform
from forewarn.platform.file_systems import read_mounts
from forewarn.platform.open import open_platform
from forewarn.systemd import Notifier


async def run(config: HostdConfig, on_ready: Callable[[str], None]) -> None:
    """Run the daemon until cancelled. `on_ready` gets one line about it."""
    assert config.token_file is not None
    notifier = Notifier(os.environ, pid=os.getpid())
    token, machine = read_token(config.token_file), identify_machine(config.machine)
    status = f"host {config.host}, bridges {', '.join(config.bridge) or 'none'}"
    async with AsyncExitStack() as stack:
        mark_as_running(config, stack)
        upstream = Upstream(config.server, config.ca_file)
        platform = make_platform(config)
        inventory = Inventory(make_source(config, platform), config.inventory_seconds)
        moves, refusals, unconfirmed = Moves(), Refusals(), Unconfirmed()
        session = str(uuid.uuid4())
        runner = ImpactRunner(platform, config.impacts_max, RealClock(), config.host, moves)
        control = ControlLoop(
            upstream,
            config.host,
            token,
            inventory,
            runner,
            session,
            machine,
            refusals=refusals,
            unconfirmed=unconfirmed,
            relays=bool(config.bridge),
        )
        stack.callback(notifier.stopping, "ending the session")
        metadata = Upstream(config.metadata_server, config.ca_file)
        stack.callback(metadata.close)
        relay = Relay(metadata, token, moves, refusals=refusals, unconfirmed=unconfirmed)
        listeners = await start_relay(config, relay, inventory, stack)
        follows = [listener.follow() for listener in listeners]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = (inventory.run(), control.run(), relay.run(), unconfirmed.run())
                for work in (*tasks, *follows, check_disks(config, platform)):
                    group.create_task(work)
                group.create_task(notifier.keep_feeding())
                on_ready(status)
                notifier.ready(status)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


def mark_as_running(config: HostdConfig, stack: AsyncExitStack) -> None:
    """Unavailable if this machine has a daemon for the same host and server.

    Two would act on the same VMs. Only one can bind these sockets, until it ends. If it is killed,
    its watchdog has them until the last command has ended.
    """
    for url in config.server:
        mark = stack.enter_context(socket.socket(socket.AF_UNIX))
        mark.set_inheritable(True)
        name = hashlib.sha256(f"{config.host}@{url}".encode()).hexdigest()
        try:
            mark.bind(f"\0forewarn-hostd-{name}")
        except OSError as error:
            raise Unavailable(
                f"another process on this machine is the daemon of {config.host} for {url};"
                " expected one daemon for each host"
            ) from error


async def start_relay(
    config: HostdConfig, relay: Relay, inventory: Inventory, stack: AsyncExitStack
) -> list[BridgeListener]:
    """Listen on each bridge until the stack is closed."""
    address, ids = config.listen, inventory.ids
    listeners = [
        BridgeListener(relay, bridge, address, ids, inventory.refresh) for bridge in config.bridge
    ]

    def wake() -> None:
        for listener in listeners:
            listener.wake()

    inventory.on_ports = wake
    stack.push_async_callback(lambda: asyncio.gather(*(each.stop() for each in listeners)))
    problems = [await listener.update() for listener in listeners]
    if listeners and not any(listener.is_serving for listener in listeners):
        raise Unavailable(problems[0][0].reason)
    return listeners


def make_platform(config: HostdConfig) -> Platform:
    """The platform; it moves VMs only to the hosts that the server names."""
    durations, shared = Timing().duration, config.platform_config()
    return open_platform(
        shared, RealClock(), durations=durations, environ=os.environ, read_mounts=read_mounts
    )


async def check_disks(config: HostdConfig, platform: Platform) -> None:
    """Warn if a VM may be started on two hosts that share its disk."""
    if config.platform is not PlatformName.LIBVIRT:
        return
    from forewarn.platform.libvirt.discovery import find_shared_disks
    from forewarn.platform.libvirt.driver import LibvirtPlatform

    assert isinstance(platform, LibvirtPlatform)
    libvirts = platform.libvirts

    async def find(types: Collection[str]) -> str:
        mounts = read_mounts()
        return await libvirts.ask(config.host, lambda each: find_shared_disks(each, mounts, types))

    await check_disk_lock(config.libvirt_uri, os.environ, find)


def make_source(config: HostdConfig, platform: Platform) -> Source:
    if config.inventory_command is not None:
        return CommandSource(config.inventory_command, os.environ)
    from forewarn.hostd.libvirt_source import LibvirtSource
    from forewarn.platform.libvirt.driver import LibvirtPlatform

    assert isinstance(platform, LibvirtPlatform)
    return LibvirtSource(platform.libvirts, config.host)
