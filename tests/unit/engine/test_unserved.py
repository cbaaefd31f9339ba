"""A VM that asks for its document and does not get it is shown, on every server, and once."""

from datetime import timedelta
from typing import Any

import msgspec

from forewarn.core.command import SetMembers
from forewarn.core.fleet import DEFAULT_POLICY, ScopeKind, Vm
from forewarn.engine import unserved
from forewarn.engine.unserved import UNSERVED_KEY, Unserved, UnservedReason
from forewarn.platform.remote import RefusalReason, RefusedGuest, WorkRequest
from forewarn.store.base import Write
from tests.unit.engine.hostd_world import NOON, SECOND, Daemon, Server, World, reported, run, vm_id
from tests.work_count import work_of

ERRORS, MOVED = UnservedReason.ERRORS, UnservedReason.MOVED


async def look(world: World, seconds: int, *alive: Daemon, each: Any = lambda: None) -> None:
    """Let time pass. All servers look every five seconds, as they do when they run."""
    for number in range(seconds):
        each()
        await world.pass_time(SECOND, *alive)
        if number % 5 == 4:
            for server in world.servers:
                await server.hosts.unserved.look()
            await world.settle()


def poll(server: Server, vm: str) -> None:
    server.board.polled[vm] = server.engine.clock.now().timestamp()


def fail(server: Server, vm: str = "web-0") -> None:
    server.hosts.unserved.add_error(vm, 400, "no header")


def found(world: World, vm: str = "web-0") -> list[Unserved | None]:
    """As each server shows it."""
    return [
        server.hosts.unserved.find(server.board.vms[vm].scope.name, vm) for server in world.servers
    ]


def follow_writes(world: World) -> list[Any]:
    """The records that are written from now on."""
    writes: list[Any] = []
    world.servers[0].engine.on_change("unserved", lambda before, after: writes.append(after))
    return writes


def test_vm_that_gets_only_errors_for_a_minute_is_shown_by_all_servers() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first = world.servers[0]
        await look(world, 55, daemon, each=lambda: fail(first))
        assert found(world) == [None, None]
        await look(world, 10, daemon, each=lambda: fail(first))

        one, other = found(world)
        assert one == other
        assert one is not None
        assert (one.since, one.reason, one.detail) == (NOON, ERRORS, "status 400, no header")
        assert [server.hosts.unserved.counts()[ERRORS] for server in world.servers] == [1, 1]
        (entry,) = await world.history("unserved")
        assert (entry.vm, entry.host, entry.scope) == ("web-0", "host-a", "web-0")
        assert entry.detail == (
            "has received only errors since 2030-01-31T12:00:00Z: status 400, no header"
        )

    run(test)


def test_nothing_is_written_while_nothing_changes() -> None:
    """An agent polls each second, for days."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first = world.servers[0]
        await look(world, 70, daemon, each=lambda: fail(first))
        writes = follow_writes(world)
        await look(world, 120, daemon, each=lambda: fail(first))

        assert writes == []

    run(test)


def test_one_document_in_between_means_that_the_vm_is_served() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first = world.servers[0]
        await look(world, 40, daemon, each=lambda: fail(first))
        poll(first, "web-0")
        await look(world, 44, daemon, each=lambda: fail(first))
        assert await world.history("unserved") == []
        assert found(world) == [None, None]

    run(test)


def test_vm_that_polls_at_another_server_is_not_shown() -> None:
    """A balancer may send every other request to a server that cannot answer it."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first, second = world.servers

        def poll_both() -> None:
            fail(first)
            poll(second, "web-0")

        await look(world, 120, daemon, each=poll_both)
        assert found(world) == [None, None]
        assert await world.history("unserved", "served") == []
        writes = follow_writes(world)
        await look(world, 120, daemon, each=poll_both)
        assert writes == [], "a suspicion that was wrong is not repeated"

    run(test)


def test_vm_that_gets_its_document_again_is_served() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first, second = world.servers
        await look(world, 70, daemon, each=lambda: fail(first))
        poll(second, "web-0")
        await look(world, 5, daemon)

        assert found(world) == [None, None]
        (entry,) = await world.history("served")
        assert (entry.vm, entry.detail) == ("web-0", "it got its document")
        assert first.hosts.unserved.counts() == {ERRORS: 0, MOVED: 0}

    run(test)


def test_vm_that_is_shut_down_is_not_shown_any_more() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await look(world, 70, daemon, each=lambda: fail(world.servers[0]))
        await daemon.report(reported("web-0", power="stopped"))
        await look(world, 5, daemon)

        assert found(world) == [None, None]
        (entry,) = await world.history("served")
        assert entry.detail == "it does not run"

    run(test)


def test_record_of_a_vm_that_has_left_the_fleet_is_deleted() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await look(world, 70, daemon, each=lambda: fail(world.servers[0]))
        await daemon.report()
        await look(world, 5, daemon)

        (engine,) = {server.engine for server in world.servers[:1]}
        assert list(engine.records.values("unserved")) == []

    run(test)


def test_guest_that_the_daemon_of_its_host_refuses_is_shown_with_the_reason() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        refused = {"guest": vm_id("web-0"), "reason": "no-server", "seconds": 300}
        for _ in range(3):
            await daemon.work(refused=[refused])
            await look(world, 5)

        shown, _ = found(world)
        assert shown is not None
        assert shown.reason is ERRORS
        assert shown.detail == (
            "the daemon of host-a refuses its polls because no server answers that host"
        )

    run(test)


def test_guest_that_asks_the_host_it_has_left_is_recognized_by_its_address() -> None:
    """That host has no VM at the port of the request."""

    async def test(world: World) -> None:
        old = await world.daemon("host-a")
        vm = reported("web-0", addresses=["10.0.0.7"])
        await world.daemon("host-b", vm)
        refused = {"guest": "10.0.0.7", "reason": "not-a-vm", "seconds": 60}
        for _ in range(4):
            await old.work(refused=[refused])
            await look(world, 5)

        shown, _ = found(world)
        assert shown is not None
        assert shown.detail == (
            "the daemon of host-a refuses its polls because it is not a VM of that host"
        )

    run(test)


def test_vm_that_a_host_names_twice_counts_by_its_id() -> None:
    """Another guest of the host may use its address."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", addresses=["10.0.0.7"]))
        itself = {"guest": vm_id("web-0"), "reason": "no-server", "seconds": 60}
        address = {"guest": "10.0.0.7", "reason": "not-a-vm", "seconds": 1}
        for _ in range(4):
            await daemon.work(refused=[itself, address])
            await look(world, 5)

        shown, _ = found(world)
        assert shown is not None
        assert shown.detail == (
            "the daemon of host-a refuses its polls because no server answers that host"
        )

    run(test)


async def move(world: World) -> Daemon:
    """`web-0` moves from host-a to host-b; the daemon that has it then."""
    old = await world.daemon("host-a", reported("web-0"))
    await world.daemon("host-b", reported("web-0"))
    await old.report()
    assert world.servers[0].vm("web-0").host == "host-b"
    (moved,) = await world.history("moved")
    assert (moved.host_before, moved.host) == ("host-a", "host-b")
    new = Daemon(world, "host-b")
    new.inventory = {"memory_bytes": 1, "vms": [reported("web-0")]}
    return new


def test_vm_that_polled_before_a_move_and_not_after_it_is_shown() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        poll(world.servers[0], "web-0")
        await world.pass_time(SECOND)
        daemon = await move(world)
        await look(world, 55, daemon)
        assert found(world) == [None, None]
        await look(world, 10, daemon)

        shown, other = found(world)
        assert shown == other
        assert shown is not None
        assert shown.reason is MOVED
        (entry,) = await world.history("unserved")
        assert entry.detail == (
            "has not polled since 2030-01-31T12:00:01Z:"
            " it polled before it moved from host-a to host-b"
        )
        poll(world.servers[1], "web-0")
        await look(world, 5, daemon)
        assert found(world) == [None, None]

    run(test)


def test_two_servers_do_not_replace_the_reasons_of_each_other() -> None:
    """One has seen the move, the other gets the errors: each time would be in the history."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first, second = world.servers
        moved = Unserved(NOON, MOVED, "it polled before it moved")

        def each() -> None:
            vars(first.hosts.unserved)["_moved"]["web-0"] = moved
            fail(second)

        await look(world, 120, daemon, each=each)
        assert [each and each.reason for each in found(world)] == [ERRORS, ERRORS]
        assert len(await world.history("unserved", "served")) <= 2

    run(test)


def test_vm_that_polls_after_a_move_is_not_shown() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        poll(world.servers[0], "web-0")
        await world.pass_time(SECOND)
        daemon = await move(world)
        await look(world, 30, daemon)
        poll(world.servers[1], "web-0")
        await look(world, 60, daemon)

        assert await world.history("unserved") == []

    run(test)


def test_vm_that_never_polled_is_not_expected_to_poll_after_a_move() -> None:
    async def test(world: World) -> None:
        daemon = await move(world)
        await look(world, 90, daemon)

        assert await world.history("unserved") == []

    run(test)


def test_what_a_daemon_reports_is_forgotten_with_its_session() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await daemon.work(refusals={"not-a-vm": 3, "in-doubt": 1})
        hosts = world.servers[0].hosts
        assert hosts.unserved.refusals == {"host-a": {"not-a-vm": 3, "in-doubt": 1}}

        await world.pass_time(timedelta(seconds=20))

        assert hosts.unserved.refusals == {}

    run(test)


def test_a_request_names_a_limited_number_of_guests_and_only_known_reasons() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        one = {"guest": vm_id("web-0"), "reason": "no-server", "seconds": 300}
        assert (await daemon.send(refused=[one] * 101)).status_code == 400
        assert (await daemon.send(refusals={"because": 1})).status_code == 400

    run(test)


def test_what_is_remembered_has_a_limit() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        known = world.servers[0].hosts.unserved
        for number in range(unserved.VMS_MAX + 10):
            known.add_error(f"vm-{number}", 503, "away")
        assert len(known._errors) == unserved.VMS_MAX

        guests = [RefusedGuest("unknown", RefusalReason.NO_SERVER, 99)]
        known.report("host-a", WorkRequest("s1", "m1", refused=guests))
        await known.look()
        assert found(world) == [None, None]

    run(test)


def test_damaged_record_does_not_stop_the_others() -> None:
    """It can be decoded: a time without a zone compares with no other."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"), reported("web-1"))
        states = {"web-1": {"since": "2030-01-31T11:00:00", "reason": "errors", "detail": "x"}}
        states["web-1"]["suspected_at"] = "2030-01-31T11:01:00"
        record = msgspec.json.encode({"format": 1, "value": states})
        await world.store.commit([Write(UNSERVED_KEY.format("web-1"), record, 0)])
        await look(world, 65, daemon, each=lambda: fail(world.servers[0]))
        assert all(each is not None for each in found(world))

    run(test)


def test_other_servers_have_ten_seconds_to_object() -> None:
    """A host reports a guest that was refused for minutes; it polls at another server."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        first, second = world.servers
        refused = {"guest": vm_id("web-0"), "reason": "no-server", "seconds": 300}
        poll(second, "web-0")
        for _ in range(2):
            await daemon.work(refused=[refused])
            await first.hosts.unserved.look()
            await world.pass_time(5 * SECOND)
        assert found(world) == [None, None]
        await second.hosts.unserved.look()
        await world.settle()
        assert await world.history("unserved", "served") == []

    run(test)


def test_work_of_a_look_grows_with_the_unserved_vms_and_not_with_their_square() -> None:
    """Each VM of a large scope may get errors, and every server looks every five seconds."""

    async def test(world: World) -> None:
        server, works = world.servers[0], list[int]()
        for count in (50, 400):
            scope = f"web-{count}"
            vms = tuple(Vm(f"{scope}-{number}") for number in range(count))
            members = SetMembers(kind=ScopeKind.SCALE_SET, policy=DEFAULT_POLICY, vms=vms)
            await server.engine.submit(scope, members, "test")
            for _ in range(2):
                for vm in vms:
                    fail(server, vm.name)
                await world.clock.advance(50 * SECOND)
            works.append(await work_of(server.hosts.unserved.look()))
            for vm in vms:
                poll(server, vm.name)
            await server.hosts.unserved.look()
        assert works[1] < 12 * works[0], "for eight times as many VMs"

    run(test)
