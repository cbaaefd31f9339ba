"""Live migrations of a guest that polls, timed on the hosts.

The end of a migration is when libvirt of the target reports that the guest has resumed there.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import libvirt

from tests.vm.cloud import EVENT_SECONDS_MAX, Cloud
from tests.vm.guest import Guest
from tests.vm.real_libvirt import RealHost, wait_for
from tests.vm.traffic import AGENT

log = logging.getLogger(__name__)
ANSWER_SECONDS_MAX = 5.0
"""From the end of a migration until the new host has answered a poll. Measured: 2.0 to 2.4."""
AGENT_SECONDS_MAX = 5.0
"""The same for the agent, which polls again and again while a daemon moves its guest. Measured: 2.9
to 3.5.
"""
AGENT_BY_HAND_SECONDS_MAX = 7.0
"""The same for an agent whose long poll is lost with the old host. It polls again within 5 seconds,
see docs/hostd.md, and an emulated guest takes a moment to send that. Measured: 2.4 to 4.2.
"""
WATCH_SECONDS_MAX, RECOVER_SECONDS_MAX = 30, 30
LEFT = libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_SUSPENDED_MIGRATED
"""On the source: the guest runs there no more."""
ARRIVED = libvirt.VIR_DOMAIN_EVENT_RESUMED, libvirt.VIR_DOMAIN_EVENT_RESUMED_MIGRATED
FLAGS = (
    libvirt.VIR_MIGRATE_LIVE
    | libvirt.VIR_MIGRATE_PERSIST_DEST
    | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE
)


def move_while_it_polls(cloud: Cloud, guest: Guest, source: RealHost, target: RealHost) -> str:
    """Redeploy it, and return the event. Its agent recovers.

    The daemon has answered its long polls before it leaves: on the new host it would wait in vain.
    """
    events = list[str]()

    def redeploy() -> None:
        (event,) = cloud.schedule(f"/vms/{guest.name}/redeploy")
        events.append(str(event["id"]))

    with migrating(cloud, guest, source, target, redeploy, AGENT_SECONDS_MAX) as has_open_wait:
        assert not has_open_wait, cloud.report()
        guest.wait_for_line(f"recovered Redeploy {events[0]}", RECOVER_SECONDS_MAX)
    cloud.wait_until_over(events[0])
    return events[0]


def move_by_hand(cloud: Cloud, guest: Guest, source: RealHost, target: RealHost) -> None:
    """As with `virsh migrate`. No daemon knows in advance, so a long poll of the agent is open."""

    def migrate() -> None:
        source.connection.lookupByName(guest.name).migrate3(target.connection, {}, FLAGS)

    seconds_max = AGENT_BY_HAND_SECONDS_MAX
    with migrating(cloud, guest, source, target, migrate, seconds_max) as has_open_wait:
        assert has_open_wait, cloud.report()
    cloud.wait_for(lambda: cloud.ask(f"/vms/{guest.name}")["host"] == target.name)


@contextmanager
def migrating(
    cloud: Cloud,
    guest: Guest,
    source: RealHost,
    target: RealHost,
    move: Callable[[], None],
    agent_seconds_max: float,
) -> Iterator[bool]:
    """Move a guest that polls all the time, and whose agent has a long poll open.

    A poll is answered by the new host in time, and so is a poll of the agent. Gives whether a long
    poll was still open on the old host when the guest left it.
    """
    old, new = cloud.traffic[source.name], cloud.traffic[target.name]
    with (
        guest.polling(source, target),
        times_of(source, guest.name) as left,
        times_of(target, guest.name) as arrived,
    ):
        wait_for(lambda: old.has_open_wait(time.time()), WATCH_SECONDS_MAX, cloud.report)
        guest.migrate_quickly(source)
        move()
        wait_for(lambda: ARRIVED in arrived, EVENT_SECONDS_MAX, cloud.report)
        end = arrived[ARRIVED]
        wait_for(lambda: new.answered_at(end), WATCH_SECONDS_MAX, cloud.report)
        answer_seconds = new.answered_at(end) - end
        log.info("poll answered %.1f s after the migration", answer_seconds)
        assert answer_seconds <= ANSWER_SECONDS_MAX, cloud.report()

        yield old.has_open_wait(left[LEFT])

        wait_for(lambda: new.answered_at(end, AGENT), WATCH_SECONDS_MAX, cloud.report)
        agent_seconds = new.answered_at(end, AGENT) - end
        log.info("agent answered %.1f s after the migration", agent_seconds)
        assert agent_seconds <= agent_seconds_max, cloud.report()
        share_mac(source, target)


@contextmanager
def times_of(host: RealHost, name: str) -> Iterator[dict[tuple[int, int], float]]:
    """When libvirt reported which event and detail of a domain within this."""
    times: dict[tuple[int, int], float] = {}

    def note(_: object, domain: libvirt.virDomain, event: int, detail: int, __: object) -> None:
        if domain.name() == name:
            times[event, detail] = time.time()

    kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
    number = host.connection.domainEventRegisterAny(None, kind, note, None)
    try:
        yield times
    finally:
        host.connection.domainEventDeregisterAny(number)


def share_mac(source: RealHost, target: RealHost) -> None:
    """Without it, we reach the guest when its ARP entry has expired. See docs/libvirt.md."""
    mac = source.namespace.run("cat /sys/class/net/virbr0/address").strip()
    target.namespace.run(f"ip link set virbr0 address {mac}")
