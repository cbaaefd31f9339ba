"""What is wrong with a host, a VM or an impact is said with the reason, by every server."""

from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from forewarn.core.event import EventType, ImpactState
from forewarn.engine.inventory import NOT_ACCEPTED_LENGTH_MAX, NOT_ACCEPTED_MAX
from tests.unit.engine.hostd_world import NOON, SECOND, World, reported, run

AWAY = "its daemon has been away since 2030-01-31T12:00:00Z"


async def get(world: World, path: str, server: int = 0) -> Any:
    headers = {"authorization": f"Bearer fw_root_{world.secret}"}
    response = await world.servers[server].client.get(f"/api/v1/{path}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def lose(world: World) -> None:
    """The only daemon sends nothing more."""
    await world.pass_time(timedelta(seconds=20))


def test_healthy_hosts_and_vms_have_no_problems() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        assert (await get(world, "hosts/host-a"))["problems"] == []
        assert (await get(world, "vms/web-0"))["problems"] == []

    run(test)


def test_unreachable_host_has_the_reason_and_so_have_its_vms() -> None:
    """A VM of a dead host is shown as it was reported last: that must not look healthy."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await lose(world)
        for server in (0, 1):
            (host,) = (await get(world, "hosts", server))["hosts"]
            (vm,) = (await get(world, "vms", server))["vms"]

            assert host["state"] == "unreachable"
            assert host["problems"] == [{"code": "unreachable", "message": AWAY}]
            assert vm["power"] == "running"
            assert vm["problems"] == [
                {
                    "code": "host-unreachable",
                    "message": f"its host host-a is unreachable: {AWAY}",
                }
            ]

    run(test)


def test_loss_of_a_daemon_has_one_time_everywhere() -> None:
    """The time of its last contact: not when a server noticed, nor since when its relay got no
    response.
    """

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(timedelta(seconds=30), daemon)
        await lose(world)
        last = "2030-01-31T12:00:29Z"
        away = f"its daemon has been away since {last}"
        for server in (0, 1):
            host = await get(world, "hosts/host-a", server)
            (vm,) = (await get(world, "vms", server))["vms"]
            assert [each["message"] for each in host["problems"]] == [away]
            assert host["daemon"] == {"is_connected": False, "since": last, "problem": away}
            assert [each["message"] for each in vm["problems"]] == [
                f"its host host-a is unreachable: {away}"
            ]
        entry = (await world.history("updated"))[-1]
        assert entry.detail == f"daemon of host-a unreachable: no contact since {last}"
        managed = world.servers[0].hosts.managed
        assert world.servers[0].hosts.contacts.away_since("host-a") == NOON
        assert managed.find("host-a").gaps == ()  # type: ignore[union-attr]

        daemon.unconfirmed_since = None
        await daemon.work()
        (gap,) = managed.find("host-a").gaps  # type: ignore[union-attr]
        assert gap == (NOON, NOON + timedelta(seconds=50))

    run(test)


NO_RESPONSE = "guests there have had no response from a metadata server since 2030-01-31T12:00:00Z"


def test_host_whose_relay_reaches_no_metadata_server_is_shown_with_the_reason() -> None:
    """Its daemon is connected, so nothing else shows that its guests cannot read."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        daemon.unconfirmed_since = world.clock.now()
        since = (await get(world, "hosts/host-a"))["daemon"]["since"]
        await world.pass_time(timedelta(seconds=30), daemon)
        for server in (0, 1):
            host = await get(world, "hosts/host-a", server)
            assert (host["state"], host["daemon"]["since"]) == ("connected", since)
            assert host["problems"] == [{"code": "metadata-unreachable", "message": NO_RESPONSE}]
        await lose(world)
        host = await get(world, "hosts/host-a")
        assert [each["code"] for each in host["problems"]] == ["unreachable"]
        await daemon.work()
        assert [each["code"] for each in (await get(world, "hosts/host-a"))["problems"]] == [
            "metadata-unreachable"
        ]

        daemon.unconfirmed_since = None
        await daemon.work()
        await world.settle()
        assert (await get(world, "hosts/host-a", server=1))["problems"] == []

    run(test)


def test_history_says_when_guests_of_a_host_get_no_response_and_when_they_do_again() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(timedelta(seconds=30), daemon)
        daemon.unconfirmed_since = None
        await daemon.work()
        await daemon.work()
        entries = [entry for entry in await world.history("updated") if "guests" in entry.detail]
        assert [(entry.host, entry.detail) for entry in entries] == [
            ("host-a", f"guests of host-a {NO_RESPONSE.removeprefix('guests there ')}"),
            ("host-a", "guests of host-a no longer wait for a response from a metadata server"),
        ]

    run(test)


def test_daemon_without_a_bridge_gets_no_problem_when_no_metadata_server_responds() -> None:
    """Its guests ask the servers, so what its relay can reach says nothing about them."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        daemon.relays = False
        await daemon.work()
        daemon.unconfirmed_since = world.clock.now()
        await world.pass_time(timedelta(seconds=30), daemon)
        assert (await get(world, "hosts/host-a"))["problems"] == []
        entries = await world.history("updated")
        assert [entry.detail for entry in entries if "guests" in entry.detail] == []

    run(test)


def test_waiting_impact_names_the_daemon_that_it_waits_for() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        await lose(world)
        first = world.servers[0]
        placed = await first.operations.restart("web-0", by="ann")
        assert placed is not None
        event = placed[1].id
        assert (await get(world, f"events/{event}"))["impacts"] == []
        await first.operations.approve(event, by="ann")
        await world.settle()

        (impact,) = (await get(world, f"events/{event}", server=1))["impacts"]
        assert impact["state"] == "waiting"
        assert impact["waits_for"] == f"the daemon of host-a: {AWAY}"
        (listed,) = (await get(world, "events"))["events"]
        assert listed["impacts"] == [impact]

    run(test)


def test_operation_on_a_vm_says_that_it_waits_for_a_daemon_that_is_away() -> None:
    """It is accepted, because the owner of the VM may wait; but not without a word."""

    async def operate(world: World, vm: str, verb: str) -> Any:
        headers = {"authorization": f"Bearer fw_root_{world.secret}"}
        client = world.servers[1].client
        response = await client.post(f"/api/v1/vms/{vm}/{verb}", headers=headers)
        assert response.status_code == 202, response.text
        return response.json()

    async def test(world: World) -> None:
        names = ("restart", "redeploy", "evict", "delete", "before")
        await world.daemon("host-a", *map(reported, names))
        await world.poll("before")
        assert (await operate(world, "before", "restart"))["waits_for"] == ""

        await lose(world)
        for verb in ("restart", "redeploy", "evict", "delete"):
            result = await operate(world, verb, verb)
            assert result["waits_for"] == f"the daemon of host-a: {AWAY}"
            assert (result["event"] is None) == (result["reason"] is not None)

    run(test)


def test_impact_that_runs_or_boots_says_so() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None
        event = placed[1].id
        await world.servers[0].operations.approve(event, by="ann")
        impact = await daemon.take()
        assert (await get(world, f"events/{event}"))["impacts"][0]["waits_for"] == ""

        await daemon.finish(impact, problem="", detail="reset", host="", is_back=False)
        (shown,) = (await get(world, f"events/{event}"))["impacts"]
        assert shown["state"] == "booting"
        assert shown["waits_for"] == "the VM to poll, until 2030-01-31T12:05:00Z"

    run(test)


def test_impact_waits_for_the_call_of_an_event_that_was_completed() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        event = await world.restart("web-0")
        await daemon.take()
        server = world.servers[0]
        scope = server.scope("web-0")
        held = replace(scope.impacts[0], stop_seconds=30.0)
        waiting = replace(held, state=ImpactState.WAITING, claimed_by="")
        dropped = replace(scope, impacts=(waiting,), dropped=(held,))
        ((_, reason),) = server.hosts.problems.waits(dropped, event)
        assert reason == "another impact on this VM"

    run(test)


def test_failed_try_waits_for_the_next_one() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None
        event = placed[1].id
        await world.servers[0].operations.approve(event, by="ann")
        impact = await daemon.take()
        await daemon.finish(impact, problem="no", detail="", host="", is_back=False)
        (shown,) = (await get(world, f"events/{event}"))["impacts"]
        assert shown["waits_for"].startswith("its next try at 2030-01-31T12:00:")

    run(test)


def test_vm_that_is_not_accepted_is_shown_with_its_host() -> None:
    """Otherwise it is only in the log of that host, where nobody looks for it."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        other = await world.daemon(
            "host-b", reported("web-0", id="0" * 8 + "-0000-4000-8000-000000000009")
        )
        for server in (0, 1):
            (problem,) = (await get(world, "hosts/host-b", server))["problems"]
            assert problem["code"] == "not-accepted"
            assert "web-0" in problem["message"]
        assert (await get(world, "hosts/host-b"))["state"] == "connected"

        await other.report()
        assert (await get(world, "hosts/host-b"))["problems"] == []

    run(test)


LEARNING = "the port vnet3 of the bridge br0 does not learn MACs"
UNSERVED = [{"bridge": "br0", "problem": LEARNING, "vms": 2}]


def test_bridge_that_is_not_served_is_shown_with_its_host() -> None:
    """Its guests get no error that a relay could count, and impacts still work."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await daemon.work(unserved=UNSERVED)
        await world.settle()
        for server in (0, 1):
            host = await get(world, "hosts/host-a", server)
            assert host["state"] == "connected"
            assert host["problems"] == [
                {
                    "code": "bridge-unserved",
                    "message": f"the bridge br0, with 2 VMs, is not served: {LEARNING}",
                }
            ]
        assert (await get(world, "vms/web-0"))["problems"] == []

        await daemon.work()
        await world.settle()
        assert (await get(world, "hosts/host-a"))["problems"] == []

    run(test)


def test_history_says_when_a_bridge_is_not_served_and_when_it_is_again() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        since = (await get(world, "hosts/host-a"))["daemon"]["since"]
        known = len(await world.history("updated"))
        await world.pass_time(SECOND, daemon)
        await daemon.work(unserved=UNSERVED)
        await daemon.work(unserved=[UNSERVED[0] | {"vms": 1}])
        assert (await get(world, "hosts/host-a"))["daemon"]["since"] == since
        again = await world.daemon("host-a", reported("web-0"), session="s2")
        await again.work(unserved=UNSERVED)
        await again.work()
        entries = (await world.history("updated"))[known:]
        texts = [entry.detail for entry in entries if "br0" in entry.detail]
        assert (
            texts
            == [
                f"bridge br0 of host-a is not served: {LEARNING}",
                "bridge br0 of host-a is served again",
            ]
            * 2
        )
        assert {entry.host for entry in entries} == {"host-a"}

    run(test)


def test_host_that_is_away_does_not_show_what_was_wrong_with_its_bridges() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await daemon.work(unserved=UNSERVED)
        await lose(world)
        (problem,) = (await get(world, "hosts/host-a"))["problems"]
        assert problem["code"] == "unreachable"

    run(test)


def test_same_report_again_writes_nothing() -> None:
    """It is sent once a minute."""

    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        bad = reported("web-1", id="nonsense")
        daemon = await world.daemon("host-b", bad)
        writes: list[Any] = []
        world.servers[0].engine.on_change("hostd", lambda before, after: writes.append(after))
        await daemon.report(bad)
        assert writes == []

    run(test)


def test_vm_with_the_address_of_another_one_is_accepted_and_has_another_problem() -> None:
    """An operator must not look for a VM that is missing in the fleet."""

    async def test(world: World) -> None:
        both = (reported(name, addresses=["10.0.0.5"]) for name in ("web-0", "web-1"))
        daemon = await world.daemon("host-a", *both)
        host = await get(world, "hosts/host-a", 1)
        assert host["vms"] == ["web-0", "web-1"]
        (problem,) = host["problems"]
        assert problem == {
            "code": "address-taken",
            "message": "VM 'web-1': 10.0.0.5 is the address of VM 'web-0' on this host too, which"
            " keeps it; expected unique addresses",
        }

        await daemon.report(reported("web-0", addresses=["10.0.0.5"]), reported("web-1"))
        assert (await get(world, "hosts/host-a", 1))["problems"] == []

    run(test)


def test_record_keeps_a_limited_number_of_vms_that_are_not_accepted() -> None:
    async def test(world: World) -> None:
        vms = [reported(f"web-{number}", id="x" * 999) for number in range(NOT_ACCEPTED_MAX + 5)]
        await world.daemon("host-a", *vms)
        problems = (await get(world, "hosts/host-a"))["problems"]
        assert len(problems) == NOT_ACCEPTED_MAX + 1
        assert problems[-1]["message"] == "and 5 more VMs"
        assert all(len(each["message"]) <= NOT_ACCEPTED_LENGTH_MAX for each in problems)

    run(test)


def test_unserved_vm_has_the_reason() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        unserved = world.servers[0].hosts.unserved
        for number in range(70):
            unserved.add_error("web-0", 400, "no header")
            await world.pass_time(SECOND, daemon)
            if number % 5 == 4:
                await unserved.look()
        await world.settle()
        (problem,) = (await get(world, "vms/web-0", server=1))["problems"]
        assert problem == {
            "code": "unserved",
            "message": f"has received only errors since {NOON:%Y-%m-%dT%H:%M:%SZ}:"
            " status 400, no header",
        }

    run(test)


def test_lists_of_vms_and_events_can_be_limited_to_a_host_or_a_scope() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0", scope="web"), reported("db"))
        await world.daemon("host-b", reported("web-1", scope="web"))
        await world.poll("web", "db")
        for name in ("web-1", "db"):
            await world.servers[0].operations.restart(name, by="ann")

        async def names(query: str) -> list[str]:
            return [vm["name"] for vm in (await get(world, f"vms?{query}"))["vms"]]

        async def events(query: str) -> list[list[str]]:
            return [each["resources"] for each in (await get(world, f"events?{query}"))["events"]]

        assert await names("host=host-a") == ["db", "web-0"]
        assert await names("scope=web") == ["web-0", "web-1"]
        assert await names("scope=web&host=host-a") == ["web-0"]
        assert await names("host=host-a&names=db,web-1") == ["db"]
        assert await events("host=host-a") == [["db"]]
        assert await events("scope=web") == [["web-1"]]
        assert await events("scope=db&host=host-b") == []
        headers = {"authorization": f"Bearer fw_root_{world.secret}"}
        client = world.servers[0].client
        for path in ("vms?host=nope", "events?scope=nope"):
            assert (await client.get(f"/api/v1/{path}", headers=headers)).status_code == 404

    run(test)


def test_event_that_its_vms_cannot_read_says_since_when_and_for_how_long() -> None:
    """Else an operator sees an event that is due and does not start, without a reason."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None
        event = f"events/{placed[1].id}"
        await world.settle()
        await world.pass_time(timedelta(minutes=16))
        for server in (0, 1):
            shown = await get(world, event, server)
            assert shown["status"] == "Scheduled"
            assert shown["unreadable_since"] == "2030-01-31T12:00:00Z"
            assert shown["unreadable_seconds"] == 0
            assert shown["waits_for"] == f"the daemon of host-a: {AWAY}"
        (entry,) = [entry for entry in await world.history("updated") if entry.event]
        assert entry.detail == (
            "its VMs have not been able to read it since 2030-01-31T12:00:00Z,"
            " so its notice does not pass"
        )

        await daemon.work()
        await world.settle()
        shown = await get(world, event)
        assert shown["unreadable_since"] is None
        assert shown["waits_for"] == ""
        assert 16 * 60 <= shown["unreadable_seconds"] <= 16 * 60 + 2
        assert shown["not_before"].startswith("2030-01-31T12:31:0")

    run(test, is_confirming=True)


def test_event_names_the_host_whose_guests_get_no_response() -> None:
    """Its daemon is connected: only the reason tells an operator where to look."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None
        event = f"events/{placed[1].id}"
        daemon.unconfirmed_since = world.clock.now()
        assert (await get(world, event))["waits_for"] == ""
        await world.pass_time(timedelta(seconds=30), daemon)
        for server in (0, 1):
            assert (await get(world, event, server))["waits_for"] == f"host-a: {NO_RESPONSE}"

    run(test, is_confirming=True)


def test_event_that_no_server_could_show_has_no_host_to_blame() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        server = world.servers[0]
        placed = await server.operations.restart("web-0", by="ann")
        assert placed is not None
        unreadable = replace(placed[1], unreadable_since=NOON)
        assert server.hosts.problems.waits_to_start(server.scope("web-0"), unreadable) == (
            "its VMs to be able to read it: they have not been since 2030-01-31T12:00:00Z"
        )

    run(test)


def test_due_event_names_the_update_domain_that_holds_it_and_what_that_waits_for() -> None:
    """Else an operator sees an event that is due and does not start, without a reason."""

    async def test(world: World) -> None:
        web: dict[str, Any] = {"scope": "web", "kind": "scale-set"}
        await world.daemon("host-a", reported("web-0", **web, update_domain=0))
        other = await world.daemon("host-b", reported("web-1", **web, update_domain=1))
        await world.poll("web")
        operations = world.servers[0].operations
        events = [
            (await operations.maintain(host, type=EventType.REBOOT, by="ann"))[0][1].id
            for host in ("host-a", "host-b")
        ]
        await operations.approve(events[0], by="ann")
        await world.settle()
        held = f"events/{events[1]}"
        assert (await get(world, held))["waits_for"] == ""
        await operations.approve(events[1], by="ann")
        await world.settle()
        assert (await get(world, held))["waits_for"] == "update domain 0 of web, under impact"
        scope, problems = world.servers[0].scope("web"), world.servers[0].hosts.problems
        (event,) = (each for each in scope.events if each.id == events[1])
        assert problems.waits_to_start(scope, event, is_stuck=True) == "", (
            "a campaign only takes time"
        )
        await world.pass_time(timedelta(seconds=20), other)
        for server in (0, 1):
            waits_for = (await get(world, held, server))["waits_for"]
            text = "update domain 0 of web, under impact, which waits for the daemon of host-a"
            assert waits_for == f"{text}: {AWAY}"

    run(test)


def test_started_event_does_not_wait_for_its_vms_to_read_it() -> None:
    async def test(world: World) -> None:
        await world.daemon("host-a", reported("web-0"))
        await world.poll("web-0")
        placed = await world.servers[0].operations.restart("web-0", by="ann")
        assert placed is not None
        event = placed[1].id
        await world.pass_time(timedelta(minutes=16))
        assert (await get(world, f"events/{event}"))["unreadable_since"] is not None
        await world.servers[0].operations.approve(event, by="ann")
        await world.settle()

        shown = await get(world, f"events/{event}")
        assert (shown["status"], shown["unreadable_since"]) == ("Started", None)

    run(test, is_confirming=True)
