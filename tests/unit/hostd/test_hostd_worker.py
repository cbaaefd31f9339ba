"""Impacts that a server hands out: run once, reported until recorded, cancelled when unwanted."""

import asyncio
import dataclasses
import errno
import logging
import operator
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.errors import ImpactFailed
from forewarn.hostd.control import ReceivedImpact, ReceivedVm
from forewarn.hostd.moves import Moves
from forewarn.hostd.worker import RECOVER_AGAIN_SECONDS, ImpactRunner
from forewarn.platform.base import COMMAND_GRACE_SECONDS, ImpactRequest, ImpactResult
from forewarn.platform.remote import RunningImpact, Work, WorkRequest
from forewarn.web.control.routes.hostd import BODY_BYTES_MAX
from tests.builders import guid
from tests.sim.jumping_loop import JumpingLoop
from tests.unit.hostd.fake_server import Daemon, FakePlatform, fake_server, running, until
from tests.unit.hostd.http_server import in_loop
from tests.unit.platform.instant_clock import InstantClock

RUNNING = {"event_id": guid(1), "vm": "web-0", "tries": 1}


def ended(tries: int = 1, **result: Any) -> dict[str, Any]:
    return RUNNING | {"tries": tries, "result": result}


@in_loop
async def test_an_impact_is_carried_out_and_reported() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: server.running)
            assert server.running == [RUNNING]
            daemon.platform.outcomes.put_nowait(ImpactResult(host="host-b", detail="moved"))
            await until(lambda: server.results)
        vm = ReceivedVm(name="web-0", id=guid(5).lower(), host="host-a")
        assert daemon.platform.started == [
            ReceivedImpact(
                guid(1), "web", vm, EventType.REBOOT, Cause.RESTART, 1, targets=("host-b",)
            )
        ]
        assert server.results == [ended(host="host-b", detail="moved")]


@in_loop
async def test_a_failure_is_reported_with_its_output() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            daemon.platform.outcomes.put_nowait(ImpactFailed("exited with 3", output="why"))
            await until(lambda: server.results)
        assert server.results == [ended(problem="exited with 3", detail="why")]


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
        assert second.results == [ended(2)]


@in_loop
async def test_a_result_is_kept_until_it_is_recorded() -> None:
    """A server that takes over does not know the impact before it has claimed it."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: daemon.platform.started)
            server.is_recording = False
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: server.results)
            server.is_recording = True
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
        assert second.results == [ended()]


@in_loop
async def test_a_failure_is_the_result_of_one_try_only() -> None:
    """It was recorded, and the response was lost with the server; the next try must run."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: daemon.platform.started)
            server.is_recording = False
            daemon.platform.outcomes.put_nowait(ImpactFailed("no"))
            await until(lambda: server.results)
            server.is_recording = True
            server.want(tries=2)
            await until(lambda: len(daemon.platform.started) == 2)
            daemon.platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: len(server.results) == 2)
        assert server.results == [ended(problem="no"), ended(2)]
        assert [request.tries for request in daemon.platform.started] == [1, 2]


@in_loop
async def test_third_impact_of_a_vm_waits_for_the_first_one_too() -> None:
    """The second one, which waited for the first, may be cancelled before it has begun."""
    active, most, go = 0, 0, asyncio.Event()

    class Slow:
        async def run_impact(self, request: ImpactRequest) -> ImpactResult:
            nonlocal active, most
            active += 1
            most = max(most, active)
            try:
                await asyncio.Event().wait() if request.tries < 3 else None
            finally:
                await go.wait()
                active -= 1
            return ImpactResult()

    async with fake_server() as server:
        daemon = Daemon(server, platform=Slow())
        async with running(daemon):
            for tries in (1, 2, 3):
                server.cancelled.clear()
                server.want(event=tries, tries=tries)
                await until(lambda: server.running)
                if tries < 3:
                    server.wanted.clear()
                    server.cancelled.append((guid(tries), "web-0"))
                    await until(lambda: not daemon.runner.running())
            go.set()
            await until(lambda: server.results)
        assert most == 1


@in_loop
async def test_a_host_that_another_daemon_has_taken_gets_no_more_steps() -> None:
    """This one was stopped for a while; the other acts on the same VMs now."""
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: server.running)
            server.refusal = 409, {"error": "host_taken", "message": "another daemon is connected"}
            await until(lambda: daemon.platform.cancelled)
            assert daemon.runner.running() == []


@in_loop
async def test_results_of_many_vms_fit_into_one_request() -> None:
    """Else the server would refuse every request from then on."""
    runner = ImpactRunner(Loud(), 2000, InstantClock())
    requests = [
        ImpactRequest(guid(n), "web", Vm(name=f"vm-{n}"), EventType.REBOOT, Cause.RESTART, 1)
        for n in range(2000)
    ]
    runner.apply(Work(tuple(requests)))
    await until(lambda: all(each.result for each in runner.running()))
    body = msgspec.json.encode(WorkRequest("s", "machine-1", runner.running()))
    assert len(body) < BODY_BYTES_MAX


class Loud:
    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        raise ImpactFailed("\0" * 1000, output="\0" * 3000)


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
                        await until(daemon.runner.running)  # the second one is there
                    order.append(f"end {request.tries}")
                return ImpactResult()

        daemon = Daemon(server, platform=Slow())
        async with running(daemon):
            server.want()
            await until(lambda: server.running)
            server.wanted.clear()
            server.cancelled.append((guid(1), "web-0"))
            await until(lambda: not daemon.runner.running())
            server.cancelled.clear()
            server.want(event=next_event, tries=2)
            await until(lambda: server.results)
        assert order == ["start 1", "end 1", "start 2", "end 2"]
        assert server.results == [ended(2) | {"event_id": guid(next_event)}]


@in_loop
async def test_a_restarted_vm_is_watched_until_it_is_back() -> None:
    async with fake_server() as server:
        daemon = Daemon(server)
        async with running(daemon):
            server.want()
            await until(lambda: daemon.platform.started)
            daemon.platform.outcomes.put_nowait(ImpactResult(host="host-b", is_back=False))
            await until(lambda: daemon.platform.watched)
            await until(lambda: server.results)
            assert len(daemon.runner.running()) == 1
            daemon.platform.back.set()
            await until(lambda: len(server.results) == 2)
        assert server.results == [ended(host="host-b", is_back=False), ended(host="host-b")]
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
        assert server.results == [ended()]


class LeftBehind(FakePlatform):
    """An earlier run of the daemon has begun to act on web-0 for event 1. Recovery ends at `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.lists, self.go = 0, asyncio.Event()
        self.recovered: list[tuple[str, str, str, bool]] = []

    async def list_begun(self, host: str) -> list[tuple[str, str]]:
        self.lists += 1
        if self.lists == 1:
            raise ImpactFailed("libvirt is busy")
        return [(guid(1), "web-0")]

    async def recover(
        self, host: str, event_id: str, vm: str, *, may_start: bool, may_run_on: tuple[str, ...]
    ) -> str:
        self.recovered.append((host, event_id, vm, may_start))
        self.may_run_on = may_run_on
        await self.go.wait()
        return "the VM is off and stays off"


@in_loop
async def test_vm_of_an_event_that_is_over_is_recovered(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else would resume it. Its next impact waits, so that both do not act on it."""
    platform = LeftBehind()
    caplog.set_level(logging.INFO, "forewarn")
    async with fake_server() as server:
        server.cancelled.append((guid(1), "web-0"))
        async with running(Daemon(server, platform=platform)):
            await until(lambda: platform.recovered)
            server.want(event=2)
            await until(lambda: server.running)
            assert platform.started == []
            platform.go.set()
            await until(lambda: platform.started)
        assert platform.recovered == [("host-a", guid(1), "web-0", False)]
        (line,) = [each for each in caplog.records if each.msg == "VM of an event that is over"]
        assert line.__dict__["facts"] == {
            "vm": "web-0",
            "event": guid(1),
            "result": "the VM is off and stays off",
        }


@in_loop
async def test_vm_of_a_cancelled_impact_is_recovered() -> None:
    """The operator has completed the event while the VM was stopped for a move."""
    platform = LeftBehind()
    async with fake_server() as server:
        async with running(Daemon(server, platform=platform)):
            server.want(event=2)
            await until(lambda: platform.started)
            server.cancelled.append((guid(2), "web-0"))
            server.wanted.clear()
            await until(lambda: platform.recovered)
        assert platform.recovered == [("host-a", guid(2), "web-0", True)]


@pytest.mark.parametrize("may_start", [True, False])
@in_loop
async def test_vm_of_a_failed_try_is_recovered_if_it_is_not_tried_again(*, may_start: bool) -> None:
    """The try has stopped the VM, and the operator completes the event before the next try.

    It is not started here if the server says that another host has it by now.
    """
    platform = LeftBehind()
    runner = ImpactRunner(platform, 1, InstantClock(), "host-a")
    vm = Vm(name="web-0", host="host-a")
    runner.apply(Work((ImpactRequest(guid(2), "web", vm, EventType.REBOOT, Cause.MAINTENANCE, 1),)))
    platform.outcomes.put_nowait(ImpactFailed("it does not start"))
    await until(lambda: runner.running()[0].result)
    runner.apply(Work(cancel=tuple(runner.running())))
    begun = RunningImpact(guid(2), "web-0", tries=0)
    assert (runner.running(), platform.recovered) == ([begun], [])

    cancel = replace(begun, may_run_on=("host-b",), may_start=may_start)
    runner.apply(Work(cancel=(cancel,)))
    await until(lambda: platform.recovered)
    assert platform.recovered == [("host-a", guid(2), "web-0", may_start)]
    assert platform.may_run_on == ("host-b",)
    assert runner.running() == []
    platform.go.set()


async def fail_then_start(platform: LeftBehind, kind: EventType) -> ImpactRunner:
    """The second try of a Freeze has failed, and the next event begins."""
    runner = ImpactRunner(platform, 1, InstantClock(), "host-a")
    runner.apply(Work((request(2, EventType.FREEZE),)))
    platform.outcomes.put_nowait(ImpactFailed("it is not resumed"))
    await until(lambda: runner.running()[0].result)
    runner.apply(Work((request(3, kind),), cancel=tuple(runner.running())))
    return runner


def request(event: int, kind: EventType) -> ImpactRequest:
    vm = Vm(name="web-0", host="host-a")
    return ImpactRequest(guid(event), "web", vm, kind, Cause.MAINTENANCE, 1)


@in_loop
async def test_next_event_waits_until_the_vm_of_a_failed_one_is_recovered() -> None:
    """Its marker would hide that the failed event has left the VM suspended or off."""
    platform = LeftBehind()
    runner = await fail_then_start(platform, EventType.REDEPLOY)
    begun = RunningImpact(guid(2), "web-0", tries=0)
    assert runner.running() == [begun]

    runner.apply(Work((request(3, EventType.REDEPLOY),), cancel=(begun,)))
    await until(lambda: platform.recovered)
    assert len(platform.started) == 1
    platform.go.set()
    await until(lambda: len(platform.started) == 2)
    assert runner.running() == [RunningImpact(guid(3), "web-0", tries=1)]
    await runner.stop()


@in_loop
async def test_next_event_begins_if_the_server_wants_the_failed_one_to_be_tried_again() -> None:
    """Failed hardware does not wait for that."""
    runner = await fail_then_start(LeftBehind(), EventType.REDEPLOY)
    begun, after = RunningImpact(guid(2), "web-0", tries=0), request(3, EventType.REDEPLOY)
    assert runner.running() == [begun]
    runner.apply(Work((after,)))
    assert runner.running() == [begun, RunningImpact(guid(3), "web-0", tries=1)]
    await runner.stop()


class SilentTarget(LeftBehind):
    """The target of a move, which may run the VM, does not answer at first."""

    async def recover(
        self, host: str, event_id: str, vm: str, *, may_start: bool, may_run_on: tuple[str, ...]
    ) -> str:
        self.recovered.append((host, event_id, vm, may_start))
        if len(self.recovered) == 1:
            raise ImpactFailed("web-0 may run on host-b, which does not answer")
        return "the VM was off: started"


def test_server_decides_again_before_each_try_whether_a_vm_may_be_started() -> None:
    """The other host that acted on it may have done with it, or be forgotten, by then."""

    async def story() -> None:
        platform = SilentTarget()
        runner = ImpactRunner(platform, 1, InstantClock(), "host-a")
        vm = Vm(name="web-0", host="host-a")
        reboot = ImpactRequest(guid(2), "web", vm, EventType.REBOOT, Cause.MAINTENANCE, 1)
        runner.apply(Work((reboot,)))
        platform.outcomes.put_nowait(ImpactFailed("it does not start"))
        await asyncio.sleep(1)
        runner.apply(Work(cancel=tuple(runner.running())))
        (begun,) = runner.running()
        for may_start in (False, True):
            runner.apply(Work(cancel=(replace(begun, may_start=may_start),)))
            await asyncio.sleep(RECOVER_AGAIN_SECONDS + 1)
        assert [may_start for *_, may_start in platform.recovered] == [False, True]
        assert runner.running() == []

    with asyncio.Runner(loop_factory=JumpingLoop) as loop:
        loop.run(story())


class SlowCommand:
    """Takes the whole grace period to end."""

    has_ended = False

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(COMMAND_GRACE_SECONDS)
            self.has_ended = True
        return ImpactResult()


def test_daemon_that_stops_waits_for_longer_than_a_command_takes() -> None:
    """A command that it does not wait for acts on the VM without it."""

    async def story() -> None:
        command = SlowCommand()
        runner = ImpactRunner(command, 1, InstantClock())
        vm = Vm(name="web-0", id=guid(5).lower(), host="host-a")
        reboot = ImpactRequest(guid(1), "web", vm, EventType.REBOOT, Cause.RESTART, 1)
        runner.apply(Work((reboot,)))
        await asyncio.sleep(1)
        await runner.stop()
        assert command.has_ended

    with asyncio.Runner(loop_factory=JumpingLoop) as loop:
        loop.run(story())


@in_loop
async def test_impact_that_an_earlier_run_began_is_continued() -> None:
    platform = LeftBehind()
    async with fake_server() as server:
        async with running(Daemon(server, platform=platform)):
            await until(lambda: server.running)
            assert server.running == [{"event_id": guid(1), "vm": "web-0", "tries": 0}]
            server.want(tries=3)
            await until(lambda: platform.started)
            await until(lambda: [each["tries"] for each in server.running] == [3])
            platform.outcomes.put_nowait(ImpactResult())
            await until(lambda: server.results)
            server.want("web-1", event=2)
            await until(lambda: [each["vm"] for each in server.running] == ["web-1"])
        assert platform.recovered == []


@in_loop
async def test_vm_is_known_as_moving_while_it_is_moved_and_no_longer() -> None:
    """The relay ends its long polls, which would have no answer on the new host."""
    moves, platform = Moves(), FakePlatform()
    runner = ImpactRunner(platform, 4, InstantClock(), "host-a", moves)
    vm = Vm(name="web-0", id=guid(5), host="host-a")
    reboot = ImpactRequest(guid(1), "web", vm, EventType.REBOOT, Cause.RESTART, 1)
    redeploy = ImpactRequest(guid(2), "web", vm, EventType.REDEPLOY, Cause.REDEPLOY, 1)
    for request, is_moving in ((reboot, False), (redeploy, True)):
        runner.apply(Work(impacts=(request,)))
        await until(partial(operator.contains, platform.started, request))
        assert moves.is_moving(guid(5).lower()) is is_moving
        platform.outcomes.put_nowait(ImpactResult())
        await until(lambda: all(each.result for each in runner.running()))
        assert not moves.is_moving(guid(5).lower())


@in_loop
async def test_vm_that_a_refused_daemon_has_stopped_is_recovered_when_it_is_served_again() -> None:
    """A clone of its machine was started and stopped, and the event was completed meanwhile."""
    platform = LeftBehind()
    runner = ImpactRunner(platform, 1, InstantClock(), "host-a")
    vm = Vm(name="web-0", host="host-a")
    runner.apply(Work((ImpactRequest(guid(2), "web", vm, EventType.REBOOT, Cause.MAINTENANCE, 1),)))
    await until(lambda: platform.started)
    runner.cancel_all()
    begun = RunningImpact(guid(2), "web-0", tries=0)
    assert (runner.running(), platform.recovered) == ([begun], [])

    runner.apply(Work(cancel=(begun,)))
    await until(lambda: platform.recovered)
    assert platform.recovered == [("host-a", guid(2), "web-0", True)]
    platform.go.set()


@in_loop
async def test_impact_that_succeeded_before_the_daemon_was_refused_does_not_run_again() -> None:
    """Its result was not recorded: a clone was seen at that moment, and stopped since."""
    platform = FakePlatform()
    runner = ImpactRunner(platform, 1, InstantClock(), "host-a")
    vm = Vm(name="web-0", host="host-a")
    reboot = ImpactRequest(guid(1), "web", vm, EventType.REBOOT, Cause.RESTART, tries=1)
    runner.apply(Work((reboot,)))
    await until(lambda: platform.started)
    platform.outcomes.put_nowait(ImpactResult(detail="rebooted"))
    await until(lambda: runner.running()[0].result)
    runner.cancel_all()

    runner.apply(Work((dataclasses.replace(reboot, tries=2),)))
    assert runner.running() == [RunningImpact(guid(1), "web-0", 2, ImpactResult(detail="rebooted"))]
    assert platform.started == [reboot]
