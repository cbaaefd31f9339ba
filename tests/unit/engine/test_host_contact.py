"""A guest reads through the daemon of its host: while that is away, no notice passes for it."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from msgspec.structs import replace

from forewarn.core.command import Unread
from forewarn.core.event import Event, EventType, Gap
from forewarn.core.fleet import Scope
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.lease import TTL_SECONDS
from forewarn.engine.machine_binding import SILENT
from forewarn.engine.managed_hosts import HOST_KEY, ManagedHost
from forewarn.engine.readability import Readability
from forewarn.engine.transaction import Transaction
from forewarn.store.base import Write
from tests.unit.engine.hostd_world import NOON, Daemon, Server, World, reported
from tests.unit.engine.hostd_world import run as run_world
from tests.work_count import work_of

HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
TTL = timedelta(seconds=TTL_SECONDS)
UNNOTICED = timedelta(seconds=15)
"""A server that died may not have noticed that a daemon had been silent for so long."""
REBOOT = EventType.REBOOT


def run(test: Callable[[World], Awaitable[None]]) -> None:
    run_world(test, is_confirming=True)


def web(name: str, domain: int) -> dict[str, Any]:
    return reported(name, scope="web", kind="availability-set", update_domain=domain)


def shown(world: World, name: str, server: int = 0) -> Scope:
    return world.servers[server].board.vms[name].scope


def event_of(world: World, name: str, server: int = 0) -> Event:
    (event,) = shown(world, name, server).events
    return event


async def polled(world: World, *names: str) -> None:
    """These VMs poll, each in its own scope."""
    await world.poll(*names)
    await world.settle()


async def announce(world: World, name: str = "a") -> Daemon:
    """The daemon of host-a, which has a VM that polls, and a restart of it at noon + 15 min."""
    daemon = await world.daemon("host-a", reported(name))
    await polled(world, name)
    assert await world.servers[0].operations.restart(name, by="ann")
    await world.settle()
    return daemon


def test_host_that_was_cut_off_until_after_not_before_gets_its_notice() -> None:
    """The guest could not read the event: it must not be rebooted a second after the return."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(5 * MINUTE, daemon)
        await world.pass_time(20 * MINUTE)
        event = event_of(world, "a")
        assert event.status == "Scheduled"
        assert event.unreadable_since is not None
        assert abs(event.unreadable_since - (NOON + 5 * MINUTE)) <= SECOND
        await daemon.work()
        await world.settle()
        event = event_of(world, "a")
        assert event.unreadable_since is None
        assert 35 * MINUTE <= event.not_before - NOON <= 35 * MINUTE + 2 * SECOND
        await world.pass_time(9 * MINUTE, daemon)
        assert event_of(world, "a").status == "Scheduled"
        await world.pass_time(MINUTE + 3 * SECOND, daemon)
        assert event_of(world, "a").status == "Started"

    run(test)


def test_guest_sees_the_new_not_before_as_soon_as_its_host_is_back() -> None:
    """Long before the old one, so that it can plan with it."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(2 * MINUTE)
        await daemon.work()
        await world.settle()
        left = event_of(world, "a").not_before - NOON
        assert 17 * MINUTE <= left <= 17 * MINUTE + 2 * SECOND
        (entry,) = await world.history("extended")
        assert entry.detail.endswith("it could not be read for 2m")

    run(test)


def test_vm_of_a_daemon_without_a_bridge_can_read_while_that_is_away() -> None:
    """It asks the servers, and gets its event."""

    async def test(world: World) -> None:
        daemon = Daemon(world, "host-a")
        daemon.relays = False
        await daemon.report(reported("a"))
        await polled(world, "a")
        assert await world.servers[0].operations.restart("a", by="ann")
        await world.pass_time(MINUTE, daemon)
        before = shown(world, "a")
        await world.pass_time(5 * MINUTE)
        assert world.servers[0].is_unreachable("host-a")
        daemon.unconfirmed_since = NOON + MINUTE
        await world.pass_time(5 * MINUTE, daemon)
        assert world.servers[0].hosts.contacts.gaps_of("host-a") == ()
        await world.pass_time(3 * MINUTE)
        assert shown(world, "a") == before
        await world.pass_time(MINUTE + 2 * SECOND)
        assert event_of(world, "a").status == "Started"

    run(test)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "killed"])
def test_vm_that_leaves_a_host_that_is_away_keeps_its_notice(*, is_stopped: bool) -> None:
    """An operator moves it by hand to a host whose daemon is there, before NotBefore."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        other = await world.daemon("host-b")
        await world.pass_time(10 * SECOND, daemon, other)
        if is_stopped:
            await daemon.work(is_leaving=True)
        await world.pass_time(10 * MINUTE, other)
        await other.report(reported("a"))
        await world.pass_time(10 * SECOND, other)
        assert world.servers[0].vm("a").host == "host-b"
        assert_made_up(event_of(world, "a"), 10 * MINUTE)

    run(test)


def test_vm_of_a_host_that_is_forgotten_keeps_its_notice() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(10 * SECOND, daemon)
        await world.pass_time(10 * MINUTE)
        headers = {"authorization": f"Bearer fw_root_{world.secret}"}
        url = "/api/v1/hosts/host-a/daemon?still_running=true"
        response = await world.servers[0].client.delete(url, headers=headers)
        assert response.status_code == 200, response.text
        await world.pass_time(10 * SECOND)
        assert_made_up(event_of(world, "a"), 10 * MINUTE)

    run(test)


def test_vm_keeps_its_notice_if_its_host_is_forgotten_as_soon_as_its_server_is_lost() -> None:
    """Before any server has noted since when the host is away."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE, daemon)
        await world.expire(world.servers[0])
        headers = {"authorization": f"Bearer fw_root_{world.secret}"}
        url = "/api/v1/hosts/host-a/daemon?still_running=true"
        response = await world.servers[1].client.delete(url, headers=headers)
        assert response.status_code == 200, response.text
        await world.pass_time(10 * SECOND)
        (gap,) = event_of(world, "a", server=1).gaps
        assert (gap.since, gap.until) == (NOON + MINUTE - SILENT - TTL, NOON + MINUTE)

    run(test)


def test_host_is_away_since_its_last_request_also_if_its_server_has_lost_its_lease_since() -> None:
    """The server goes on under another name, and then notices that the daemon is silent."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.pass_time(60 * SECOND, daemon)
        await world.pass_time(13 * SECOND)
        await world.store.expire("server/server-1")
        await world.pass_time(2 * SECOND)
        record = world.servers[1].hosts.managed.find("host-a")
        assert record is not None
        assert (record.server, record.away_since) == ("", NOON + 59 * SECOND)

    run(test)


def test_server_keeps_what_another_one_has_stored_while_it_cannot_tell() -> None:
    """Both would write in turns, as fast as they can, for as long as they differ."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE, daemon)
        await world.expire(world.servers[0])
        other = world.servers[1]
        readability = Readability(other.engine, other.hosts.contacts)
        event = replace(event_of(world, "a", server=1), unreadable_since=NOON + 30 * SECOND)
        scope = replace(shown(world, "a", server=1), events=(event,))
        assert readability.find_unread(scope) is None

    run(test)


class StoredContacts:
    """What the records of hosts say: when they were away, and since when they are."""

    def __init__(self, gaps: dict[str, list[Gap]], away: dict[str, datetime]) -> None:
        self._gaps = gaps
        self._away = away

    def gaps_of(self, host: str) -> list[Gap]:
        return self._gaps.get(host, [])

    def away_since(self, host: str) -> datetime | None:
        return self._away.get(host)

    def silent_since(self, host: str, at: datetime) -> datetime | None:
        away_since = self._away.get(host)
        return away_since if away_since is not None and away_since <= at else None

    def is_in_doubt(self, host: str) -> bool:
        return False


def test_time_of_each_host_counts_if_the_vms_of_an_event_are_on_several() -> None:
    """host-a was away from 12:01 to 12:10, host-b is since 12:05; then its VM is moved away."""

    async def test(world: World) -> None:
        await announce(world)
        engine = world.servers[0].engine
        scope = shown(world, "a")
        vms = (scope.vms[0], replace(scope.vms[0], name="b", host="host-b"))
        event = replace(scope.events[0], resources=("a", "b"), unreadable_since=NOON + MINUTE)
        world.servers[0].board.polled.update(dict.fromkeys("ab", NOON.timestamp()))
        await world.clock.advance(10 * MINUTE)
        gaps = {"host-a": [Gap(NOON + MINUTE, NOON + 10 * MINUTE)]}
        contacts = StoredContacts(gaps, {"host-b": NOON + 5 * MINUTE})
        found = find(engine, contacts, replace(scope, vms=vms, events=(event,)))
        assert found.since == NOON + 10 * MINUTE

        await world.clock.advance(10 * MINUTE)
        moved = (vms[0], replace(vms[1], host="host-c"))
        event = replace(event, unreadable_since=found.since)
        found = find(engine, StoredContacts(gaps, {}), replace(scope, vms=moved, events=(event,)))
        assert found.gaps[-1] == (NOON + 10 * MINUTE, NOON + 20 * MINUTE)

    run(test)


def test_server_whose_clock_is_behind_keeps_what_another_one_has_stored() -> None:
    """For its own clock the host is not away for long enough."""

    async def test(world: World) -> None:
        await announce(world)
        engine = world.servers[0].engine
        await world.clock.advance(14 * SECOND)
        scope = shown(world, "a")
        event = replace(scope.events[0], unreadable_since=NOON)
        contacts = StoredContacts({}, {"host-a": NOON})
        readability = Readability(engine, cast("HostContacts", contacts))
        assert readability.find_unread(replace(scope, events=(event,))) is None

    run(test)


def find(engine: Engine, contacts: StoredContacts, scope: Scope) -> Unread:
    found = Readability(engine, cast("HostContacts", contacts)).find_unread(scope)
    assert found is not None
    return found.events[0]


def assert_made_up(event: Event, gap: timedelta) -> None:
    """The event of `announce` has a later NotBefore, by this time."""
    assert event.status == "Scheduled"
    assert event.unreadable_since is None
    assert gap <= event.not_before - (NOON + 15 * MINUTE) <= gap + 5 * SECOND


@pytest.mark.parametrize("seconds", [5, 10, 14])
def test_daemon_that_restarts_changes_no_document(seconds: int) -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE, daemon)
        before = shown(world, "a")
        await world.pass_time(4 * SECOND)
        await daemon.work(is_leaving=True)
        await world.pass_time(seconds * SECOND)
        again = await world.daemon("host-a", reported("a"), session="s2")
        await world.pass_time(MINUTE, again)
        assert shown(world, "a") == before

    run(test)


def test_daemon_that_continues_at_another_server_was_not_away() -> None:
    """Its server died; a few seconds later it asks another one."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE, daemon)
        before = shown(world, "a", server=1)
        await world.expire(world.servers[0])
        await world.pass_time(4 * SECOND)
        daemon.server = world.servers[1]
        await world.pass_time(MINUTE, daemon)
        assert shown(world, "a", server=1) == before

    run(test)


async def announce_preempt(world: World) -> Daemon:
    """The daemon of host-a, which has a VM that polls, and its eviction at noon + 30 s."""
    daemon = await world.daemon("host-a", reported("a"))
    await polled(world, "a")
    assert await world.servers[0].operations.evict("a", by="ann")
    await world.settle()
    return daemon


def test_preempt_does_not_start_before_it_is_known_that_its_vm_could_read_it() -> None:
    """Its server has not noticed yet that the daemon is silent, and the other one knows nothing."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        await world.pass_time(20 * SECOND, daemon)
        await world.pass_time(13 * SECOND)
        assert event_of(world, "a").status == "Scheduled"
        daemon.unconfirmed_since = NOON + 20 * SECOND
        await world.pass_time(SECOND, daemon)
        daemon.unconfirmed_since = None
        await world.pass_time(SECOND, daemon)
        event = event_of(world, "a")
        assert 44 * SECOND <= event.not_before - NOON <= 46 * SECOND
        await world.pass_time(7 * SECOND, daemon)
        assert event_of(world, "a").status == "Scheduled"
        await world.pass_time(4 * SECOND, daemon)
        assert event_of(world, "a").status == "Started"

    run(test)


def test_first_request_after_a_silence_does_not_start_a_preempt() -> None:
    """Its daemon can say only with the next one for how long it had no answer."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        await world.pass_time(20 * SECOND, daemon)
        await world.pass_time(13 * SECOND)
        await daemon.work()
        await world.pass_time(SECOND)
        assert event_of(world, "a").status == "Scheduled"
        daemon.unconfirmed_since = NOON + 20 * SECOND
        await world.pass_time(SECOND, daemon)
        daemon.unconfirmed_since = None
        await world.pass_time(SECOND, daemon)
        assert 44 * SECOND <= event_of(world, "a").not_before - NOON <= 46 * SECOND

    run(test)


def test_first_request_at_another_server_does_not_start_a_preempt() -> None:
    """The daemon lost its server before any other one noticed that."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        await world.pass_time(20 * SECOND, daemon)
        await world.pass_time(13 * SECOND)
        daemon.server = world.servers[1]
        await daemon.work()
        await world.pass_time(SECOND)
        assert event_of(world, "a", server=1).status == "Scheduled"

    run(test)


def test_preempt_starts_although_its_daemon_sends_requests_rarely() -> None:
    """A busy server holds them for longer than a gap that counts."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        for _ in range(16):
            await world.pass_time(4 * SECOND)
            await daemon.work()
        assert event_of(world, "a").status == "Started"

    run(test)


def test_preempts_of_one_scope_start_in_time_with_daemons_at_different_servers() -> None:
    """Each server knows one of the hosts, and starts what it can tell."""

    async def test(world: World) -> None:
        daemons = [
            await world.daemon("host-a", web("a", 0), server=0),
            await world.daemon("host-b", web("b", 0), server=1),
        ]
        await polled(world, "web")
        now = world.clock.now().timestamp()
        for server in world.servers:
            server.board.polled.update({"a": now, "b": now})
        for name in ("a", "b"):
            assert await world.servers[0].operations.evict(name, by="ann")
        await world.pass_time(29 * SECOND, *daemons)
        assert {event.status for event in shown(world, "a").events} == {"Scheduled"}
        await world.pass_time(3 * SECOND, *daemons)
        assert {event.status for event in shown(world, "a").events} == {"Started"}

    run(test)


@pytest.mark.parametrize("server", [0, 1], ids=["same-server", "another-server"])
def test_preempt_is_made_up_if_its_daemon_is_killed_and_restarts(server: int) -> None:
    """Its guests could read nothing for 10 seconds, which no server has noticed."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        await world.pass_time(10 * SECOND, daemon)
        await world.pass_time(10 * SECOND)
        again = await world.daemon("host-a", reported("a"), session="s2", server=server)
        await world.pass_time(19 * SECOND, again)
        event = event_of(world, "a", server)
        assert event.status == "Scheduled"
        assert 40 * SECOND <= event.not_before - NOON <= 46 * SECOND
        await world.pass_time(8 * SECOND, again)
        assert event_of(world, "a", server).status == "Started"

    run(test)


def test_short_absence_of_a_host_is_still_known_after_an_outage_of_all_servers() -> None:
    """They may have been killed before they had stored it with an event."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("a"))
        await world.pass_time(10 * SECOND, daemon)
        await world.pass_time(10 * SECOND)
        again = await world.daemon("host-a", reported("a"), session="s2")
        short = again.server.hosts.contacts.gaps_of("host-a")
        assert [gap.until for gap in short] == [NOON + 20 * SECOND]
        for server in list(world.servers):
            await world.expire(server)
        await world.pass_time(5 * MINUTE)
        again.server = await join(world)
        await again.work()
        await world.settle()
        gaps = again.server.hosts.contacts.gaps_of("host-a")
        assert [gap.until for gap in gaps] == [NOON + 20 * SECOND, NOON + 5 * MINUTE + 20 * SECOND]
        assert gaps[:1] == short

    run(test)


def test_preempt_starts_in_time_while_its_daemon_is_in_contact() -> None:
    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        await world.pass_time(29 * SECOND, daemon)
        assert event_of(world, "a").status == "Scheduled"
        await world.pass_time(2 * SECOND, daemon)
        assert event_of(world, "a").status == "Started"

    run(test)


def test_preempt_whose_server_dies_right_before_is_started_by_another_one() -> None:
    """That one knows nothing of the host until its daemon continues there."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        await world.pass_time(28 * SECOND, daemon)
        await world.expire(world.servers[0])
        daemon.server = world.servers[1]
        await world.pass_time(4 * SECOND, daemon)
        assert event_of(world, "a", server=1).status == "Started"

    run(test)


def test_request_of_a_host_with_a_scheduled_preempt_is_held_for_a_short_time() -> None:
    """Each request shows that its guests can read."""

    async def test(world: World) -> None:
        daemon = await announce_preempt(world)
        held = asyncio.create_task(daemon.work(wait=True))
        await world.settle()
        await world.clock.advance(2 * SECOND)
        await world.settle()
        assert held.done()
        await held

    run(test)


def test_request_for_work_reads_the_events_of_a_scope_once() -> None:
    """Not for each VM: while another host has a Preempt, all of them are looked through."""

    async def work_with(world: World, host: str, size: int) -> int:
        names = [f"{host[-1]}-{number:04}" for number in range(size)]
        vms = (reported(each, scope=host, kind="availability-set") for each in names)
        daemon = await world.daemon(host, *vms)
        await polled(world, host)
        for name in names:
            assert await world.servers[0].operations.restart(name, by="ann")
        await world.settle()
        assert len(shown(world, names[0]).events) == size
        return await work_of(daemon.work())

    async def test(world: World) -> None:
        await announce_preempt(world)
        few = await work_with(world, "host-b", 20)
        assert await work_with(world, "host-c", 80) < 2 * few

    run(test)


def test_host_that_was_lost_with_its_server_is_away_since_then() -> None:
    """No server saw its daemon go silent: the lease of its server ended."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE, daemon)
        await world.expire(world.servers[0])
        await world.pass_time(10 * MINUTE)
        daemon.server = world.servers[1]
        await daemon.work()
        await world.settle()
        (gap,) = world.servers[1].hosts.contacts.gaps_of("host-a")
        assert gap == (NOON + MINUTE - TTL - UNNOTICED, NOON + 11 * MINUTE)
        not_before = event_of(world, "a", server=1).not_before
        assert not_before == NOON + 25 * MINUTE + TTL + UNNOTICED

    run(test)


async def lose_host_and_server(world: World) -> Daemon:
    """A host is cut off 24 seconds before NotBefore; its server dies before it has noticed that,
    and its lease ends a second before NotBefore.
    """
    daemon = await announce(world)
    await world.pass_time(15 * MINUTE - 24 * SECOND, daemon)
    await world.pass_time(23 * SECOND)
    await world.expire(world.servers[0])
    daemon.server = world.servers[1]
    return daemon


def test_event_does_not_start_before_it_is_known_that_its_host_was_in_contact() -> None:
    """The server that would have noticed the silence died: no other one knows of it yet."""

    async def test(world: World) -> None:
        daemon = await lose_host_and_server(world)
        await world.pass_time(31 * SECOND)
        assert event_of(world, "a", server=1).status == "Scheduled"
        daemon.unconfirmed_since = NOON + 15 * MINUTE - 24 * SECOND
        await world.pass_time(SECOND, daemon)
        daemon.unconfirmed_since = None
        await world.pass_time(SECOND, daemon)
        left = event_of(world, "a", server=1).not_before - (NOON + 15 * MINUTE)
        assert 54 * SECOND <= left <= 56 * SECOND

    run(test)


def test_host_that_restarts_after_its_server_died_was_away_for_the_longest_possible_time() -> None:
    """Nothing else can tell for how long its daemon had no server."""

    async def test(world: World) -> None:
        await lose_host_and_server(world)
        again = await world.daemon("host-a", reported("a"), session="s2", server=1)
        await world.pass_time(10 * SECOND, again)
        event = event_of(world, "a", server=1)
        assert event.status == "Scheduled"
        assert 23 * SECOND <= event.not_before - (NOON + 15 * MINUTE) <= 27 * SECOND

    run(test)


def test_only_the_server_of_a_host_knows_at_once_that_it_is_in_contact() -> None:
    """Another one must count with a silence that nobody has noticed, and with a lost server."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE, daemon)
        now, gap_min = world.clock.now(), 15 * SECOND
        first, second = (server.hosts.contacts for server in world.servers)
        assert first.known_until("host-a", "server-1", gap_min) >= now
        latest = now + gap_min - UNNOTICED - TTL
        assert second.known_until("host-a", "server-2", gap_min) <= latest
        assert second.known_until("host-a", "server-2", gap_min) >= now - MINUTE
        assert second.known_until("host-b", "server-2", gap_min) == now

    run(test)


async def join(world: World) -> Server:
    """Another server, which starts now."""
    server = Server(world.store, world.clock, "server-3", is_confirming=True)
    world.servers.append(server)
    await server.start()
    await world.settle()
    return server


def test_server_that_started_later_knows_since_when_a_host_is_away() -> None:
    """Another server was there when the host was lost with its server."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(2 * MINUTE, daemon)
        await world.expire(world.servers[0])
        await world.pass_time(10 * MINUTE)
        daemon.server = await join(world)
        await world.pass_time(3 * SECOND)
        await daemon.work()
        await world.settle()
        (gap,) = daemon.server.hosts.contacts.gaps_of("host-a")
        lost_at = NOON + 2 * MINUTE - TTL - UNNOTICED
        assert gap == (lost_at, NOON + 12 * MINUTE + 3 * SECOND)
        await world.pass_time(SECOND, daemon)
        for server in (1, 2):
            event = event_of(world, "a", server)
            assert event.not_before == NOON + 25 * MINUTE + 3 * SECOND + TTL + UNNOTICED

    run(test)


def test_loss_of_a_server_is_written_once_for_each_of_its_hosts_and_only_if_it_lasts() -> None:
    async def test(world: World) -> None:
        await join(world)
        daemon = await announce(world)
        other = await world.daemon("host-b", reported("b"))
        await world.pass_time(MINUTE, daemon, other)
        written = list[tuple[str, datetime | None]]()
        world.servers[1].engine.on_change(
            "hostd", lambda before, after: written.append((after.host, after.away_since))
        )
        await world.expire(world.servers[0])
        await world.pass_time(4 * SECOND)
        other.server = world.servers[1]
        await world.pass_time(10 * SECOND, other)
        assert set(written) == {("host-b", None)}
        await world.pass_time(MINUTE, other)
        away = [each for each in written if each != ("host-b", None)]
        assert away == [("host-a", NOON + MINUTE - TTL - UNNOTICED)]

    run(test)


def test_host_that_was_lost_when_no_server_was_left_is_away_since_its_server_was_alive() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.expire(world.servers[1])
        await world.pass_time(2 * MINUTE, daemon)
        await world.expire(world.servers[0])
        await world.pass_time(20 * SECOND)
        daemon.server = await join(world)
        await world.pass_time(10 * MINUTE)
        await daemon.work()
        await world.settle()
        ((since, until),) = daemon.server.hosts.contacts.gaps_of("host-a")
        lost_at = NOON + 2 * MINUTE - UNNOTICED
        assert lost_at - 10 * SECOND <= since <= lost_at
        assert until == NOON + 12 * MINUTE + 20 * SECOND

    run(test)


def test_host_that_was_lost_before_a_server_died_too_is_away_since_then() -> None:
    """The other server died before it wrote when that was: the earliest time counts."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(2 * MINUTE, daemon)
        await world.expire(world.servers[0])
        await world.pass_time(12 * SECOND)
        await world.expire(world.servers[1])
        daemon.server = await join(world)
        await world.pass_time(10 * SECOND)
        await daemon.work()
        await world.settle()
        ((since, _),) = daemon.server.hosts.contacts.gaps_of("host-a")
        assert NOON + MINUTE <= since <= NOON + 2 * MINUTE - TTL

    run(test)


def test_restart_of_the_only_server_changes_no_document() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.expire(world.servers[1])
        await world.pass_time(2 * MINUTE, daemon)
        before = shown(world, "a")
        await world.expire(world.servers[0])
        await world.pass_time(4 * SECOND)
        daemon.server = await join(world)
        await world.pass_time(MINUTE, daemon)
        assert shown(world, "a", server=2) == before

    run(test)


def test_restart_of_the_only_server_at_not_before_starts_the_event_as_it_is() -> None:
    """Its first tick comes before the daemon is back, and knows nothing of the host."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.expire(world.servers[1])
        await world.pass_time(15 * MINUTE - 2 * SECOND, daemon)
        await world.expire(world.servers[0])
        await world.pass_time(3 * SECOND)
        daemon.server = await join(world)
        await world.pass_time(SECOND)
        assert event_of(world, "a", server=2).status == "Scheduled"
        await world.pass_time(4 * SECOND, daemon)
        event = event_of(world, "a", server=2)
        assert (event.status, event.not_before) == ("Started", NOON + 15 * MINUTE)

    run(test)


def test_daemon_that_changes_servers_at_not_before_was_not_away() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(15 * MINUTE - 2 * SECOND, daemon)
        await world.expire(world.servers[0])
        await world.pass_time(4 * SECOND)
        daemon.server = world.servers[1]
        await world.pass_time(4 * SECOND, daemon)
        event = event_of(world, "a", server=1)
        assert (event.status, event.not_before) == ("Started", NOON + 15 * MINUTE)

    run(test)


def test_server_that_was_cut_off_dates_what_was_lost_meanwhile_from_then() -> None:
    """It sees that a lease has ended only when it reaches the store again."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(2 * MINUTE, daemon)
        cut_off = Server(world.store, world.clock, "server-3")
        await cut_off.engine.load()
        cut_off.engine.stale_since = world.clock.now()
        await world.pass_time(MINUTE, daemon)
        await world.expire(world.servers[0])
        await cut_off.engine.load()
        assert cut_off.hosts.contacts.away_since("host-a") == NOON + 2 * MINUTE

    run(test)


def test_vm_that_never_polls_does_not_delay_its_event() -> None:
    """Nobody would read it when the host is back, either."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("a"))
        await world.servers[0].operations.maintain("host-a", type=REBOOT, by="ann")
        await world.pass_time(MINUTE, daemon)
        await world.pass_time(15 * MINUTE)
        assert event_of(world, "a").status == "Started"

    run(test)


def test_silent_vm_of_a_scope_that_is_polled_does_not_delay_its_event() -> None:
    """Only the VM that polls would have read its event."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", web("a", 0))
        second = await world.daemon("host-b", web("b", 1))
        world.servers[0].board.polled["a"] = world.clock.now().timestamp()
        await world.poll("web")
        for host in ("host-a", "host-b"):
            await world.servers[0].operations.maintain(host, type=REBOOT, by="ann")
        await world.pass_time(MINUTE, first, second)
        await world.pass_time(15 * MINUTE)
        started = {event.resources: event.status.value for event in shown(world, "a").events}
        assert started == {("a",): "Scheduled", ("b",): "Started"}

    run(test)


def test_host_that_is_away_does_not_stop_the_maintenance_of_others() -> None:
    """An event that cannot be read holds no other update domain."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", web("a", 0))
        second = await world.daemon("host-b", web("b", 1))
        await world.poll("web")
        now = world.clock.now().timestamp()
        for server in world.servers:
            server.board.polled.update({"a": now, "b": now})
        for host in ("host-a", "host-b"):
            await world.servers[0].operations.maintain(host, type=REBOOT, by="ann")
        await world.pass_time(MINUTE, first, second)
        await world.pass_time(15 * MINUTE, second)
        started = {event.resources: event.status.value for event in shown(world, "a").events}
        assert started == {("a",): "Scheduled", ("b",): "Started"}

    run(test)


def test_time_in_which_the_relay_got_no_answer_is_not_notice() -> None:
    """The daemon is in contact with a control API, but its guests could read nothing."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(5 * MINUTE, daemon)
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(20 * MINUTE, daemon)
        for server in (0, 1):
            event = event_of(world, "a", server)
            assert event.status == "Scheduled"
            assert event.unreadable_since is not None
            assert abs(event.unreadable_since - (NOON + 5 * MINUTE)) <= SECOND
        assert not world.servers[0].is_unreachable("host-a")

        daemon.unconfirmed_since = None
        await world.pass_time(SECOND, daemon)
        event = event_of(world, "a")
        assert event.unreadable_since is None
        assert 35 * MINUTE - SECOND <= event.not_before - NOON <= 35 * MINUTE + 2 * SECOND
        await world.pass_time(9 * MINUTE, daemon)
        assert event_of(world, "a").status == "Scheduled"
        await world.pass_time(MINUTE + 3 * SECOND, daemon)
        assert event_of(world, "a").status == "Started"

    run(test)


def test_libvirt_that_does_not_answer_leaves_not_before_as_it_is() -> None:
    """Nothing can be done to the VM, but it can read."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        before = shown(world, "a")
        daemon.problem = "libvirt does not answer"
        await world.pass_time(14 * MINUTE, daemon)
        assert world.servers[0].is_unreachable("host-a")
        assert shown(world, "a") == before
        daemon.problem = ""
        await world.pass_time(MINUTE + 2 * SECOND, daemon)
        event = event_of(world, "a")
        assert (event.status, event.not_before) == ("Started", NOON + 15 * MINUTE)

    run(test)


def test_host_without_answers_is_written_only_when_that_begins_and_ends() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        since = list[datetime | None]()
        world.servers[0].engine.on_change(
            "hostd", lambda before, after: since.append(after.unconfirmed_since)
        )
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(2 * SECOND, daemon)
        assert since == []
        await world.pass_time(40 * SECOND, daemon)
        assert since == [NOON]
        daemon.unconfirmed_since = None
        await world.pass_time(10 * SECOND, daemon)
        assert since == [NOON, None]
        ((start, end),) = world.servers[1].hosts.contacts.gaps_of("host-a")
        assert (start, end) == (NOON, NOON + 42 * SECOND)

    run(test)


def test_short_time_without_answers_changes_no_document() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        before = shown(world, "a")
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(10 * SECOND, daemon)
        daemon.unconfirmed_since = None
        await world.pass_time(MINUTE, daemon)
        assert shown(world, "a") == before

    run(test)


def test_host_that_is_lost_while_it_gets_no_answers_has_one_gap() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(MINUTE, daemon)
        await world.pass_time(MINUTE)  # its server notices that
        daemon.unconfirmed_since = None
        await world.pass_time(SECOND, daemon)
        assert world.servers[0].hosts.contacts.gaps_of("host-a") == ((NOON, NOON + 2 * MINUTE),)
        assert event_of(world, "a").not_before == NOON + 17 * MINUTE

    run(test)


def test_host_that_returns_and_gets_no_answers_has_still_the_same_gap() -> None:
    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(MINUTE)
        daemon.unconfirmed_since = world.clock.now() - 5 * SECOND
        await world.pass_time(MINUTE, daemon)
        assert world.servers[0].hosts.contacts.away_since("host-a") == NOON
        daemon.unconfirmed_since = None
        await world.pass_time(SECOND, daemon)
        assert event_of(world, "a").not_before == NOON + 17 * MINUTE

    run(test)


def test_vm_that_cannot_poll_for_a_day_keeps_its_notice() -> None:
    """It does not poll because its host is away: that does not make it a VM that never polls."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        await world.pass_time(16 * MINUTE)
        for _ in range(27):
            await world.clock.advance(60 * MINUTE)
        await world.settle()
        assert event_of(world, "a").status == "Scheduled"
        await daemon.work()
        await world.settle()
        event = event_of(world, "a")
        assert event.status == "Scheduled"
        assert event.not_before - world.clock.now() >= 14 * MINUTE

    run(test)


async def cut_off_for_a_day(world: World) -> Daemon:
    """The daemon of host-a, which is away since 26 hours. Its VM polled until then."""
    daemon = await world.daemon("host-a", reported("a"))
    await polled(world, "a")
    await world.pass_time(30 * SECOND, daemon)
    for _ in range(26):
        await world.clock.advance(60 * MINUTE)
    await world.settle()
    return daemon


async def assert_has_its_notice_after(world: World, daemon: Daemon) -> None:
    """The daemon is back now, and the VM has 15 minutes from now on to read its event."""
    await daemon.work(inventory=daemon.inventory)
    await world.settle()
    assert event_of(world, "a").unreadable_since is None
    await world.pass_time(15 * MINUTE - SECOND, daemon)
    assert event_of(world, "a").status == "Scheduled"
    await world.pass_time(4 * SECOND, daemon)
    assert event_of(world, "a").status == "Started"


def test_restart_that_is_requested_after_a_day_without_the_host_is_announced() -> None:
    """Its VM has not polled for a day because it could not: it is not one that never polls."""

    async def test(world: World) -> None:
        daemon = await cut_off_for_a_day(world)
        assert await world.servers[0].operations.restart("a", by="ann")
        await world.pass_time(20 * MINUTE)
        await assert_has_its_notice_after(world, daemon)

    run(test)


def test_maintenance_that_is_announced_after_a_day_without_the_host_waits_for_it() -> None:
    async def test(world: World) -> None:
        daemon = await cut_off_for_a_day(world)
        assert await world.servers[0].operations.maintain("host-a", type=REBOOT, by="ann")
        await world.pass_time(20 * MINUTE)
        await assert_has_its_notice_after(world, daemon)

    run(test)


def test_restart_that_is_requested_when_the_host_returns_after_a_day_is_announced() -> None:
    """Its VM may not have polled again in the second after the return."""

    async def test(world: World) -> None:
        daemon = await cut_off_for_a_day(world)
        await daemon.work(inventory=daemon.inventory)
        await world.settle()
        assert not world.servers[0].is_unreachable("host-a")
        assert await world.servers[0].operations.restart("a", by="ann")
        left = event_of(world, "a").not_before - world.clock.now()
        assert 15 * MINUTE <= left <= 15 * MINUTE + SECOND
        await world.pass_time(20 * MINUTE)  # without its host again
        await assert_has_its_notice_after(world, daemon)

    run(test)


def test_hour_after_an_absence_is_one_in_which_the_host_was_in_contact() -> None:
    """It was back for seconds after a day, and is away again: its VM may not have polled."""

    async def test(world: World) -> None:
        daemon = await cut_off_for_a_day(world)
        away_since = world.servers[0].hosts.contacts.away_since("host-a")
        await daemon.work(inventory=daemon.inventory)
        await world.pass_time(20 * SECOND, daemon)
        await world.pass_time(70 * MINUTE)
        contacts = world.servers[0].hosts.contacts
        assert contacts.away_since("host-a") != contacts.silent_since("host-a") == away_since
        assert await world.servers[0].operations.restart("a", by="ann")
        await assert_has_its_notice_after(world, daemon)

    run(test)


def test_absence_of_a_wrong_clock_is_none() -> None:
    """It would end in days, and began long ago."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("a"))
        server, wrong = world.servers[0], Gap(NOON - 100 * HOUR, NOON + 240 * HOUR)

        def decide(transaction: Transaction) -> None:
            known: ManagedHost | None = transaction.get(key)
            assert known is not None
            transaction.put(key, replace(known, gaps=(wrong,)))

        key = HOST_KEY.format("host-a")
        await server.engine.update([key], decide, by="test")
        assert server.hosts.contacts.silent_since("host-a") is None

    run(test)


def test_vm_that_does_not_poll_for_an_hour_after_a_day_without_its_host_is_restarted_at_once() -> (
    None
):
    """It could: nobody would read its event."""

    async def test(world: World) -> None:
        daemon = await cut_off_for_a_day(world)
        await daemon.work(inventory=daemon.inventory)
        await world.pass_time(61 * MINUTE, daemon)
        assert await world.servers[0].operations.restart("a", by="ann") is None

    run(test)


def test_vm_of_a_polled_scope_gets_its_notice_after_a_day_without_its_host() -> None:
    """The other VM of the scope polls all the time; this one polled until its host was away."""

    async def test(world: World) -> None:
        first = await world.daemon("host-a", web("a", 0))
        second = await world.daemon("host-b", web("b", 1))
        polls = world.servers[0].board.polled
        polls.update(dict.fromkeys("ab", NOON.timestamp()))
        await polled(world, "web")
        await world.pass_time(30 * SECOND, first, second)
        for _ in range(26):
            await world.clock.advance(60 * MINUTE)
        polls["b"] = world.clock.now().timestamp()
        await polled(world, "web")
        await second.work()
        assert await world.servers[0].operations.restart("a", by="ann")
        await world.pass_time(20 * MINUTE, second)
        assert event_of(world, "a").status == "Scheduled"
        await world.pass_time(10 * SECOND, first, second)
        left = event_of(world, "a").not_before - world.clock.now()
        assert 14 * MINUTE <= left <= 15 * MINUTE

    run(test)


def test_vm_that_never_polled_is_restarted_at_once_although_its_host_is_away() -> None:
    """Nobody would read its event when the host is back."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("a"))
        await world.pass_time(MINUTE)
        assert await world.servers[0].operations.restart("a", by="ann") is None

    run(test)


def test_vm_of_a_host_that_was_forgotten_is_restarted_at_once_if_it_does_not_poll() -> None:
    """It asks the servers since then, and had an hour to do it."""

    async def test(world: World) -> None:
        await cut_off_for_a_day(world)
        headers = {"authorization": f"Bearer fw_root_{world.secret}"}
        url = "/api/v1/hosts/host-a/daemon?still_running=true"
        response = await world.servers[0].client.delete(url, headers=headers)
        assert response.status_code == 200, response.text
        await world.clock.advance(61 * MINUTE)
        assert await world.servers[0].operations.restart("a", by="ann") is None

    run(test)


def test_looking_for_gaps_reads_no_polls_while_no_host_was_away() -> None:
    """It is done at every change of a scope, which may have 1,000 VMs and 100 events."""

    async def test(world: World) -> None:
        daemon = await announce(world)
        server = world.servers[0]
        readings = list[str]()
        times = server.engine.last_polls.times

        def count(scope: Scope) -> dict[str, int]:
            readings.append(scope.name)
            return times(scope)

        vars(server.engine.last_polls)["times"] = count
        await world.pass_time(MINUTE, daemon)
        assert readings == []
        await world.pass_time(MINUTE)
        await daemon.work()
        await world.settle()
        assert readings

    run(test)


def test_damaged_record_of_a_host_does_not_stop_the_others() -> None:
    """It can be decoded: a time without a zone compares with no other."""

    async def test(world: World) -> None:
        await announce(world)
        await world.daemon("host-b", reported("b"))
        await world.pass_time(10 * SECOND)
        key = HOST_KEY.format("host-b")
        record = await world.store.get(key)
        assert record.value is not None
        damaged = re.sub(rb'("since":"[^"]*)Z"', rb'\1"', record.value)
        for server in world.servers:
            await server.stop()
        await world.store.commit([Write(key, damaged, record.revision)])
        later = Server(world.store, world.clock, "server-9", is_confirming=True)
        await later.start()
        await world.pass_time(30 * SECOND)
        assert not later.has_ended
        lost = later.hosts.managed.find("host-a")
        assert lost is not None
        assert lost.away_since is not None
        await later.stop()

    run(test)


async def poll(server: Server, vm: str) -> None:
    """As the metadata application does."""
    now, published = server.engine.clock.now().timestamp(), server.board.vms[vm]
    server.board.polled[vm] = now
    if server.engine.last_polls.must_store(published, vm, now):
        await server.engine.seen(published)


async def announce_for_the_second(world: World) -> Daemon:
    """VM b, which began to poll when its scope had been polled for minutes, is to be restarted.

    Its host, host-b, is away a minute later. Returns the daemon of host-a.
    """
    first, server = await world.daemon("host-a", web("a", 0)), world.servers[0]
    await poll(server, "a")
    await world.settle()
    await world.pass_time(5 * MINUTE, first)
    second = await world.daemon("host-b", web("b", 1))
    await world.pass_time(SECOND, first, second)
    await poll(server, "b")
    await world.settle()
    assert await server.operations.restart("b", by="ann")
    for _ in range(60):
        await poll(server, "a")
        await poll(server, "b")
        await world.pass_time(SECOND, first, second)
    return first


def test_all_servers_know_that_a_vm_polls_whose_scope_was_polled_before() -> None:
    """Else each of them writes what the other one does not know, in turns."""

    async def test(world: World) -> None:
        first = await announce_for_the_second(world)
        before = (await world.store.get("none")).revision
        for _ in range(10):
            await poll(world.servers[0], "a")
            await world.pass_time(MINUTE, first)
        assert (await world.store.get("none")).revision - before < 10 * 60, "commits"
        for number in (0, 1):
            event = event_of(world, "b", number)
            assert event.status == "Scheduled"
            assert event.unreadable_since is not None
        await world.pass_time(10 * MINUTE, first)
        assert event_of(world, "b").status == "Scheduled"

    run(test)


def test_server_that_starts_knows_that_a_vm_polls_whose_scope_was_polled_before() -> None:
    """Its host is cut off: it must not be rebooted when that returns."""

    async def test(world: World) -> None:
        await world.expire(world.servers[1])
        first = await announce_for_the_second(world)
        await world.pass_time(10 * SECOND, first)
        await world.expire(world.servers[0])
        first.server = await join(world)
        await world.pass_time(15 * MINUTE, first)
        event = event_of(world, "b", 2)
        assert event.status == "Scheduled"
        assert event.unreadable_since is not None

    run(test)


def test_server_that_does_not_know_of_a_poll_believes_the_one_that_does() -> None:
    """The record of the poll may be late, or the store may have refused it."""

    async def test(world: World) -> None:
        first = await announce_for_the_second(world)
        world.servers[1].engine.records.set("polled/web/", {}, 0)
        await world.pass_time(30 * SECOND, first)
        assert event_of(world, "b", 1).unreadable_since is not None
        assert not [entry for entry in await world.history("updated") if "again" in entry.detail]

    run(test)
