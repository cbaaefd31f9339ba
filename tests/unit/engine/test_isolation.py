"""A bug with one record is logged, and stops the work on no other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from forewarn.core.command import Claim, Finish, Release, Tick
from forewarn.core.event import EndReason, EventType, Impact
from forewarn.core.fleet import Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.isolation import isolated
from forewarn.engine.lease import ClaimReleaser
from forewarn.engine.log_throttle import KEYS_MAX, ThrottledLog
from forewarn.engine.operations import Operations
from forewarn.engine.worker import Worker
from forewarn.errors import HostUnreachable, Invalid
from forewarn.fleetfile.parser import Fleet
from forewarn.lab.clock import VirtualClock
from forewarn.log import facts_of
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import Lease
from forewarn.store.memory import MemoryStore
from tests.builders import MINUTE, NOON, SECOND, guid, vm
from tests.unit.engine import hostd_world
from tests.unit.engine.buggy_engine import BuggyEngine
from tests.unit.engine.hostd_world import reported

AB = Fleet(
    scopes=tuple(
        Scope(name=name, kind=ScopeKind.VM, vms=(vm(name, host=f"host-{name}"),)) for name in "ab"
    ),
    hosts=(),
)


class World:
    """A server with two standalone VMs, `a` and `b`, and a platform that does everything at once.

    `begun` are the VMs of the impacts that it was asked for, `done` those of the ones that ended.
    The host of `a` is unreachable the first `unreachable` times.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock(NOON)
        self.store = MemoryStore()
        self.engine = BuggyEngine(self.store, self.clock, Timing())
        ids = iter(range(1, 100))
        self.operations = Operations(self.engine, lambda: guid(next(ids)))
        self.begun: list[str] = []
        self.done: list[str] = []
        self.unreachable = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        self.begun.append(request.vm.name)
        if request.vm.name == "a" and self.unreachable:
            self.unreachable -= 1
            raise HostUnreachable("its host is unreachable")
        await self.may_end.wait()
        self.done.append(request.vm.name)
        return ImpactResult()

    async def start(self) -> None:
        await self.engine.load()
        await self.operations.apply(AB, by="test")

    @asynccontextmanager
    async def working(self, **options: Any) -> AsyncIterator[Worker]:
        """A worker that must not end before the block does."""
        worker = Worker(self.engine, self, worker="w1", impact_limit=MINUTE, **options)
        task = asyncio.create_task(worker.run())
        await self.clock.advance(timedelta(0))
        try:
            yield worker
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def restart(self) -> None:
        """Restart both, which nobody polls for: without notice."""
        for name in "ab":
            await self.operations.restart(name, by="ann")
        await self.clock.advance(SECOND)


def run(test: Callable[[World], Any]) -> None:
    async def main() -> None:
        world = World()
        await world.start()
        await test(world)

    asyncio.run(main())


def bugs_in(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    """What was logged with a traceback, and the scope or host that it names."""
    facts = ((line, facts_of(line)) for line in caplog.records if line.exc_info)
    return [(line.message, found.get("scope", found.get("host"))) for line, found in facts]


def make_log() -> ThrottledLog:
    return ThrottledLog(VirtualClock(NOON))


def test_bug_is_logged_with_its_traceback_and_what_it_is_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with isolated(make_log(), "bug while doing a thing", scope="a") as isolation:
        raise KeyError("a bug")

    assert isolation.has_failed
    (line,) = caplog.records
    assert (line.levelname, line.message) == ("ERROR", "bug while doing a thing")
    assert line.exc_info is not None
    assert line.exc_info[0] is KeyError
    assert facts_of(line) == {"scope": "a"}


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_cancellation_is_no_bug(error: type[BaseException]) -> None:
    """Else a worker could not be stopped."""
    with pytest.raises(error), isolated(make_log(), "bug while doing a thing"):
        raise error


def test_expected_error_that_is_not_handled_is_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    with isolated(make_log(), "bug while doing a thing"):
        raise Invalid("unexpected here")

    assert bugs_in(caplog) == [("bug while doing a thing", None)]


def test_code_after_one_without_a_bug_sees_that() -> None:
    with isolated(make_log(), "bug while doing a thing") as isolation:
        pass
    assert not isolation.has_failed


def test_lasting_bug_is_logged_twice_a_minute_for_each_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some loops look once a second: the tracebacks would hide everything else in the log."""

    async def test() -> None:
        clock = VirtualClock(NOON)
        throttled_log = ThrottledLog(clock)
        for _ in range(60):
            for scope in "ab":
                with isolated(throttled_log, "bug while doing a thing", scope=scope):
                    raise KeyError("a bug")
            await clock.advance(SECOND)

    asyncio.run(test())
    assert [facts_of(line) for line in caplog.records] == [
        {"scope": "a"},
        {"scope": "b"},
        {"scope": "a", "suppressed": 29},
        {"scope": "b", "suppressed": 29},
    ]


def test_number_of_bugs_that_are_logged_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """A bug may show with every record of a large fleet. Later, new ones are logged again."""

    async def test() -> None:
        clock = VirtualClock(NOON)
        throttled_log = ThrottledLog(clock)

        def fail(first: int) -> int:
            caplog.clear()
            for number in range(first, first + 2 * KEYS_MAX):
                with isolated(throttled_log, "bug while doing a thing", scope=str(number)):
                    raise KeyError("a bug")
            return len(caplog.records)

        assert fail(0) == KEYS_MAX + 1
        await clock.advance(MINUTE)
        assert fail(5 * KEYS_MAX) == KEYS_MAX + 1

    asyncio.run(test())


def test_bug_while_one_impact_starts_does_not_end_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is tried again after half a minute, and not at once."""

    def host_of(vm: Vm, impact: Impact) -> str:
        if vm.name == "a":
            raise KeyError("a bug")
        return ""

    async def test(world: World) -> None:
        async with world.working(host_of=host_of):
            await world.restart()
            await world.clock.advance(20 * SECOND)
            assert world.done == ["b"]
            assert bugs_in(caplog) == [("bug while starting an impact", "a")]
            await world.clock.advance(20 * SECOND)
            assert len(bugs_in(caplog)) == 2

    run(test)


def test_bug_while_one_impact_starts_does_not_use_up_the_limit_of_impacts() -> None:
    """The one that can start comes after it, in the same scope."""
    both = Scope(name="web", kind=ScopeKind.AVAILABILITY_SET, vms=(vm("a"), vm("b")))

    def host_of(vm: Vm, impact: Impact) -> str:
        if vm.name == "a":
            raise KeyError("a bug")
        return ""

    async def test(world: World) -> None:
        await world.operations.apply(Fleet(scopes=(both,), hosts=()), by="test")
        async with world.working(host_of=host_of, impacts_max=1):
            await world.restart()
            assert world.done == ["b"]

    run(test)


def test_impact_whose_result_met_a_bug_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """It has succeeded. The result is recorded when the bug is gone."""

    async def test(world: World) -> None:
        world.engine.bugs = {("a", Finish)}
        async with world.working():
            await world.restart()
            await world.clock.advance(60 * MINUTE)
            assert world.done == ["a", "b"]
            assert set(bugs_in(caplog)) == {("bug while recording the result of an impact", "a")}
            world.engine.bugs.clear()
            await world.clock.advance(30 * SECOND)
            assert world.engine.board.scopes["a"].scope.impacts == ()
            assert world.done == ["a", "b"]

    run(test)


def test_release_that_is_recorded_again_after_a_bug_releases_no_later_try() -> None:
    """Its first commit had released the impact, and this server has claimed it again."""

    async def test(world: World) -> None:
        world.engine.late_bugs, world.unreachable = {("a", Release)}, 1
        world.may_end.clear()
        async with world.working():
            await world.restart()
            await world.clock.advance(10 * SECOND)
            world.may_end.set()
            await world.clock.advance(60 * MINUTE)
            assert (world.begun.count("a"), world.done.count("a")) == (2, 1)
            assert world.engine.board.scopes["a"].scope.impacts == ()

    run(test)


def test_impact_that_met_a_bug_before_it_ran_is_tried_again_after_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its server lives, so no other server would ever take it over."""

    async def test(world: World) -> None:
        world.engine.late_bugs = {("a", Claim)}
        async with world.working():
            await world.restart()
            assert world.done == ["b"]
            assert bugs_in(caplog) == [("bug while running an impact", "a")]
            world.engine.late_bugs.clear()
            await world.clock.advance(58 * SECOND)
            assert world.done == ["b"]
            await world.clock.advance(2 * SECOND)
            assert world.done == ["b", "a"]
            assert world.engine.board.scopes["a"].scope.impacts == ()

    run(test)


def test_impact_whose_tries_all_meet_a_bug_fails_after_20_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its VM would wait for it forever."""

    async def test(world: World) -> None:
        world.engine.late_bugs = {("a", Claim)}
        async with world.working():
            await world.restart()
            await world.clock.advance(60 * MINUTE)
            (ended,) = world.engine.board.scopes["a"].scope.ended
            assert ended.how is EndReason.FAILED
            assert len(bugs_in(caplog)) == 20 + 1  # the last claim only finds that it failed
            await world.clock.advance(60 * MINUTE)
            assert len(bugs_in(caplog)) == 20 + 1
            assert world.done == ["b"]

    run(test)


def test_lasting_bug_while_an_impact_is_claimed_is_logged_twice_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is claimed again each second."""

    async def test(world: World) -> None:
        world.engine.bugs = {("a", Claim)}
        async with world.working():
            await world.restart()
            caplog.clear()
            await world.clock.advance(2 * MINUTE)
            assert bugs_in(caplog) == 4 * [("bug while running an impact", "a")]

    run(test)


def test_bug_while_an_impact_is_released_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        world.engine.late_bugs, world.engine.bugs = {("a", Claim)}, {("a", Release)}
        async with world.working():
            await world.restart()
            assert world.done == ["b"]
            assert bugs_in(caplog) == [
                ("bug while running an impact", "a"),
                ("bug while releasing an impact", "a"),
            ]

    run(test)


def test_bug_while_one_scope_is_looked_at_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown VM stops none either: it may have left the fleet meanwhile."""
    is_wrong, is_handled = False, False

    def handles(vm: Vm, impact: Impact) -> bool:
        if is_wrong and vm.name == "a":
            raise KeyError("a bug")
        return is_handled

    async def test(world: World) -> None:
        nonlocal is_wrong, is_handled
        async with world.working(handles=handles) as worker:
            await world.restart()
            assert world.done == []
            is_wrong = is_handled = True
            worker.look_at(["gone", "a", "b"])
            await world.clock.advance(SECOND)
            assert world.done == ["b"]
            assert ("bug while looking at a scope", "a") in bugs_in(caplog)

    run(test)


@pytest.mark.parametrize("number", range(1, 9))
def test_bug_with_one_impact_stops_no_other_wherever_it_shows(number: int) -> None:
    """Whether a worker handles an impact is asked in several places."""
    asked = 0

    def handles(vm: Vm, impact: Impact) -> bool:
        nonlocal asked
        asked += vm.name == "a"
        if vm.name == "a" and asked == number:
            raise KeyError("a bug")
        return True

    async def test(world: World) -> None:
        async with world.working(handles=handles):
            await world.restart()
            await world.clock.advance(MINUTE)
            assert sorted(world.done) == ["a", "b"]

    run(test)


def test_bug_while_one_scope_is_processed_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        world.engine.bugs = {("a", Tick)}
        async with world.working():
            for name in "ab":
                await world.operations.maintain(f"host-{name}", type=EventType.REBOOT, by="ann")
            await world.clock.advance(16 * MINUTE)
            assert world.done == ["b"]
            assert set(bugs_in(caplog)) == {("bug while processing a scope", "a")}
            assert len(bugs_in(caplog)) <= 3  # twice a minute

    run(test)


def test_bug_while_claims_of_one_scope_are_released_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(world: World) -> None:
        async with world.working():
            world.may_end.clear()
            await world.restart()
            await world.store.expire("server/w1")
        world.engine.bugs = {("a", Release)}
        releasing = asyncio.create_task(ClaimReleaser(world.engine).run("w2"))
        await world.clock.advance(MINUTE)

        held = [
            name
            for name, published in world.engine.board.scopes.items()
            if any(impact.is_held for impact in published.scope.impacts)
        ]
        assert (held, releasing.done()) == (["a"], False)
        assert ("bug while releasing claims", "a") in bugs_in(caplog)
        releasing.cancel()

    run(test)


def test_bug_while_clocks_are_compared_does_not_end_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The comparison is tried again."""

    async def test(world: World) -> None:
        other = await world.engine.store.lease("server/w2", 1e6)
        assert other is not None
        world.engine.bug_in_update = "clock/"
        async with world.working():
            await world.clock.advance(10 * SECOND)
            assert bugs_in(caplog) == [("bug while comparing clocks", None)]
            assert [key for key, _ in world.engine.records.values("clock")] == ["clock/w1/"]

    run(test)


class BuggyPolls(dict[str, float]):
    """It cannot be read."""

    def get(self, *_: Any) -> Any:
        raise KeyError("a bug")


def test_bug_while_one_host_is_looked_at_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: hostd_world.World) -> None:
        server = world.servers[0]
        await world.daemon("host-a", reported("web-0"))
        await world.daemon("host-b", reported("db-0"))
        find_lease, errors = server.hosts.get_lease, [KeyError("a bug")]

        def find_lease_later() -> Lease | None:
            if errors:
                raise errors.pop()
            return find_lease()

        server.hosts.get_lease = find_lease_later
        await world.pass_time(15 * SECOND)

        assert bugs_in(caplog) == [("bug while looking at a host", "host-a")]
        assert (server.is_unreachable("host-a"), server.is_unreachable("host-b")) == (False, True)
        assert not server.has_ended

    hostd_world.run(test)


def test_bug_while_unserved_vms_are_looked_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """That work ends the server when it ends."""

    async def test(world: hostd_world.World) -> None:
        server = world.servers[0]
        await world.daemon("host-a", reported("web-0", scope="web"))
        looking = asyncio.create_task(server.hosts.unserved.run())
        for _ in range(50):
            server.hosts.unserved.add_error("web-0", 400, "no header")
            await world.pass_time(SECOND)
        server.board.polled = BuggyPolls()
        await world.pass_time(10 * SECOND)

        assert bugs_in(caplog) == [("bug while looking for unserved VMs", None)]
        assert not looking.done()
        looking.cancel()

    hostd_world.run(test)
