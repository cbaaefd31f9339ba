"""Stops domains, and knows which of those that are off should run."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from forewarn.core.event import Cause
from forewarn.platform.base import STARTS, ImpactRequest, Sleeper
from forewarn.platform.libvirt import marker
from forewarn.platform.libvirt.connection import Domain, LibvirtError

CHECK_EVERY = timedelta(seconds=0.5)


@dataclass(frozen=True)
class PowerControl:
    """Gives a guest `grace` to shut down or reboot by itself before it is forced."""

    clock: Sleeper
    grace: timedelta

    async def stop(
        self, domain: Domain, has_restarted: Callable[[Any], bool] = lambda handle: False
    ) -> str:
        """Shut down within the grace period, else force it off. Return what came of it.

        A domain that `has_restarted` meanwhile is not stopped again.
        """
        if await domain.is_off():
            return "the VM was off"
        with suppress(LibvirtError):  # the guest cannot be asked: it is destroyed below
            await domain.do(lambda handle: handle.shutdown())
            if await self.wait_until_off(domain):
                return "the guest shut down by itself"
        if await domain.ask(has_restarted):
            return "the guest shut down by itself"
        if not await domain.is_off():
            await domain.do(lambda handle: handle.destroy())
        return f"the guest did not shut down within {self.grace.total_seconds():g} seconds: stopped"

    async def wait_until_off(
        self, domain: Domain, has_rebooted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until the VM is off or has rebooted. False if the grace period ends first."""
        end = self.clock.now() + self.grace
        while not (has_rebooted() or await domain.is_off()):  # ends with the grace period
            now = self.clock.now()
            if now >= end:
                return False
            await self.clock.sleep_until(min(now + CHECK_EVERY, end))
        return True


async def has_begun(request: ImpactRequest, domain: Domain) -> bool:
    """Whether an earlier try of this event has begun to act."""
    return (await domain.ask(marker.read)).event == request.event_id


async def should_start(request: ImpactRequest, domain: Domain) -> bool:
    """Whether a VM that is off is started: its owner wants it, or we or a failure stopped it.

    The fleet knows what its owner had stopped before its host failed.
    """
    has_failed = request.cause is Cause.FAILED and not request.vm.power.is_off
    return request.cause in STARTS or has_failed or await has_begun(request, domain)
