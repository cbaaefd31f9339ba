"""The libvirt platform on real QEMU domains.

`make test-vm` runs it; `make test` and `make test-all` do not.
"""

import asyncio
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.change import ChangeKind
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.engine.clock import RealClock
from forewarn.errors import ImpactFailed
from forewarn.option_kind import HostUri
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.libvirt.connection import LibvirtHosts, open_connection
from forewarn.platform.libvirt.discovery import discover
from forewarn.platform.libvirt.driver import LibvirtPlatform
from forewarn.platform.libvirt.marker import read
from forewarn.platform.libvirt.targets import Targets
from tests.builders import guid
from tests.e2e.history_file import changes_in
from tests.e2e.service import Service, running
from tests.unit.platform.libvirt.test_libvirt_targets import Target
from tests.vm.real_libvirt import REBOOTS_BY_ITSELF, RealHost, real_hosts, wait_for

Hosts = dict[str, RealHost]
RUNNING, PAUSED, OFF = (
    libvirt.VIR_DOMAIN_RUNNING,
    libvirt.VIR_DOMAIN_PAUSED,
    libvirt.VIR_DOMAIN_SHUTOFF,
)
FLEET = "scopes: [{name: web, vms: [{name: web-0, host: host-a}]}]\nhosts: [host-b]\n"


@pytest.fixture(scope="module")
def made() -> Iterator[Hosts]:
    with real_hosts("host-a", "host-b") as hosts:
        yield hosts


@pytest.fixture
def hosts(made: Hosts) -> Iterator[Hosts]:
    """Both hosts, empty again after each test."""
    yield made
    gc.collect()  # closes this test's connections while the hosts answer
    for host in made.values():
        host.clear()


def libvirts(
    hosts: Hosts, call_seconds_max: float = 30, connect: Callable[[str], Any] | None = None
) -> LibvirtHosts:
    return LibvirtHosts(
        [HostUri(name, host.uri) for name, host in hosts.items()],
        call_seconds_max=call_seconds_max,
        connect=connect,
    )


def run_impact(
    hosts: Hosts,
    type_: EventType,
    cause: Cause = Cause.MAINTENANCE,
    *,
    grace: float = 1,
    call_seconds_max: float = 30,
    tries: int = 1,
    targets: tuple[str, ...] = (),
    connect: Callable[[str], Any] | None = None,
) -> ImpactResult:
    """With `targets` as a daemon would, which knows no other hosts."""
    vm = Vm(name="web-0", host="host-a")
    order = ImpactRequest(guid(1), "web", vm, type_, cause, tries, 2, targets)
    known = libvirts(hosts, call_seconds_max, connect)
    platform = LibvirtPlatform(
        Targets(known, lambda: () if targets else list(hosts)),
        RealClock(),
        timedelta(seconds=grace),
    )
    return asyncio.run(platform.run_impact(order))


def events(host: RealHost, domain: Any, what: int) -> list[tuple[Any, ...]]:
    """What libvirt tells of the domain from now on."""
    result: list[tuple[Any, ...]] = []
    host.connection.domainEventRegisterAny(
        domain, what, lambda connection, of, *more: result.append(more), None
    )
    return result


def flags(hosts: Hosts) -> list[str]:
    uris = [
        part for name, host in hosts.items() for part in ("--libvirt-uri", f"{name}={host.uri}")
    ]
    return ["--platform", "libvirt", "--libvirt-grace-seconds", "1", *uris]


def is_told(folder: Path, what: ChangeKind) -> Callable[[], bool]:
    return lambda: what in [change.what for change in changes_in(folder, "web")]


def test_a_freeze_suspends_and_resumes(hosts: Hosts) -> None:
    host = hosts["host-a"]
    result = events(host, host.run_vm(), libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE)

    start = time.monotonic()
    assert run_impact(hosts, EventType.FREEZE).detail == (
        "suspended for 2 seconds and resumed; no guest agent sets its clock"
    )

    assert time.monotonic() - start >= 2
    wait_for(lambda: len(result) >= 2, 10)
    assert [event for event, *_ in result] == [
        libvirt.VIR_DOMAIN_EVENT_SUSPENDED,
        libvirt.VIR_DOMAIN_EVENT_RESUMED,
    ]
    assert host.state() == RUNNING


def test_a_guest_that_reboots_by_itself_is_not_reset(hosts: Hosts) -> None:
    hosts["host-a"].run_vm(bios=REBOOTS_BY_ITSELF)

    assert run_impact(hosts, EventType.REBOOT, grace=30).detail == "the guest rebooted by itself"


def test_unresponsive_guest_is_reset_after_the_limit(hosts: Hosts) -> None:
    host = hosts["host-a"]
    result = events(host, host.run_vm(), libvirt.VIR_DOMAIN_EVENT_ID_REBOOT)

    assert (
        run_impact(hosts, EventType.REBOOT).detail
        == "the guest did not reboot within 1 seconds: reset"
    )

    wait_for(lambda: bool(result), 10)
    assert host.state() == RUNNING


def test_a_restart_starts_a_vm_that_does_not_run(hosts: Hosts) -> None:
    hosts["host-a"].run_vm().destroy()

    run_impact(hosts, EventType.REBOOT, Cause.RESTART)

    assert hosts["host-a"].state() == RUNNING


def test_a_redeploy_migrates_live(hosts: Hosts) -> None:
    hosts["host-a"].run_vm()

    assert run_impact(hosts, EventType.REDEPLOY) == ImpactResult(
        host="host-b", detail="migrated live to host-b"
    )

    assert hosts["host-a"].names() == []
    assert hosts["host-b"].state() == RUNNING
    moved = hosts["host-b"].connection.lookupByName("web-0")
    assert moved.isPersistent()
    assert read(moved).event == ""


def test_a_redeploy_of_a_vm_that_cannot_migrate_stops_and_starts_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Its disk is a plain file: libvirt calls a migration unsafe."""
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    hosts["host-a"].run_vm(disk=disk)

    done = run_impact(hosts, EventType.REDEPLOY)

    assert (done.host, done.is_back) == ("host-b", False)
    assert done.detail.startswith("cannot migrate live to host-b: libvirt of host-a: Unsafe")
    assert done.detail.endswith(
        "; the guest did not shut down within 1 seconds: stopped; moved to host-b"
    )
    assert hosts["host-a"].names() == []
    assert hosts["host-b"].state() == RUNNING


def test_vm_that_is_started_again_at_home_is_stopped_once(hosts: Hosts, tmp_path: Path) -> None:
    """A cluster manager starts it, and the result of the first try is lost."""
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    source, target = hosts["host-a"], hosts["host-b"]
    domain = source.run_vm(disk=disk)
    stopped = events(source, domain, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE)

    def crash(handle: Any) -> None:
        raise KeyboardInterrupt

    def connect(uri: str) -> Any:
        connection = open_connection(uri)
        return Target(connection, create=crash) if uri == target.uri else connection

    with pytest.raises(KeyboardInterrupt):
        run_impact(hosts, EventType.REDEPLOY, connect=connect)
    assert source.state() == OFF
    domain.create()

    with pytest.raises(ImpactFailed, match="it was stopped for this event before") as failed:
        run_impact(hosts, EventType.REDEPLOY, tries=2)

    assert failed.value.facts["is_final"]
    assert (source.state(), target.names()) == (RUNNING, [])
    assert [what for what, _, _ in stopped].count(libvirt.VIR_DOMAIN_EVENT_STOPPED) == 1


def test_vm_whose_disk_the_other_host_lacks_is_not_stopped(hosts: Hosts) -> None:
    """The file is in a folder that each host has for itself."""
    source = hosts["host-a"]
    (source.folder / "lib/local.img").write_bytes(bytes(1 << 20))
    source.run_vm(disk=Path("/var/lib/libvirt/local.img"))

    with pytest.raises(ImpactFailed) as failed:
        run_impact(hosts, EventType.REDEPLOY)

    assert failed.value.facts["is_final"]
    assert str(failed.value) == (
        "host-b cannot run it: disk hda: Failed to open file '/var/lib/libvirt/local.img':"
        " No such file or directory"
    )
    assert (source.state(), hosts["host-b"].names()) == (RUNNING, [])


def test_vm_whose_cpu_the_other_host_lacks_is_not_stopped(hosts: Hosts, tmp_path: Path) -> None:
    """Its definition has another CPU than it was started with."""
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    source = hosts["host-a"]
    running = source.run_vm(disk=disk)
    xml = re.sub("<cpu.*</cpu>", "", running.XMLDesc(), flags=re.DOTALL)
    cpu = "<cpu mode='custom' match='exact' check='partial'><model>Icelake-Server</model></cpu>"
    source.connection.defineXML(xml.replace("<devices>", f"{cpu}<devices>"))

    with pytest.raises(ImpactFailed, match="its CPU does not have all features of Icelake-Server"):
        run_impact(hosts, EventType.REDEPLOY)
    assert (source.state(), hosts["host-b"].names()) == (RUNNING, [])


def test_freeze_for_a_live_migration_moves_the_vm_live(hosts: Hosts) -> None:
    hosts["host-a"].run_vm()

    done = run_impact(hosts, EventType.FREEZE, cause=Cause.LIVE_MIGRATION)

    assert done == ImpactResult(host="host-b", detail="migrated live to host-b")
    assert (hosts["host-a"].names(), hosts["host-b"].state()) == ([], RUNNING)


def test_retried_move_with_a_silent_target_never_runs_the_vm_twice(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The target falls silent when it is to start the VM, and starts it when it goes on."""
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    source, target = hosts["host-a"], hosts["host-b"]
    source.run_vm(disk=disk)

    def stop_and_create(handle: Any) -> None:
        os.kill(target.pid, signal.SIGSTOP)
        handle.create()

    def connect(uri: str) -> Any:
        connection = open_connection(uri)
        return Target(connection, create=stop_and_create) if uri == target.uri else connection

    redeploy = partial(run_impact, hosts, EventType.REDEPLOY)
    try:
        with pytest.raises(ImpactFailed, match="libvirt of host-b did not answer within 8 seconds"):
            redeploy(targets=("host-b",), connect=connect, call_seconds_max=8)
        with pytest.raises(ImpactFailed, match="web-0 may run on host-b, which does not answer"):
            redeploy(targets=("host-z",), connect=connect, call_seconds_max=8, tries=2)
        assert source.state() == OFF
    finally:
        os.kill(target.pid, signal.SIGCONT)
        target.start()  # a connection is closed after 15 seconds without an answer

    done = redeploy(targets=("host-b",), tries=3)

    assert (done.host, source.names(), target.state()) == ("host-b", [], RUNNING)


def test_eviction_forces_an_unresponsive_guest_off(
    hosts: Hosts,
) -> None:
    hosts["host-a"].run_vm()

    assert (
        run_impact(hosts, EventType.PREEMPT).detail
        == "the guest did not shut down within 1 seconds: stopped"
    )
    assert hosts["host-a"].state() == OFF


def test_a_deletion_stops_and_undefines(hosts: Hosts) -> None:
    hosts["host-a"].run_vm()

    assert (
        run_impact(hosts, EventType.TERMINATE).detail
        == "the guest did not shut down within 1 seconds: stopped, undefined"
    )
    assert hosts["host-a"].names() == []


def test_hanging_libvirtd_fails_the_try_and_is_retried(hosts: Hosts) -> None:
    host = hosts["host-a"]
    host.run_vm()
    os.kill(host.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ImpactFailed, match="libvirt of host-a did not answer within 1 seconds"):
            run_impact(hosts, EventType.PREEMPT, call_seconds_max=1)
    finally:
        os.kill(host.pid, signal.SIGCONT)

    run_impact(hosts, EventType.PREEMPT)
    assert host.state() == OFF


def test_domains_are_discovered(hosts: Hosts) -> None:
    domain = hosts["host-b"].run_vm("web-7")

    result = asyncio.run(discover(libvirts(hosts), ["host-a", "host-b"]))

    assert result["host-a"] == []
    (found,) = result["host-b"]
    assert (found.name, found.id, found.host) == ("web-7", domain.UUIDString(), "host-b")


def test_redeploy_updates_the_host_in_the_fleet(hosts: Hosts, tmp_path: Path) -> None:
    hosts["host-a"].run_vm()
    with running(tmp_path, *flags(hosts), fleet=FLEET) as service:
        assert service.ask("POST", "/vms/web-0/redeploy")[0] == 202
        wait_for(is_told(tmp_path, ChangeKind.COMPLETED), 60)
        assert service.ask("GET", "/vms/web-0")[1]["host"] == "host-b"
    assert hosts["host-b"].state() == RUNNING


def test_killed_service_resumes_a_frozen_vm_after_restart(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts["host-a"]
    host.run_vm()
    service = Service(
        tmp_path, "--identify", "path", "--rate", "900", *flags(hosts), fleet=FLEET
    ).start()
    try:
        freeze(service)
        wait_for(lambda: host.state() == PAUSED, 30)
        service.kill()
        assert host.state() == PAUSED
        service.start()
        wait_for(is_told(tmp_path, ChangeKind.COMPLETED), 60)
    finally:
        service.kill()
    assert host.state() == RUNNING


def test_stopping_service_resumes_a_frozen_vm(hosts: Hosts, tmp_path: Path) -> None:
    host = hosts["host-a"]
    host.run_vm()
    with running(tmp_path, "--rate", "900", *flags(hosts), fleet=FLEET) as service:
        freeze(service)
        wait_for(lambda: host.state() == PAUSED, 30)
        assert service.stop() == 0
    assert host.state() == RUNNING


def freeze(service: Service) -> None:
    """For ten minutes, after a notice of a second."""
    service.poll()
    asked = {"type": "Freeze", "duration_seconds": 600}
    assert service.ask("POST", "/hosts/host-a/maintain", asked)[0] == 202
