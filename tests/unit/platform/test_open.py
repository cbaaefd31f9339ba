"""The options that choose a platform, and the platform that they come to."""

from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.config import Config, PlatformName
from forewarn.core.event import EventType
from forewarn.core.timing import DURATION
from forewarn.errors import Invalid
from forewarn.option_kind import ExecCommand, HostUri
from forewarn.platform.exec import ExecPlatform
from forewarn.platform.open import open_health_platform, open_platform
from forewarn.platform.simulated import SimulatedPlatform
from tests.unit.config_of import config_of
from tests.unit.platform.instant_clock import InstantClock


def config(**flags: object) -> Config:
    return config_of(**flags)


def chosen(**flags: object) -> object:
    environ = {"PATH": "/usr/bin:/bin"}
    return open_platform(
        config(**flags),
        InstantClock(),
        durations=DURATION,
        hosts=list,
        avoid=dict,
        scope_hosts=lambda scope: (),
        environ=environ,
    )


def test_default_platform_is_simulated() -> None:
    assert config().platform is PlatformName.SIMULATED
    assert isinstance(chosen(), SimulatedPlatform)


def test_simulated_platform_takes_its_options() -> None:
    made = chosen(simulate_duration=["Freeze=30s"], simulate_failure=["web-0"])

    assert isinstance(made, SimulatedPlatform)
    assert made.durations == {**DURATION, EventType.FREEZE: timedelta(seconds=30)}
    assert made.failing == {"web-0"}


@pytest.mark.parametrize(
    ("option", "text"), [("exec_command", "Nap=true"), ("simulate_duration", "Nap=30s")]
)
def test_unknown_event_type_is_refused(option: str, text: str) -> None:
    """A typing error would silently leave the type without its command or duration."""
    with pytest.raises(Invalid, match=f"^{option}: unknown event type 'Nap'; expected one of"):
        chosen(**{option: [text]})


def test_exec_platform_is_selected_by_name() -> None:
    assert isinstance(chosen(platform="exec", exec_command=["*=true"]), ExecPlatform)


@pytest.mark.system
def test_libvirt_platform_is_selected_by_name() -> None:
    from forewarn.platform.libvirt.driver import LibvirtPlatform

    assert isinstance(chosen(platform="libvirt"), LibvirtPlatform)


def test_command_is_split_like_a_shell_does(tmp_path: Path) -> None:
    made = config(exec_command=["Reboot=qm reboot '{vm} now'", "*=/bin/x --to=a"]).exec_command

    assert made == (
        ExecCommand("Reboot", ("qm", "reboot", "{vm} now")),
        ExecCommand("*", ("/bin/x", "--to=a")),
    )
    assert str(made[0]) == "Reboot=qm reboot '{vm} now'"


@pytest.mark.parametrize("text", ["reboot {vm}", "Reboot=", "Reboot='unclosed", "Reboot=''"])
def test_malformed_command_is_refused(text: str) -> None:
    with pytest.raises(
        Invalid, match=r"exec_command .from --exec-command.: expected TYPE=COMMAND such as Reboot="
    ):
        config(exec_command=[text])


@pytest.mark.parametrize("text", ["Reboot=qm reboot {vmm}", "Reboot={vm} reboot"])
def test_invalid_placeholder_is_refused(text: str) -> None:
    with pytest.raises(
        Invalid, match=r"--exec-command.: \{name\} may be one of event_id, event_type, "
    ):
        config(exec_command=[text])


@pytest.mark.system
def test_libvirt_uri_is_one_a_pattern_or_per_host() -> None:
    from forewarn.platform.libvirt.connection import LibvirtHosts

    plain, pattern = "qemu:///system", "qemu+ssh://root@{host}/system?keyfile=/k"
    named = f"host-b={plain}"

    assert config(libvirt_uri=[pattern, named]).libvirt_uri == (
        HostUri("", pattern),
        HostUri("host-b", plain),
    )
    libvirts = LibvirtHosts(config(libvirt_uri=[pattern, named]).libvirt_uri, call_seconds_max=1)
    assert libvirts.uri("host-a") == "qemu+ssh://root@host-a/system?keyfile=/k"
    assert libvirts.uri("host-b") == plain
    assert libvirts.uri("") == ""
    assert LibvirtHosts([HostUri("host-b", plain)], call_seconds_max=1).uri("host-a") == ""


@pytest.mark.parametrize(
    "text", ["qemu", "host a=qemu:///system", "qemu+ssh://{vm}/system", "qemu+ssh://{host}/{host}"]
)
def test_malformed_uri_is_refused(text: str) -> None:
    with pytest.raises(
        Invalid, match=r"expected a libvirt URI, which may contain \{host\}, or HOST=URI"
    ):
        config(libvirt_uri=[text])


def test_missing_health_program_error_names_the_option() -> None:
    """The service must not start with a check that would pause every campaign."""
    environ = {"PATH": "/usr/bin:/bin"}

    assert open_health_platform(config(), environ) is None
    assert isinstance(
        open_health_platform(config(campaign_health_command="true {host}"), environ), ExecPlatform
    )
    with pytest.raises(
        Invalid,
        match=(
            r"^campaign_health_command: '/no/such/program' is not found or not executable; expected"
        ),
    ):
        open_health_platform(config(campaign_health_command="/no/such/program"), environ)
