"""What a daemon tells its servers, and how it finds one that answers."""

import logging
from contextlib import AsyncExitStack

import pytest

from forewarn.errors import Invalid, Unavailable
from forewarn.hostd.inventory import Report
from forewarn.hostd.refusals import LASTING_SECONDS
from forewarn.platform.base import ImpactResult
from forewarn.platform.remote import RefusalReason
from tests.builders import guid
from tests.unit.hostd.fake_server import Daemon, fake_server, running, until
from tests.unit.hostd.http_server import in_loop

TEST_SECONDS_MAX = 60


@in_loop
async def test_inventory_is_sent_before_work_is_asked_for() -> None:
    """A server must know the VMs before it can hand out their impacts."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.polls)
        assert server.inventories == [
            {
                "memory_bytes": 1 << 30,
                "vms": [
                    {
                        "name": "web-0",
                        "id": guid(1).lower(),
                        "macs": [],
                        "addresses": [],
                        "power": "running",
                        "memory_bytes": 0,
                        "scope": "",
                        "kind": None,
                        "update_domain": None,
                        "fault_domain": None,
                        "unmovable": "",
                        "ports": ["vnet1"],
                    }
                ],
            }
        ]


@in_loop
async def test_a_changed_inventory_is_sent() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.polls)
            daemon.source.list("web-0", "web-1")
            await until(lambda: len(server.inventories) == 2)
        assert [vm["name"] for vm in server.inventories[1]["vms"]] == ["web-0", "web-1"]


@in_loop
async def test_inventory_that_the_server_wants_again_is_listed_again() -> None:
    """It wants to know which VMs run now: those of an old list may have been moved since."""
    async with fake_server() as server:
        daemon, server.is_merging = Daemon(server), False
        async with running(daemon):
            await until(lambda: len(server.inventories) == 2)
            assert daemon.source.listings == 2


@in_loop
async def test_an_inventory_from_before_the_end_of_an_impact_is_not_sent() -> None:
    """A VM that the impact has removed would join the fleet again."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.inventories)
            server.want()
            await until(lambda: daemon.platform.started)
            daemon.source.problem = Unavailable("not yet")
            daemon.inventory.report = Report(1, daemon.source.vms)  # not sent yet
            daemon.control._reported_at = -60
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: daemon.inventory.problem)
            assert daemon.inventory.is_stale
            daemon.source.problem = None
            daemon.source.list()
            await until(lambda: len(server.inventories) == 2)
        assert [each["vms"] for each in server.inventories][1:] == [[]]


@in_loop
async def test_a_clean_stop_ends_the_session() -> None:
    """The next daemon of this host does not wait for a lease."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.polls >= 2)
        assert server.sessions_ended == 1


@in_loop
async def test_refused_guests_reach_the_server() -> None:
    """The daemon has no metrics, and its log is on the host."""
    async with fake_server() as server:
        daemon = Daemon(server)
        daemon.refusals.add("id-1", RefusalReason.NO_SERVER, is_poll=True)
        daemon.seconds += LASTING_SECONDS
        daemon.refusals.add("id-1", RefusalReason.NO_SERVER, is_poll=True)
        async with running(daemon):
            await until(lambda: server.polls)
            refused = {"guest": "id-1", "reason": "no-server", "seconds": int(LASTING_SECONDS)}
            assert server.latest["refusals"] == {"no-server": 2}
            assert server.latest["refused"] == [refused]


@in_loop
async def test_first_request_after_a_lost_server_says_for_how_long_there_was_none() -> None:
    """A server that has just started cannot know it."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.polls)
            assert "no_server_seconds" not in server.latest
            server.refusal = 503, {"error": "unavailable", "message": "no"}
            await until(lambda: daemon.control._failures)
            server.refusal, before = None, len(server.requests)
            await until(lambda: len(server.requests) > before)
            seconds = server.requests[before]["no_server_seconds"]
            assert 1 <= seconds <= TEST_SECONDS_MAX, "rounded up"


@in_loop
async def test_daemon_without_a_bridge_says_that_its_guests_ask_the_servers() -> None:
    """They can read while it is away."""
    async with fake_server() as server:
        async with running(Daemon(server)):
            await until(lambda: server.polls)
        assert "relays" not in server.latest
        polls = server.polls
        async with running(Daemon(server, relays=False)):
            await until(lambda: server.polls > polls)
        assert server.latest["relays"] is False


@in_loop
async def test_server_gets_how_long_guests_had_no_answer_and_when_that_ends() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        daemon.unconfirmed.fail(0.0)
        daemon.seconds = 20.0
        daemon.unconfirmed.fail(20.0)
        async with running(daemon):
            await until(lambda: server.latest.get("wait"))
            assert server.latest["unconfirmed_seconds"] == 20
            polls, abandoned = server.polls, server.abandoned
            daemon.unconfirmed.confirm()
            await until(lambda: server.abandoned > abandoned and server.unconfirmed[-1] == 0)
            assert server.polls == polls + 2, "the first one says that it was so"


@in_loop
async def test_bridge_that_is_not_served_reaches_the_server_at_once() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.latest.get("wait"))
            assert "unserved" not in server.latest
            daemon.unconfirmed.set_bridge("br0", "it has VLANs", vms=1)
            await until(lambda: "unserved" in server.latest)
            unserved = {"bridge": "br0", "problem": "it has VLANs", "vms": 1}
            assert server.latest["unserved"] == [unserved]
            assert server.unconfirmed[-1] == 0
            daemon.seconds += 20.0
            daemon.unconfirmed.set_bridge("br0", "")
            await until(lambda: "unserved" not in server.latest and server.unconfirmed[-1] == 20)
            await until(lambda: server.unconfirmed[-1] == 0)


@in_loop
async def test_next_server_gets_to_know_for_how_long_there_was_none() -> None:
    """The daemon continues there before any server has noticed that the first one is gone."""
    async with fake_server() as second, AsyncExitStack() as stack:
        first = await stack.enter_async_context(fake_server())
        daemon = Daemon(first, second)
        async with running(daemon):
            await until(lambda: first.latest.get("wait"))
            daemon.seconds += 13.0
            daemon.control._answered_at -= 13.0
            await stack.aclose()
            await until(lambda: 13 in second.unconfirmed and second.unconfirmed[-1] == 0)


@in_loop
async def test_requests_have_growing_numbers() -> None:
    """A server recognizes one that arrives after a later one."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.polls)
            daemon.source.list("web-0", "web-1")
            await until(lambda: len(server.inventories) == 2)
        assert len(server.numbers) >= 3, "the last one ends the session"
        assert server.numbers == list(range(1, len(server.numbers) + 1))


@in_loop
async def test_the_next_server_is_used_when_one_fails() -> None:
    async with fake_server() as first, fake_server() as second:
        daemon = Daemon(first, second)
        async with running(daemon):
            await until(lambda: first.polls)
            assert second.polls == 0
            assert first.http is not None
            await first.http.stop()
            await until(lambda: second.polls >= 2)
        assert second.inventories == first.inventories
        assert (first.sessions_ended, second.sessions_ended) == (0, 1)


HELD = {"error": "unavailable", "message": "held by server-2", "facts": {}}


@pytest.mark.parametrize(
    "refusal", [(503, HELD), (502, b"<html>"), (200, b'{"problems": ["\xff"]}')]
)
@in_loop
async def test_a_server_that_is_unavailable_is_asked_again(
    caplog: pytest.LogCaptureFixture, refusal: tuple[int, object]
) -> None:
    """The lease of a lost server may still be held, or a proxy answers. One line tells it, not one
    for each attempt.
    """
    async with fake_server() as server:
        server.refusal = refusal
        daemon = Daemon(server)
        with caplog.at_level(logging.INFO, "forewarn"):
            async with running(daemon):
                await until(lambda: server.http and len(server.http.requests) >= 2)
                server.refusal = None
                await until(lambda: server.polls)
                await until(lambda: "connected to server" in caplog.messages)
        assert caplog.messages.count("no server serves this host; trying again") == 1


@in_loop
async def test_a_rejected_token_ends_the_daemon() -> None:
    """Only an operator can change that."""
    async with fake_server() as server:
        server.refusal = 403, {"error": "forbidden", "message": "the token is for host-b"}
        async with running(Daemon(server)) as (_, session):
            with pytest.raises(
                Invalid, match=r"token_file: .*: the token is for host-b \(status 403"
            ):
                await session


@in_loop
async def test_a_token_that_one_of_two_servers_accepts_is_good() -> None:
    """A token was created at one server, and the other does not know it yet."""
    async with fake_server() as first, fake_server() as second:
        first.refusal = 401, {"error": "unauthorized", "message": "unknown token"}
        async with running(Daemon(first, second)) as (_, session):
            await until(lambda: second.polls >= 2)
            assert not session.done()


@in_loop
async def test_a_token_that_a_lost_server_may_accept_is_tried_again() -> None:
    async with fake_server() as first, fake_server() as second:
        assert first.http is not None
        await first.http.stop()
        second.refusal = 401, {"error": "unauthorized", "message": "unknown token"}
        async with running(Daemon(first, second)) as (_, session):
            await until(lambda: second.http and len(second.http.requests) >= 2)
            assert not session.done()


@in_loop
async def test_a_token_that_is_rejected_later_is_tried_again() -> None:
    """A server that lost its store must not end the relay of a whole host."""
    async with fake_server() as server, running(Daemon(server)) as (_, session):
        await until(lambda: server.polls >= 2)
        server.refusal = 401, {"error": "unauthorized", "message": "unknown token"}
        assert server.http is not None
        sent = len(server.http.requests)
        for writer in server.http.writers:
            writer.transport.abort()
        await until(lambda: server.http and len(server.http.requests) > sent)
        server.refusal, polls = None, server.polls
        await until(lambda: server.polls > polls)
        assert not session.done()


@in_loop
async def test_a_host_that_another_daemon_serves_is_waited_for() -> None:
    """After a crash, the session before it is served for some seconds."""
    async with fake_server() as server:
        server.refusal = 409, {"error": "host_taken", "message": "another daemon is connected"}
        async with running(Daemon(server)):
            await until(lambda: server.http and len(server.http.requests) >= 2)
            server.refusal = None
            await until(lambda: server.polls)


@in_loop
async def test_a_refused_inventory_does_not_stop_the_work(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_server() as server:
        server.inventory_refusal = 409, {"error": "refused", "message": "two VMs are named web-0"}
        async with running(Daemon(server)):
            await until(lambda: server.polls)
        assert "VM not accepted" in caplog.messages


@in_loop
async def test_daemon_says_why_it_cannot_act_and_keeps_its_session() -> None:
    """Its guests are served, and its impacts wait. The reason stays the same, so that it is
    recorded once.
    """
    async with fake_server() as server:
        daemon = Daemon(server)
        daemon.source.problem = Unavailable("libvirt does not run")
        async with running(daemon):
            await until(lambda: server.polls >= 2)
            assert server.inventories == []
            daemon.source.problem = Unavailable("libvirt still does not run")
            daemon.source.woken.set()
            await until(lambda: daemon.source.listings >= 2)
            daemon.source.problem = None
            daemon.source.woken.set()
            await until(lambda: server.inventories)
        problems = list(dict.fromkeys(server.problems))
        assert problems == ["its VMs cannot be listed: libvirt does not run", ""]


@in_loop
async def test_a_connection_that_broke_while_idle_is_replaced() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            await until(lambda: server.polls)
            server.want()
            await until(lambda: daemon.platform.started)
            assert server.http is not None
            for writer in server.http.writers:
                writer.transport.abort()
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: server.results)
