"""What Prometheus reads: the numbers are those of what really happened, and nobody outside can make
up a label.
"""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forewarn.core.change import ChangeKind
from forewarn.core.command import Approve, Cancel, Claim, Finish, Seen, Tick
from forewarn.core.event import EventType
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import HOST_KEY, MANAGED_HOST, ManagedHost
from forewarn.engine.turns import Turns
from forewarn.errors import StoreLost
from forewarn.platform.remote import RefusalReason, WorkRequest
from forewarn.store.base import Record
from forewarn.web.control.app import make_app
from forewarn.web.control.routes.metrics import ServiceCollector, make_metrics_route
from forewarn.web.http.admission import Limits
from forewarn.web.metadata.fast_path import Polls
from tests.builders import MINUTE, NOON, SECOND, vm
from tests.unit.web.control_world import make_client
from tests.unit.web.guest import BY_ADDRESS, EVENT_ID, EVENTS, TRUE, Guest, run
from tests.work_count import work_of

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def read(guest: Guest, turns: Turns | None = None) -> Numbers:
    polls = Polls(guest.engine, BY_ADDRESS, Limits())
    service = guest.service._replace(turns=turns or guest.service.turns)
    route = make_metrics_route(guest.service, guest.application, polls)
    async with make_client(make_app(service, more=[route], delay_seconds=0)) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(response.text)
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in families
        for one in family.samples
    }


def number(numbers: Numbers, name: str, **labels: str) -> float:
    return numbers.get((name, frozenset(labels.items())), 0.0)


def test_a_scrape_takes_a_turn() -> None:
    """Else a client that scrapes in a loop would delay polls."""

    async def scraping(guest: Guest) -> None:
        turns = Turns()
        await read(guest, turns)
        await asyncio.sleep(0)  # then it is charged
        assert len(turns.limited) == 1

    run(scraping)


def test_event_is_counted_from_scheduling_to_end() -> None:
    async def telling(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        before = await read(guest)
        assert number(before, "forewarn_events", type="Reboot", status="Scheduled") == 1
        await guest.clock.advance(4 * MINUTE)
        await guest.engine.submit("web", Approve(event_ids=(EVENT_ID,), vm="web-1"), by="vm web-1")
        await guest.engine.submit("web", Claim(event_id=EVENT_ID, vm="web-0", worker="w"), by="w")
        await guest.engine.submit(
            "web", Finish(event_id=EVENT_ID, vm="web-0", worker="w", tries=1, problem="no"), by="w"
        )
        await guest.clock.advance(5 * SECOND)
        await guest.engine.submit("web", Claim(event_id=EVENT_ID, vm="web-0", worker="w"), by="w")
        await guest.engine.submit(
            "web", Finish(event_id=EVENT_ID, vm="web-0", worker="w", tries=2), by="w"
        )
        after = await read(guest)
        assert not [name for name, _ in after if name == "forewarn_events"]
        assert number(before, "forewarn_event_changes_total", type="Reboot", change="failed") == 0
        assert (
            "forewarn_event_changes_total",
            frozenset({"type": "Reboot", "change": "failed"}.items()),
        ) in before
        for change in ("scheduled", "started", "completed"):
            assert number(after, "forewarn_event_changes_total", type="Reboot", change=change) == 1
        assert number(after, "forewarn_approvals_total", by="vm") == 1
        assert number(after, "forewarn_notice_seconds_sum", type="Reboot") == 240
        assert number(after, "forewarn_approval_seconds_bucket", type="Reboot", le="300") == 1
        assert number(after, "forewarn_approval_seconds_bucket", type="Reboot", le="120") == 0
        assert number(after, "forewarn_impacts_total", type="Reboot", result="done") == 1
        assert number(after, "forewarn_impacts_total", type="Reboot", result="failed") == 1
        assert number(after, "forewarn_commit_seconds_count") > 5

    run(telling)


def test_approval_by_a_vm_named_operator_counts_as_a_vms() -> None:
    """A legal name: the label says what kind of approver it was, not what it is called."""

    async def telling(guest: Guest) -> None:
        await guest.enrol("odd", vm("operator"))
        await guest.engine.submit("odd", Seen(), by="poll")
        await guest.restart("operator", "odd")
        await guest.engine.submit(
            "odd", Approve(event_ids=(EVENT_ID,), vm="operator"), by="vm operator"
        )
        numbers = await read(guest)
        assert number(numbers, "forewarn_approvals_total", by="vm") == 1
        assert number(numbers, "forewarn_approvals_total", by="operator") == 0

    run(telling)


def test_requests_are_counted_by_kind_and_status() -> None:
    async def telling(guest: Guest) -> None:
        for _ in range(3):
            await guest.call(EVENTS, TRUE)
        await guest.call(EVENTS)
        await guest.call("/metadata/instance?api-version=2021-02-01", TRUE)
        for made_up in range(20):
            await guest.call(f"/metadata/{made_up}", TRUE)
        numbers = await read(guest)
        assert number(numbers, "forewarn_requests_total", kind="document", status="200") == 3
        assert number(numbers, "forewarn_requests_total", kind="document", status="400") == 1
        assert number(numbers, "forewarn_requests_total", kind="instance", status="200") == 1
        assert number(numbers, "forewarn_requests_total", kind="other", status="404") == 20
        assert (
            len([name for name, _ in numbers if name == "forewarn_requests_total"]) == 5
        )  # with 304, which is always there

    run(telling)


def test_labels_never_hold_event_ids_or_vm_names() -> None:
    async def telling(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        await guest.engine.submit("web", Tick(), by="clock")
        labels = {value for _, labels in await read(guest) for _, value in labels}
        assert not labels & {EVENT_ID, "web-0", "web-1", "web"}

    run(telling)


def test_distance_of_the_clock_from_other_servers_is_measured() -> None:
    async def telling(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        assert number(await read(guest), "forewarn_clock_skew_seconds") == 0
        guest.engine.clock_skew_seconds = -7
        assert number(await read(guest), "forewarn_clock_skew_seconds") == -7

    run(telling)


def test_stale_time_of_the_store_is_measured() -> None:
    async def telling(guest: Guest) -> None:
        assert number(await read(guest), "forewarn_store_stale_seconds") == 0
        guest.engine.stale_since = guest.clock.now()
        await guest.clock.advance(90 * SECOND)
        assert number(await read(guest), "forewarn_store_stale_seconds") == 90

    run(telling)


def test_end_is_counted_by_the_server_that_commits_it() -> None:
    """Of two servers on a store one may announce an event and the other cancel it."""

    async def telling(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        other = Engine(guest.store, guest.clock, guest.engine.timing)
        await other.load()
        await other.submit("web", Cancel(event_id=EVENT_ID), by="test")
        assert other.metrics.events[EventType.REBOOT, ChangeKind.CANCELED] == 1

    run(telling)


def test_readyz_fails_when_the_store_rejects_commits() -> None:
    """What has been read can still be shown, but nothing new can be announced."""

    async def telling(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        guest.engine.is_ready = True
        guest.store.is_lost = True
        with pytest.raises(StoreLost):
            await guest.restart()
        assert not guest.engine.can_serve
        assert number(await read(guest), "forewarn_ready") == 0
        guest.store.is_lost = False
        await guest.restart()
        assert guest.engine.can_serve

    run(telling)


def test_readyz_fails_until_the_server_has_its_lease_again() -> None:
    """Without it nothing is announced and no host daemon is served: a balancer avoids it."""

    async def telling(guest: Guest) -> None:
        guest.engine.is_ready = True
        lease = await guest.engine.store.lease("server/one", 10)
        assert lease is not None
        guest.engine.server_lease = lease
        assert guest.engine.can_serve
        lease.end()
        assert not guest.engine.can_serve
        assert number(await read(guest), "forewarn_ready") == 0
        guest.engine.server_lease = await guest.engine.store.lease("server/one-2", 10)
        assert guest.engine.can_serve

    run(telling)


def test_guests_that_a_relay_refused_are_counted_by_host_and_reason() -> None:
    """The daemon has no metrics of its own: its servers have them."""

    async def telling(guest: Guest) -> None:
        counts = {RefusalReason.NOT_A_VM: 12, RefusalReason.IN_DOUBT: 3}
        guest.service.hosts.unserved.report("host-a", WorkRequest("s1", "m1", refusals=counts))
        numbers, name = await read(guest), "forewarn_relay_refused_total"

        assert number(numbers, name, host="host-a", reason="not-a-vm") == 12
        assert number(numbers, name, host="host-a", reason="in-doubt") == 3

    run(telling)


def test_work_of_a_scrape_does_not_grow_with_the_hosts() -> None:
    """Prometheus scrapes each server every few seconds, and polls wait for it."""

    async def telling(guest: Guest) -> None:
        polls = Polls(guest.engine, BY_ADDRESS, Limits())
        collector = ServiceCollector(guest.service, guest.application, polls)

        async def scrape() -> None:
            for _ in collector.collect():
                pass

        async def work_with(hosts: int) -> int:
            for number in range(hosts):
                record = ManagedHost(f"host-{number}", "s1", "", NOON)
                content = MANAGED_HOST.encode(record)
                guest.engine.learn(Record(HOST_KEY.format(record.host), content, 100))
            return await work_of(scrape())

        few = await work_with(10)
        assert await work_with(1000) < 1.2 * few

    run(telling)


def test_unserved_vms_are_counted_by_reason_from_zero() -> None:
    """An alert needs a number before the first VM is counted."""

    async def telling(guest: Guest) -> None:
        numbers, name = await read(guest), "forewarn_vms_unserved"
        reasons = {
            dict(labels)["reason"]: n for (each, labels), n in numbers.items() if each == name
        }
        assert reasons == {"errors": 0, "moved": 0}

    run(telling)


def test_vms_on_two_hosts_are_counted_from_zero() -> None:
    """As above, confirmed or not."""

    async def telling(guest: Guest) -> None:
        numbers = await read(guest)
        assert number(numbers, "forewarn_vms_duplicate") == 0
        assert number(numbers, "forewarn_vms_duplicate_not_accepted") == 0

    run(telling)


def test_vm_that_gets_only_errors_is_counted_as_unserved() -> None:
    async def telling(guest: Guest) -> None:
        unserved = guest.service.hosts.unserved
        for _ in range(14):
            unserved.add_error("web-0", 400, "no header")
            await guest.clock.advance(5 * SECOND)
            await unserved.look()

        assert number(await read(guest), "forewarn_vms_unserved", reason="errors") == 1

    run(telling)
