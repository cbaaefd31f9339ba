"""Builds the platform that the configuration names."""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from forewarn.config import Config, PlatformName
from forewarn.core.event import EventType
from forewarn.errors import Invalid
from forewarn.platform.base import Platform, Sleeper
from forewarn.platform.exec import ExecPlatform
from forewarn.platform.file_systems import MountTable
from forewarn.platform.simulated import SimulatedPlatform


def open_platform(
    config: Config,
    clock: Sleeper,
    *,
    durations: Mapping[EventType, timedelta],
    environ: Mapping[str, str],
    hosts: Callable[[], Iterable[str]] = tuple,
    avoid: Callable[[], Mapping[str, int]] = dict,
    scope_hosts: Callable[[str], Iterable[str]] = lambda scope: (),
    read_mounts: Callable[[], MountTable] = MountTable,
) -> Platform:
    """Return the platform.

    `durations` are those of simulated impacts, unless the configuration has others. `hosts` are the
    possible targets of a move; `avoid` says which are bad ones, and how bad; `scope_hosts` are the
    hosts of a scope's VMs; `read_mounts` says which file systems only the host of the VMs has, if
    this process runs there.
    """
    for command in config.exec_command:
        if command.type != "*":
            _parse_event_type("exec_command", command.type)
    configured = {
        _parse_event_type("simulate_duration", each.type): each.duration
        for each in config.simulate_duration
    }
    if config.platform is PlatformName.EXEC:
        return ExecPlatform(
            config.exec_command, seconds_max=config.exec_seconds_max, environ=environ
        )
    if config.platform is PlatformName.SIMULATED:
        failing = set(config.simulate_failure)
        return SimulatedPlatform(clock, {**durations, **configured}, hosts, avoid, failing)
    try:
        from forewarn.platform.libvirt.connection import LibvirtHosts
        from forewarn.platform.libvirt.driver import LibvirtPlatform
        from forewarn.platform.libvirt.targets import Targets
    except ModuleNotFoundError as error:
        raise Invalid(
            f"the libvirt platform needs {error.name}; run: pip install 'forewarn[libvirt]'"
        ) from error
    libvirts = LibvirtHosts(config.libvirt_uri, call_seconds_max=config.libvirt_call_seconds_max)
    targets = Targets(libvirts, hosts, avoid, scope_hosts, config.libvirt_migrations_max)
    grace = timedelta(seconds=config.libvirt_grace_seconds)
    return LibvirtPlatform(targets, clock, grace, read_mounts)


def open_health_platform(config: Config, environ: Mapping[str, str]) -> Platform | None:
    """Return what runs the health command of campaigns, or None if there is none."""
    if config.campaign_health_command is None:
        return None
    return ExecPlatform(
        [config.campaign_health_command._replace(type="*")],
        seconds_max=config.campaign_health_seconds_max,
        environ=environ,
        option="campaign_health_command",
    )


def _parse_event_type(option: str, name: str) -> EventType:
    """The config does not know the rules, so its event types are checked here."""
    try:
        return EventType(name)
    except ValueError as error:
        raise Invalid(
            f"{option}: unknown event type {name!r}; expected one of {', '.join(EventType)}",
            option=option,
        ) from error
