"""Impacts that a server hands out: run once, reported until accepted, cancelled when unwanted."""

import asyncio
import errno

from forewarn.core.event import Cause, EventType
from forewarn.errors import ImpactFailed
from forewarn.hostd.worker import ServerVm, WantedImpact
from forewarn.platform.base import ImpactRequest, ImpactResult
from tests.builders import guid
from tests.unit.hostd.fake_server import Daemon, fake_server, running, until
from tests.unit.hostd.http_server import in_loop

DONE = {
    "event_id": guid(1),
    "vm": "web-0",
    "tries": 1,
    "problem": "",
    "detail": "",
    "host": "",
    "is_back": True,
}


@in_loop
async def test_an_impact_is_carried_out_and_reported() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: server.running)
            assert server.running == [{"event_id": guid(1), "vm": "web-0", "tries": 1}]
            daemon.platform.outcomes.put_nowait(ImpactResult(host="host-b", detail="moved"))
            await until(lambda: server.results)
        vm = ServerVm(name="web-0", id=guid(5).lower(), host="host-a")
        assert daemon.platform.started == [
            WantedImpact(
                guid(1), "web", vm, EventType.REBOOT, Cause.RESTART, 1, targets=("host-b",)
            )
        ]
        assert server.results == [DONE | {"host": "host-b", "detail": "moved"}]


@in_loop
async def test_a_failure_is_reported_with_its_output() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            daemon.platform.outcomes.put_nowait(ImpactFailed("exited with 3", output="why"))
            await until(lambda: server.results)
        assert server.results == [DONE | {"problem": "exited with 3", "detail": "why"}]


@in_loop
async def test_an_impact_is_attached_to_the_running_call_at_the_next_server() -> None:
    """The VM must not be restarted twice because a server died."""
    async with fake_server() as first, fake_server() as second:
        daemon = Daemon(first, second)
        async with running(daemon):
            first.want()
            await until(lambda: daemon.platform.started)
            assert first.http is not None
            await first.http.stop()
            second.want(tries=2)
            await until(lambda: second.running and second.running[0]["tries"] == 2)
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: second.results)
        assert len(daemon.platform.started) == 1
        assert second.results == [DONE | {"tries": 2}]


@in_loop
async def test_a_result_is_kept_until_it_is_accepted() -> None:
    """A server that takes over does not know the impact before it has claimed it."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: daemon.platform.started)
            server.is_accepting = False
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: server.results)
            server.is_accepting = True
            server.want(tries=2)
            await until(lambda: len(server.results) == 2)
            server.want("web-1", event=2)
            await until(lambda: len(daemon.platform.started) == 2)
            await until(lambda: [one["vm"] for one in server.running] == ["web-1"])
        assert [result["tries"] for result in server.results] == [1, 2]


@in_loop
async def test_a_result_is_sent_again_after_a_lost_answer() -> None:
    async with fake_server() as first, fake_server() as second:
        daemon = Daemon(first, second)
        async with running(daemon):
            first.want()
            await until(lambda: daemon.platform.started)
            first.refusal = 503, {"error": "store_lost", "message": "the store is lost"}
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: second.results)
        assert second.results == [DONE]


@in_loop
async def test_an_unwanted_impact_is_cancelled() -> None:
    """An operator completed the event."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: server.running)
            server.wanted.clear()
            server.cancelled.append((guid(1), "web-0"))
            await until(lambda: daemon.platform.cancelled)
            server.want("web-1", event=2)
            await until(lambda: [one["vm"] for one in server.running] == ["web-1"])
        assert server.results == []


@in_loop
async def test_an_impact_that_comes_again_waits_for_the_cancelled_call() -> None:
    """Two calls for a VM at the same time would disturb each other."""
    await cancel_then_start(next_event=1)


@in_loop
async def test_the_next_impact_of_a_vm_waits_for_the_cancelled_call() -> None:
    """An operator completed the first event, and the VM is free for the second one."""
    await cancel_then_start(next_event=2)


async def cancel_then_start(next_event: int) -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        order: list[str] = []

        class Slow:
            async def run_impact(self, request: ImpactRequest) -> ImpactResult:
                order.append(f"start {request.tries}")
                try:
                    await asyncio.Event().wait() if request.tries == 1 else None
                finally:
                    if request.tries == 1:
                        await until(daemon.worker.running)  # the second one is there
                    order.append(f"end {request.tries}")
                return ImpactResult()

        daemon = Daemon(server, platform=Slow())
        async with running(daemon):
            server.want()
            await until(lambda: server.running)
            server.wanted.clear()
            server.cancelled.append((guid(1), "web-0"))
            await until(lambda: not daemon.worker.running())
            server.cancelled.clear()
            server.want(event=next_event, tries=2)
            await until(lambda: server.results)
        assert order == ["start 1", "end 1", "start 2", "end 2"]
        assert server.results == [DONE | {"event_id": guid(next_event), "tries": 2}]


@in_loop
async def test_a_restarted_vm_is_watched_until_it_is_back() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: daemon.platform.started)
            daemon.platform.outcomes.put_nowait(ImpactResult(host="host-b", is_back=False))
            await until(lambda: daemon.platform.watched)
            assert daemon.worker.running() == []
            daemon.platform.back.set()
            await until(lambda: len(server.results) == 2)
        assert server.results == [DONE | {"host": "host-b", "is_back": False}, DONE]
        assert daemon.platform.watched[0].vm.host == "host-b"


@in_loop
async def test_no_more_impacts_run_than_allowed() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            for number in (1, 2, 3):
                server.want(f"web-{number}", event=number)
            await until(lambda: len(server.running) == 3)
            assert len(daemon.platform.started) == 2
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: len(daemon.platform.started) == 3)


@in_loop
async def test_a_stop_cancels_calls_and_sends_no_result_for_them() -> None:
    """They are handed out again when the daemon is back."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: daemon.platform.started)
        assert daemon.platform.cancelled == ["web-0"]
        assert server.results == []
        assert server.sessions_ended


@in_loop
async def test_a_shortage_is_not_a_failure() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            daemon.platform.outcomes.put_nowait(OSError(errno.EMFILE, "Too many open files"))
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: server.results)
        assert server.results == [DONE]
