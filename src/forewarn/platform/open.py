"""Which platform carries impacts out, where it is not the simulated one."""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from forewarn.config import Config, ExecCommand, PlatformName
from forewarn.errors import Invalid
from forewarn.platform.base import Platform
from forewarn.platform.exec import ExecPlatform
from forewarn.platform.simulated import Sleeper


def real_platform(
    config: Config,
    clock: Sleeper,
    *,
    hosts: Callable[[], Iterable[str]],
    wanted: Callable[[], Mapping[str, int]] = dict,
    environ: Mapping[str, str],
) -> Platform | None:
    """The platform that acts on VMs;

    None if none was asked for. `wanted`: where VMs should rather not move to.
    """
    if config.platform is PlatformName.EXEC:
        return ExecPlatform(
            config.exec_command, seconds_max=config.exec_seconds_max, environ=environ
        )
    if config.platform is PlatformName.LIBVIRT:
        return libvirt_platform(config, clock, hosts, wanted)
    return None


def health_platform(config: Config, environ: Mapping[str, str]) -> Platform | None:
    """What runs the health command of campaigns, as the exec platform runs its commands;

    None if none is configured.
    """
    if config.campaign_health_command is None:
        return None
    command = ExecCommand("*", config.campaign_health_command.words)
    try:
        return ExecPlatform(
            [command], seconds_max=config.campaign_health_seconds_max, environ=environ
        )
    except Invalid as error:
        raise Invalid(
            f"campaign_health_command: {command.words[0]!r} is not found or not executable; "
            "expected the path of a program, or its name in PATH",
            option="campaign_health_command",
        ) from error


def libvirt_platform(
    config: Config,
    clock: Sleeper,
    hosts: Callable[[], Iterable[str]],
    wanted: Callable[[], Mapping[str, int]],
) -> Platform:
    try:
        from forewarn.platform.libvirt.connection import Libvirts
        from forewarn.platform.libvirt.driver import LibvirtPlatform
    except ModuleNotFoundError as error:
        raise Invalid(
            f"the libvirt platform needs {error.name}; pip install 'forewarn[libvirt]' brings it"
        ) from error
    libvirts = Libvirts(config.libvirt_uri, call_seconds_max=config.libvirt_call_seconds_max)
    return LibvirtPlatform(
        libvirts,
        clock,
        hosts=hosts,
        wanted=wanted,
        grace=timedelta(seconds=config.libvirt_grace_seconds),
    )
