"""The guest that the other tests use: what they conclude from it is true."""

from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from tests.vm.guest import BOOT_SECONDS_MAX, Guest, start_network
from tests.vm.guest_image import GuestImage
from tests.vm.real_libvirt import RealHost, real_hosts, wait_for


@pytest.fixture
def host() -> Iterator[RealHost]:
    with real_hosts("host-a") as hosts:
        yield hosts["host-a"]


def test_guest_counts_its_boots_and_obeys_the_power_button(
    host: RealHost, image: GuestImage, tmp_path: Path
) -> None:
    guest = Guest(image, tmp_path, "web-0", address="192.168.122.10", metadata="scope='web'")
    start_network(host, [guest])
    with guest.with_disk():
        domain = host.run_domain(guest.xml)
        guest.wait_until_up(host)
        assert guest.boots == 1
        assert guest.run(host, "cat /proc/uptime")

        domain.reset()
        wait_for(lambda: guest.boots == 2, BOOT_SECONDS_MAX)
        guest.wait_until_up(host)

        domain.shutdown()
        wait_for(lambda: host.state() == libvirt.VIR_DOMAIN_SHUTOFF, BOOT_SECONDS_MAX)
        assert "power button" in guest.console
        assert not guest.answers(host)
