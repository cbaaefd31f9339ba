"""A lab after a busy day: something of everything that the console shows.

    python -m tests.e2e.busy_lab

prints the URL of the control API, and serves until it is killed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from forewarn.campaign.model import CampaignSpec
from forewarn.core.event import EventType
from forewarn.fleetfile.parser import parse
from forewarn.lab.fault.active import parse_fault
from forewarn.lab.service import LabService, Setup, open_lab
from forewarn.option_kind import Address

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
POLL = "/metadata/scheduledevents?api-version=2020-07-01"
SILENT = ("cache_3", "batch_11")
SCOPES = [
    ("web", "availability-set", "any", "web-{}", 6, 3),
    ("api", "availability-set", "quorum", "api-{}", 10, 5),
    ("db", "availability-set", "all", "db-{}", 3, 3),
    ("cache", "scale-set", "any", "cache_{}", 8, 5),
    ("batch", "scale-set", "any", "batch_{}", 24, 5),
    ("bastion", "vm", "any", "bastion", 1, 1),
]
"""Name, kind, approval, names of VMs, how many, and in how many update domains."""


def make_fleet() -> bytes:
    lines = ["scopes:"]
    for index, (scope, kind, approval, name, count, domains) in enumerate(SCOPES):
        lines.append(f"  - name: {scope}\n    kind: {kind}\n    policy: {{approval: {approval}}}")
        lines.append("    vms:")
        for number in range(count):
            host = f"kvm-{(number * 5 + len(scope)) % 8 + 1:02}"
            vm = f"name: {name.format(number)}, host: {host}, update_domain: {number % domains}"
            lines.append(f"      - {{{vm}, address: 10.{index}.0.{number + 1}}}")
    return "\n".join([*lines, "hosts: [kvm-09]"]).encode()


async def poll(lab: LabService, *vms: str) -> None:
    for vm in vms or [vm for vm in lab.engine.board.vm_names if vm not in SILENT]:
        await lab.request(vm, "GET", POLL, headers=[(b"metadata", b"true")])


async def approve(lab: LabService, event: str, vm: str) -> None:
    body = f'{{"StartRequests": [{{"EventId": "{event}"}}]}}'.encode()
    await lab.request(vm, "POST", POLL, body, [(b"metadata", b"true")])


@asynccontextmanager
async def open_busy_lab() -> AsyncIterator[tuple[LabService, str]]:
    """A lab after a day of operations, and the URL of its control API."""
    setup = Setup(fleet=parse(make_fleet(), "fleet"), start=NOW - timedelta(hours=20))
    async with open_lab(setup) as lab:
        await have_a_day(lab)
        yield lab, await lab.listen_control(Address("127.0.0.1", 0))


async def have_a_day(lab: LabService) -> None:
    operate = lab.operations

    async def until(time: timedelta) -> None:
        await lab.advance(NOW + time - lab.clock.now())
        await poll(lab)

    await poll(lab)
    await operate.restart("web-2", by="token deploy")
    await until(timedelta(hours=-19, minutes=-40))
    await operate.redeploy("api-7", by="token anna")
    await until(timedelta(hours=-19))
    await operate.maintain("kvm-04", by="token anna", type=EventType.FREEZE, duration_seconds=9)
    await until(timedelta(hours=-18, minutes=-50))
    lab.platform.failing.add("cache_5")
    await operate.redeploy("cache_5", by="token deploy")
    await until(timedelta(hours=-6))
    lab.platform.failing.clear()
    await operate.restart("db-0", by="token anna")
    await until(timedelta(hours=-5, minutes=-55))
    await operate.restart("web-4", by="token deploy")
    await until(timedelta(hours=-5, minutes=-50))
    await operate.cancel(event_of(lab, "web-4"), by="token deploy")
    await until(timedelta(minutes=-55))
    await operate.maintain("kvm-02", by="token anna", type=EventType.REBOOT)
    await until(timedelta(minutes=-22))
    spec = CampaignSpec(
        name="kernel 6.12",
        type=EventType.REBOOT,
        patterns=("kvm-0[5-9]",),
        max_hosts=2,
    )
    await lab.service.campaigns.start(spec, "token anna", lab.operations.new_id())
    await until(timedelta(minutes=-9))
    await operate.restart("web-0", by="token deploy")
    await until(timedelta(minutes=-8))
    await operate.restart("db-1", by="token anna")
    await operate.redeploy("api-3", by="token anna")
    await approve(lab, event_of(lab, "api-3"), "api-3")
    await approve(lab, event_of(lab, "api-3"), "api-4")
    await until(timedelta(minutes=-4))
    await approve(lab, event_of(lab, "web-0"), "web-1")
    await lab.advance(timedelta(seconds=5))
    await approve(lab, event_of(lab, "web-5"), "web-5")
    await approve(lab, event_of(lab, "db-1"), "db-0")
    await until(timedelta(0))
    await lab.add_fault(parse_fault({"fault": "status", "code": 503, "vms": ["web-1"]}))
    await poll(lab)


def event_of(lab: LabService, vm: str) -> str:
    events = lab.engine.board.vms[vm].scope.events
    return next(event.id for event in events if vm in event.resources)


async def main() -> None:
    async with open_busy_lab() as (_, url):
        print(url, flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
