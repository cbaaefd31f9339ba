"""Where a VM may move to, as a server that knows all hosts decides."""

import asyncio

import pytest
from msgspec.structs import replace

from forewarn.core.event import Cause, EventType, Impact, ImpactState
from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.engine.managed_hosts import HOST_KEY, MANAGED_HOST, HostedVm, ManagedHost
from forewarn.engine.record import SCOPE
from forewarn.errors import ImpactFailed
from forewarn.lab.clock import VirtualClock
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.base import Record
from forewarn.store.memory import MemoryStore
from forewarn.web.service import Service, build_service
from tests.builders import NOON, vm
from tests.unit.engine.hostd_world import GIB, World, reported, run
from tests.work_count import work_of, work_of_turns

RUNNING, OFF = HostedVm(GIB, is_running=True), HostedVm(GIB, is_running=False)
EVENT_ID = "00000000-0000-4000-8000-000000000001"


def guid(host: int, number: int) -> str:
    return f"00000000-0000-4000-8000-{host * 1000 + number:012x}"


def fleet_of(hosts: int, vms: int) -> Service:
    """Hosts in contact, each with as many VMs; every second VM is off."""
    service = build_service(MemoryStore(), VirtualClock(NOON), Timing(), lambda: EVENT_ID)
    engine = service.engine
    engine.learn(Record("lease/server/alive", b"", 1))
    for host in range(hosts):
        name, known = f"host-{host}", dict[str, HostedVm]()
        for number in range(vms):
            known[guid(host, number)] = OFF if number % 2 else RUNNING
            only = vm(f"vm-{host}-{number}", id=guid(host, number), host=name)
            engine.learn(
                Record(f"scope/{only.name}/", SCOPE.encode(Scope(only.name, vms=(only,))), 1)
            )
        report(service, host, known)
    return service


def request_of(service: Service, name: str) -> ImpactRequest:
    moved = service.engine.board.find_vm(name)[1]
    return ImpactRequest(EVENT_ID, name, moved, EventType.REDEPLOY, Cause.REDEPLOY, 1)


def rank(service: Service, name: str) -> tuple[str, ...]:
    return service.hosts._targets.rank(request_of(service, name), {})


def report(service: Service, host: int, vms: dict[str, HostedVm]) -> None:
    learn(service, ManagedHost(f"host-{host}", "s1", "alive", NOON, memory_bytes=64 * GIB, vms=vms))


def learn(service: Service, record: ManagedHost) -> None:
    name, engine = record.host, service.engine
    content, later = MANAGED_HOST.encode(record), engine.records.get(HOST_KEY.format(name)).revision
    engine.learn(Record(HOST_KEY.format(name), content, later + 1))


class OwnPlatform:
    """What the server itself can do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def run_impact(self, request: ImpactRequest) -> ImpactResult:
        self.asked.append(request.vm.name)
        return ImpactResult()


def test_server_begins_a_move_of_its_own_in_the_moment_in_which_its_lease_was_checked() -> None:
    """A process that is stopped in between would move a VM that another server has moved."""
    service, own = fleet_of(0, 0), OwnPlatform()
    service.engine.learn(
        Record("scope/a/", SCOPE.encode(Scope("a", vms=(vm("a", host="host-z"),))), 1)
    )
    service.hosts.local = own
    move = service.hosts.run_impact(request_of(service, "a"))
    with pytest.raises(StopIteration):
        move.send(None)
    assert own.asked == ["a"]


def test_work_of_choosing_a_host_does_not_grow_with_the_vms_of_the_fleet() -> None:
    """Many moves begin together, and polls wait meanwhile."""

    async def work_with(vms: int) -> int:
        service = fleet_of(20, vms)

        async def choose() -> None:
            assert len(rank(service, "vm-0-0")) == 19

        return await work_of(choose())

    async def main() -> None:
        few = await work_with(1)
        assert await work_with(50) < 1.2 * few

    asyncio.run(main())


def test_host_with_more_running_vms_has_less_free_memory() -> None:
    service = fleet_of(3, 1)
    assert rank(service, "vm-0-0") == ("host-1", "host-2")
    first, second = (guid(1, number) for number in (0, 1))
    report(service, 1, {first: RUNNING, second: RUNNING})
    assert rank(service, "vm-0-0") == ("host-2", "host-1")
    report(service, 1, {first: RUNNING, second: OFF})
    assert rank(service, "vm-0-0") == ("host-1", "host-2")


def test_host_that_runs_the_vm_already_has_room_for_it() -> None:
    service, big = fleet_of(3, 1), RUNNING._replace(memory_bytes=60 * GIB)
    report(service, 0, {guid(0, 0): big})
    report(service, 2, {guid(2, 0): big})
    assert rank(service, "vm-0-0") == ("host-1",)
    report(service, 2, {guid(0, 0): big})
    assert rank(service, "vm-0-0") == ("host-2", "host-1")


def test_move_fails_while_no_other_host_is_connected() -> None:
    """Without targets, a daemon would restart the VM in place: its user wants it on another host,
    and one may be connected at the next try.
    """
    service = fleet_of(3, 1)
    for host in ("host-1", "host-2"):
        learn(service, ManagedHost(host, "s1", "", NOON, memory_bytes=64 * GIB))

    with pytest.raises(ImpactFailed, match=r"^0 of 2 other hosts answer, and none has 1024 MiB"):
        rank(service, "vm-0-0")


def test_vm_of_the_only_managed_host_has_no_targets() -> None:
    """So its daemon may restart it in place. A host that was forgotten is no target."""
    service = fleet_of(1, 1)
    learn(service, ManagedHost("host-1", "", "", NOON))
    learn(service, ManagedHost("host-2", "", "", NOON, unreported_since=NOON))
    assert rank(service, "vm-0-0") == ()


@pytest.mark.parametrize(
    ("state", "targets"),
    [
        (ImpactState.CLAIMED, ("host-2", "host-1")),
        (ImpactState.BOOTING, ("host-1", "host-2")),
    ],
)
def test_vm_that_is_moved_to_a_host_takes_memory_there(
    state: ImpactState, targets: tuple[str, ...]
) -> None:
    """Another server has chosen that host, which reports a VM that it does not run yet."""
    service = fleet_of(4, 1)
    report(service, 1, {guid(1, 0): RUNNING, guid(3, 0): OFF})
    assert rank(service, "vm-0-0") == ("host-1", "host-2", "host-3"), "nothing moves it"

    scope = service.engine.board.scopes["vm-3-0"].scope
    impact = Impact(EVENT_ID, "vm-3-0", EventType.REDEPLOY, Cause.REDEPLOY, NOON, state, "other")
    service.engine.learn(
        Record("scope/vm-3-0/", SCOPE.encode(replace(scope, impacts=(impact,))), 2)
    )
    assert tuple(each for each in rank(service, "vm-0-0") if each != "host-3") == targets

    service.engine.learn(Record("scope/vm-3-0/", SCOPE.encode(scope), 3))
    assert rank(service, "vm-0-0") == ("host-1", "host-2", "host-3")


def test_moves_that_begin_together_leave_turns_to_polls() -> None:
    """A choice looks at each host, so that many of them take long."""

    async def longest_turn(world: World, vms: int) -> int:
        server, names = world.servers[0], [f"vm-{vms}-{number}" for number in range(vms)]
        daemon = await world.daemon("host-a", *map(reported, names))
        for number in range(600):
            record = ManagedHost(f"other-{number}", "s1", "server-1", NOON, memory_bytes=GIB)
            key, content = HOST_KEY.format(record.host), MANAGED_HOST.encode(record)
            server.engine.learn(Record(key, content, server.board.revision + 1))

        async def move() -> None:
            await asyncio.gather(*(server.operations.redeploy(vm, by="ann") for vm in names))
            await world.settle()

        turns = await work_of_turns(move())
        handed_out = {impact["vm"]["name"] for impact in (await daemon.work())["impacts"]}
        assert handed_out >= {*names}
        return max(turns)

    async def test(world: World) -> None:
        few = await longest_turn(world, 2)
        assert await longest_turn(world, 20) < 1.5 * few

    run(test)
