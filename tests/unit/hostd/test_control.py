"""What a daemon tells its servers, and how it finds one that answers."""

import asyncio
import logging

import pytest

from forewarn.errors import Invalid, Unavailable
from forewarn.hostd.inventory import Report
from forewarn.platform.base import ImpactResult
from tests.builders import guid
from tests.unit.hostd.fake_server import Daemon, fake_server, running, until
from tests.unit.hostd.http_server import in_loop


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
            await until(lambda: not daemon.inventory.readable.is_set())
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


@in_loop
async def test_a_server_that_is_unavailable_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The lease of a lost server may still be held. One line tells it, not one for each attempt."""
    async with fake_server() as server:
        server.refusal = 503, {"error": "unavailable", "message": "held by server-2", "facts": {}}
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
async def test_no_work_is_asked_for_while_vms_cannot_be_listed() -> None:
    """Without libvirt the host cannot act, so it is unreachable and its impacts wait."""
    async with fake_server() as server:
        daemon = Daemon(server)
        daemon.source.problem = Unavailable("libvirt does not run")
        async with running(daemon):
            await asyncio.sleep(0.05)
            assert server.http is not None
            assert server.http.requests == []
            daemon.source.problem = None
            daemon.source.woken.set()
            await until(lambda: server.polls)


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
