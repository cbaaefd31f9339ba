"""`forewarn hostd` with libvirt's own test driver, as real processes."""

from pathlib import Path

import pytest

from tests.e2e.host_daemon import HostDaemon, hosting
from tests.e2e.test_libvirt import uri_of
from tests.e2e.waiting import eventually
from tests.unit.platform.libvirt.libvirt_world import domain_xml

pytestmark = pytest.mark.system
OURS = "<f:vm xmlns:f='urn:forewarn:vm:1' scope='web' kind='availability-set'/>"


def test_domains_are_in_the_fleet_and_are_restarted(tmp_path: Path) -> None:
    uri = uri_of(tmp_path, domain_xml("web-0", 1, OURS), domain_xml("db", 2))
    flags = ("--libvirt-uri", uri, "--libvirt-grace-seconds", "0")
    with hosting(tmp_path) as world:
        daemon = HostDaemon(tmp_path, [world.server.control], *flags)
        try:
            daemon.start()
            world.wait_for_vms("db", "web-0")
            web = world.vms()["web-0"]
            assert (web["host"], web["scope"]) == ("host-a", "web")
            world.restart()
            world.wait_until_completed()
            assert "impacted" in world.changes()
        finally:
            daemon.kill()


def test_vm_that_an_impact_suspended_is_resumed_if_its_event_is_over(tmp_path: Path) -> None:
    """The event ended while the daemon was away, and nobody else would resume the VM."""
    marker = (
        "<i:impact xmlns:i='urn:forewarn:impact:1' event='over' host='host-a' target='host-a'/>"
    )
    suspended = domain_xml("web-0", 1, OURS + marker).replace(
        "<domain type='test'>",
        "<domain type='test' xmlns:test='http://libvirt.org/schemas/domain/test/1.0'>"
        "<test:runstate>3</test:runstate>",
    )
    with hosting(tmp_path) as world:
        uri = uri_of(tmp_path, suspended)
        daemon = HostDaemon(tmp_path, [world.server.control], "--libvirt-uri", uri)
        try:
            daemon.start()
            world.wait_for_vms("web-0")
            eventually(lambda: "VM of an event that is over" in daemon.log.read_text())
            assert world.vms()["web-0"]["power"] == "running"
        finally:
            daemon.kill()


def test_daemon_waits_for_libvirt(tmp_path: Path) -> None:
    """Hosts boot in any order; the log says it once."""
    flags = ("--libvirt-uri", f"qemu+unix:///system?socket={tmp_path}/nowhere")
    with hosting(tmp_path) as world:
        daemon = HostDaemon(tmp_path, [world.server.control], *flags)
        try:
            daemon.start()
            eventually(lambda: "Failed to connect socket" in daemon.log.read_text())
            assert daemon.stop() == 0
            assert daemon.log.read_text().count("cannot be listed") == 1
        finally:
            daemon.kill()
