"""The libvirt platform and the QEMU guest agent of a real guest."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.engine.clock import RealClock
from forewarn.option_kind import HostUri
from forewarn.platform.base import ImpactRequest
from forewarn.platform.libvirt.connection import LibvirtHosts
from forewarn.platform.libvirt.driver import LibvirtPlatform
from forewarn.platform.libvirt.targets import Targets
from tests.builders import guid
from tests.vm.guest import BOOT_SECONDS_MAX, Guest, start_network
from tests.vm.guest_image import GuestImage
from tests.vm.real_libvirt import real_hosts

FROZEN_SECONDS = 20


def order(number: int, type_: EventType) -> ImpactRequest:
    vm = Vm(name="web-0", host="host-a")
    return ImpactRequest(guid(number), "web", vm, type_, Cause.MAINTENANCE, 1, FROZEN_SECONDS)


def test_agent_sets_the_clock_and_answers_only_after_the_reboot(
    image: GuestImage, tmp_path: Path
) -> None:
    """A suspended guest's clock stands still; an agent that answers too early is the old one."""
    guest = Guest(
        image,
        tmp_path,
        "web-0",
        address="192.168.122.10",
        metadata="scope='web'",
        has_guest_agent=True,
    )

    async def main(platform: LibvirtPlatform) -> None:
        reboot = order(2, EventType.REBOOT)
        async with asyncio.timeout(BOOT_SECONDS_MAX):
            await platform.wait_until_back(reboot)
        freeze = await platform.run_impact(order(1, EventType.FREEZE))
        assert (
            freeze.detail == "suspended for 20 seconds and resumed; the guest agent set its clock"
        )
        late = time.time() - float(guest.run(host, "date +%s"))
        assert late < FROZEN_SECONDS / 2, f"the guest's clock is {late:.0f} seconds late"

        assert guest.boots == 1
        assert not (await platform.run_impact(reboot)).is_back
        async with asyncio.timeout(BOOT_SECONDS_MAX):
            await platform.wait_until_back(reboot)
        assert guest.boots == 2

    with real_hosts("host-a") as hosts, guest.with_disk():
        host = hosts["host-a"]
        start_network(host, [guest])
        host.run_domain(guest.xml)
        guest.wait_until_up(host)
        libvirts = LibvirtHosts([HostUri("host-a", host.uri)], call_seconds_max=30)
        grace = timedelta(seconds=20)
        asyncio.run(main(LibvirtPlatform(Targets(libvirts, lambda: hosts), RealClock(), grace)))
