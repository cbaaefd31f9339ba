"""The libvirt platform on libvirt's own test driver: which host a VM moves to, and which one next
if that fails.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.errors import ImpactFailed
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.libvirt.marker import mark
from tests.builders import guid
from tests.unit.platform.libvirt.libvirt_world import (
    MORE_HOSTS,
    NODE_MIB,
    NOT_LIVE,
    OFF,
    RUNNING,
    Guest,
    Host,
    LibvirtWorld,
    is_marked,
    order,
    refusal,
)

pytestmark = pytest.mark.system

REDEPLOY = order(EventType.REDEPLOY, Cause.REDEPLOY)
AGAIN = order(EventType.REDEPLOY, Cause.REDEPLOY, tries=2)
WAIT_SECONDS_MAX = 30


@pytest.fixture
def world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path, MORE_HOSTS[:3])


@pytest.fixture
def large_world(tmp_path: Path) -> LibvirtWorld:
    return LibvirtWorld(tmp_path, MORE_HOSTS)


class Target(Host):
    """A host on which a defined domain has manners of its own."""

    def defineXML(self, xml: str) -> Guest:
        self.calls.append("defineXML")
        return Guest(self._connection.defineXML(xml), self, self._ways)


def refuse(number: int = libvirt.VIR_ERR_OPERATION_FAILED) -> Callable[[Any], None]:
    def way(handle: Any) -> None:
        raise refusal(number)

    return way


def connecting(world: LibvirtWorld, **hosts: Any) -> Callable[[str], Any]:
    """What opens connections: `host_b=…` stands in for the one to host-b."""
    own = {f"test:///{name.replace('_', '-')}": host for name, host in hosts.items()}
    return lambda uri: own.get(uri) or world.connect(uri)


def test_vm_moves_to_the_host_with_most_free_memory(world: LibvirtWorld) -> None:
    """The next host by name may be full."""
    world.run_vm("host-b", "db-0", 2, mib=1024)

    assert world.run_impact(REDEPLOY).host == "host-c"


def test_stopped_vms_need_no_memory(world: LibvirtWorld) -> None:
    world.run_vm("host-b", "db-0", 2, mib=1024).destroy()
    world.run_vm("host-c", "db-1", 3, mib=1)

    assert world.run_impact(REDEPLOY).host == "host-b"


def test_vm_that_fits_nowhere_stays_and_the_try_fails(world: LibvirtWorld) -> None:
    """A host that is overfull takes down other VMs, and one that is stopped for nothing is down."""
    for number, host in enumerate(("host-b", "host-c"), 2):
        world.run_vm(host, f"db-{number}", number, mib=NODE_MIB - 63)

    with pytest.raises(
        ImpactFailed, match=r"^2 of 2 other hosts answer, and none has 64 MiB of free memory"
    ):
        world.run_impact(REDEPLOY)
    assert world.state() == RUNNING


def test_host_that_does_not_answer_is_not_a_target(world: LibvirtWorld) -> None:
    def connect(uri: str) -> Any:
        if uri == "test:///host-b":
            threading.Event().wait()
        return world.connect(uri)

    assert world.run_impact(REDEPLOY, connect=connect, call_seconds_max=1).host == "host-c"


def test_scope_is_spread_over_hosts(world: LibvirtWorld) -> None:
    world.run_vm("host-c", "db-0", 2, mib=1024)

    done = world.run_impact(REDEPLOY, scope_hosts=lambda scope: ["host-a", "host-b"])

    assert done.host == "host-c"


def test_host_to_avoid_is_the_last_choice(world: LibvirtWorld) -> None:
    world.run_vm("host-c", "db-0", 2, mib=1024)

    assert world.run_impact(REDEPLOY, avoid=lambda: {"host-b": 1}).host == "host-c"


def test_given_targets_are_tried_in_their_order(world: LibvirtWorld) -> None:
    """The server has chosen; the VM's own host and one without a URI are not targets."""
    world.run_vm("host-c", "db-0", 2, mib=1024)
    given = order(EventType.REDEPLOY, targets=("host-z", "host-a", "host-c", "host-b"))

    assert world.run_impact(given).host == "host-c"


def test_target_that_the_fleet_does_not_list_is_used(world: LibvirtWorld) -> None:
    """The daemon of a host knows the other hosts only by their names in the request."""
    world.hosts = ["host-a"]

    assert world.run_impact(order(EventType.REDEPLOY, targets=("host-c",))).host == "host-c"


def test_failed_live_migration_is_tried_with_another_target(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"))

    def migrate(handle: Any) -> Any:
        if host.arguments["migrate3"][0] is world.on("host-b"):
            raise refusal(libvirt.VIR_ERR_INTERNAL_ERROR)
        return handle

    host = Host(world.on("host-a"), migrate3=migrate)

    done = world.run_impact(REDEPLOY, connect=connecting(world, host_a=host))

    assert done == ImpactResult(
        host="host-c",
        detail="host-b failed: libvirt of host-a: no; migrated live to host-c",
    )
    assert "shutdown" not in host.calls


def test_three_targets_are_tried_and_no_more(large_world: LibvirtWorld) -> None:
    host = Host(large_world.on("host-a"), migrate3=refuse())

    with pytest.raises(ImpactFailed) as failed:
        large_world.run_impact(REDEPLOY, connect=connecting(large_world, host_a=host))

    assert str(failed.value) == "; ".join(
        f"{target} failed: libvirt of host-a: no" for target in ("host-b", "host-c", "host-d")
    )
    assert large_world.state() == RUNNING
    assert not is_marked(large_world.web, guid(1)), "a VM that its owner stops would be started"


def test_migration_that_an_operator_aborts_is_not_repeated(world: LibvirtWorld) -> None:
    host = Host(world.on("host-a"), migrate3=refuse(libvirt.VIR_ERR_OPERATION_ABORTED))

    with pytest.raises(ImpactFailed, match=r"^host-b failed: libvirt of host-a: no$"):
        world.run_impact(REDEPLOY, connect=connecting(world, host_a=host))


def test_migration_that_failed_after_it_ended_is_not_repeated(world: LibvirtWorld) -> None:
    """The VM may run on the target: it is looked for there by the next try."""

    def migrate(handle: Any) -> None:
        world.on("host-b").defineXML(handle.XMLDesc()).create()
        handle.destroy()
        raise refusal(libvirt.VIR_ERR_MIGRATE_PERSIST_FAILED)

    host = Host(world.on("host-a"), migrate3=migrate)

    with pytest.raises(ImpactFailed, match=r"^host-b failed: libvirt of host-a: no$"):
        world.run_impact(REDEPLOY, connect=connecting(world, host_a=host))
    assert world.state() == OFF
    assert world.run_impact(AGAIN) == ImpactResult("host-b", "running on host-b", is_back=False)


def test_vm_that_one_target_refuses_to_start_starts_on_another(world: LibvirtWorld) -> None:
    """It is stopped once, and not started in between: the guest is down only once."""
    source = Host(world.on("host-a"))
    full = Target(world.on("host-b"), create=refuse())

    done = world.run_impact(REDEPLOY, connect=connecting(world, host_a=source, host_b=full))

    assert done == ImpactResult(
        host="host-c",
        detail=f"{NOT_LIVE}; the guest shut down by itself; host-b failed: libvirt of host-b: no;"
        " moved to host-c",
        is_back=False,
    )
    assert [verb for verb in source.calls if verb in ("shutdown", "create")] == ["shutdown"]
    assert [world.names_on(host) for host in world.hosts] == [[], [], ["web-0"]]
    assert world.state("host-c") == RUNNING


def test_target_that_refuses_the_definition_does_not_stop_the_vm(world: LibvirtWorld) -> None:
    class Strict(Host):
        def defineXML(self, xml: str) -> Any:
            raise refusal(libvirt.VIR_ERR_XML_ERROR)

    strict = {name: Strict(world.on("host-b")) for name in ("host_b", "host_c")}

    with pytest.raises(ImpactFailed, match=r"^host-b failed: .*; host-c failed: "):
        world.run_impact(REDEPLOY, connect=connecting(world, **strict))
    assert world.state() == RUNNING


def test_vm_that_no_target_starts_runs_on_its_old_host(world: LibvirtWorld) -> None:
    full = {
        name.replace("-", "_"): Target(world.on(name), create=refuse())
        for name in ("host-b", "host-c")
    }

    with pytest.raises(ImpactFailed, match=r"^host-b failed: .*; host-c failed: "):
        world.run_impact(REDEPLOY, connect=connecting(world, **full))
    assert [world.names_on(host) for host in world.hosts] == [["web-0"], [], []]
    assert world.state() == RUNNING


def test_vm_whose_start_got_no_answer_starts_nowhere_else(world: LibvirtWorld) -> None:
    """Two copies on one disk destroy it. The try after this one finds out where it runs."""
    go = threading.Event()

    def hang(handle: Any) -> None:
        go.wait(WAIT_SECONDS_MAX)
        handle.create()

    slow = Target(world.on("host-b"), create=hang)
    try:
        with pytest.raises(ImpactFailed, match="libvirt of host-b did not answer within 1 sec"):
            world.run_impact(REDEPLOY, connect=connecting(world, host_b=slow), call_seconds_max=1)
        assert (world.state(), world.names_on("host-c")) == (OFF, [])
    finally:
        go.set()
    asyncio.run(until(lambda: world.state("host-b") == RUNNING))

    assert world.run_impact(AGAIN).host == "host-b"
    assert [world.names_on(host) for host in world.hosts] == [[], ["web-0"], []]


class SilentTarget(Target):
    """It starts a domain only after `go`, and answers nothing else meanwhile."""

    def __init__(self, connection: Any) -> None:
        self.go, self.is_silent = threading.Event(), False
        super().__init__(connection, create=self.create)

    def create(self, handle: Any) -> None:
        self.is_silent = True
        self.go.wait(WAIT_SECONDS_MAX)
        self.is_silent = False
        handle.create()

    def lookupByName(self, name: str) -> Guest:
        if self.is_silent:
            self.go.wait(WAIT_SECONDS_MAX)
        return super().lookupByName(name)


@pytest.mark.parametrize(
    "retry",
    [
        order(EventType.REDEPLOY, Cause.REDEPLOY, tries=2, targets=("host-c",)),
        order(EventType.REDEPLOY, Cause.REDEPLOY, tries=2),
        replace(order(EventType.REBOOT, Cause.RESTART), event_id=guid(2)),
    ],
    ids=["another target", "no target", "another event"],
)
def test_vm_that_may_run_on_a_silent_target_starts_nowhere(
    world: LibvirtWorld, retry: ImpactRequest
) -> None:
    """The daemon of a host knows only the targets of the last request, and two copies on one disk
    destroy it.
    """
    world.hosts = []
    silent = SilentTarget(world.on("host-b"))
    connect = connecting(world, host_b=silent)
    first = order(EventType.REDEPLOY, Cause.REDEPLOY, targets=("host-b", "host-c"))
    try:
        with pytest.raises(ImpactFailed, match="libvirt of host-b did not answer"):
            world.run_impact(first, connect=connect, call_seconds_max=1)
        with pytest.raises(ImpactFailed, match=r"^web-0 may run on host-b, which does not answer:"):
            world.run_impact(retry, connect=connect, call_seconds_max=1)
        assert (world.state(), world.names_on("host-c")) == (OFF, [])
    finally:
        silent.go.set()
    asyncio.run(until(lambda: world.state("host-b") == RUNNING))

    done = world.run_impact(retry, connect=connecting(world, host_b=Target(world.on("host-b"))))

    assert (done.host, world.state("host-b"), world.names_on("host-c")) == ("host-b", RUNNING, [])


def test_target_that_refused_to_start_the_vm_is_not_asked_again(world: LibvirtWorld) -> None:
    """Only the last target may run it."""
    silent = SilentTarget(world.on("host-c"))
    full = Target(world.on("host-b"), create=refuse())
    try:
        with pytest.raises(ImpactFailed, match="libvirt of host-c did not answer"):
            world.run_impact(
                REDEPLOY, connect=connecting(world, host_b=full, host_c=silent), call_seconds_max=1
            )
    finally:
        silent.go.set()
    asyncio.run(until(lambda: world.state("host-c") == RUNNING))
    world.hosts = []

    assert world.run_impact(AGAIN).host == "host-c"


def test_vm_that_a_host_without_a_uri_may_run_is_not_started(world: LibvirtWorld) -> None:
    world.web.destroy()
    restart = replace(order(EventType.REBOOT, Cause.RESTART), may_run_on=("host-z",))

    with pytest.raises(ImpactFailed, match=r"^web-0 may run on host-z, .*: it has no libvirt_uri"):
        world.run_impact(restart)
    assert world.state() == OFF


def test_daemon_moves_a_vm_only_to_the_targets_of_its_request(world: LibvirtWorld) -> None:
    """A host that may run the VM is only looked at: the server has not chosen it."""
    world.hosts = []

    done = world.run_impact(
        replace(order(EventType.REDEPLOY, Cause.REDEPLOY), may_run_on=("host-b",))
    )

    assert (done.host, world.state(), world.names_on("host-b")) == ("", RUNNING, [])


@pytest.mark.parametrize("is_defined_here", [False, True])
def test_vm_that_another_host_reports_running_is_removed_there(
    world: LibvirtWorld, is_defined_here: bool
) -> None:
    """It was moved by hand: a deletion that looks on its old host only would change nothing."""
    world.hosts = []
    world.on("host-b").defineXML(world.web.XMLDesc()).create()
    world.web.destroy()
    if not is_defined_here:
        world.web.undefine()

    done = world.run_impact(replace(order(EventType.TERMINATE), may_run_on=("host-b",)))

    assert done.host == "host-b"
    assert [world.names_on(host) for host in ("host-a", "host-b")] == [[], []]


def test_try_after_a_crash_removes_what_the_last_one_defined(world: LibvirtWorld) -> None:
    """It may choose another target now, and a second definition could be started by mistake."""
    mark(world.web, guid(1), "host-a", "host-b")
    world.on("host-b").defineXML(world.web.XMLDesc())
    world.run_vm("host-b", "db-0", 2, mib=1024)

    assert world.run_impact(AGAIN).host == "host-c"
    assert world.names_on("host-b") == ["db-0"]


def test_definition_of_another_owner_is_not_removed(world: LibvirtWorld) -> None:
    world.on("host-b").defineXML(world.web.XMLDesc())
    world.run_vm("host-b", "db-0", 2, mib=1024)

    assert world.run_impact(AGAIN).host == "host-c"
    assert world.names_on("host-b") == ["db-0", "web-0"]


def test_moved_vm_is_not_moved_again_when_the_fleet_knows_its_new_host(
    world: LibvirtWorld,
) -> None:
    """The daemon of the new host may report the VM before the old one's result is known."""
    mark(world.web, guid(1), "host-a")
    moved = world.on("host-b").defineXML(world.web.XMLDesc())
    moved.create()
    world.web.destroy()

    done = world.run_impact(order(EventType.REDEPLOY, tries=2, host="host-b"))

    assert done == ImpactResult("host-b", "running on host-b", is_back=False)
    assert world.names_on("host-a") == []
    assert not is_marked(moved, guid(1))


class Migrations:
    """Live migrations that take until `go`, and the most that ran at a time."""

    def __init__(self, world: LibvirtWorld) -> None:
        self.go, self.lock = threading.Event(), threading.Lock()
        self.running, self.most, self.targets = 0, 0, list[str]()
        self.names = {id(world.on(host)): host for host in world.hosts}

    def source(self, connection: Any) -> Host:
        class Source(Host):
            def lookupByName(host, name: str) -> Guest:
                guest = super().lookupByName(name)
                guest._ways["migrate3"] = lambda handle: self.run(handle, host)
                return guest

        return Source(connection)

    def run(self, handle: Any, host: Host) -> Any:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.targets.append(self.names[id(host.arguments["migrate3"][0])])
        self.go.wait(WAIT_SECONDS_MAX)
        with self.lock:
            self.running -= 1
        return handle


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not is_so():
            await asyncio.sleep(0.005)


def moves(names: list[str], host: str = "host-a", **more: Any) -> list[ImpactRequest]:
    return [order(EventType.REDEPLOY, name=name, host=host, **more) for name in names]


def test_vms_of_a_scope_that_move_together_spread(world: LibvirtWorld) -> None:
    """Neither of them is where it goes yet when the other one chooses."""
    world.run_vm("host-a", "web-1", 2)
    world.run_vm("host-c", "db-0", 3, mib=1024)
    migrations = Migrations(world)

    async def main() -> None:
        connect = connecting(world, host_a=migrations.source(world.on("host-a")))
        platform = world.platform(connect)
        work = [
            asyncio.create_task(platform.run_impact(each)) for each in moves(["web-0", "web-1"])
        ]
        await until(lambda: migrations.running == 2)
        migrations.go.set()
        results = await asyncio.gather(*work)
        assert sorted(result.host for result in results) == ["host-b", "host-c"]

    asyncio.run(main())


def test_memory_of_a_vm_on_its_way_is_not_given_twice(world: LibvirtWorld) -> None:
    world.hosts = ["host-a", "host-b"]
    world.run_vm("host-a", "web-1", 2)
    world.run_vm("host-b", "db-0", 3, mib=NODE_MIB - 100)
    migrations = Migrations(world)

    async def main() -> None:
        connect = connecting(world, host_a=migrations.source(world.on("host-a")))
        platform = world.platform(connect)
        first, second = moves(["web-0", "web-1"])
        work = asyncio.create_task(platform.run_impact(first))
        await until(lambda: migrations.running == 1)
        with pytest.raises(ImpactFailed, match="none has 64 MiB of free memory"):
            await platform.run_impact(second)
        migrations.go.set()
        await work

    asyncio.run(main())


@pytest.mark.parametrize("way", ["leave", "arrive"])
def test_each_host_has_a_limit_of_migrations(large_world: LibvirtWorld, way: str) -> None:
    """More at a time take longer, and each one slows down the VMs of both hosts."""
    world = large_world
    sources = ["host-a"] * 4 if way == "leave" else ["host-a", "host-c", "host-d", "host-e"]
    names = [f"vm-{number}" for number in range(4)]
    for number, (host, name) in enumerate(zip(sources, names, strict=True), 10):
        world.run_vm(host, name, number)
    migrations = Migrations(world)
    to = {"leave": MORE_HOSTS[1:], "arrive": ("host-b",)}[way]

    async def main() -> None:
        own = {host.replace("-", "_"): migrations.source(world.on(host)) for host in set(sources)}
        platform = world.platform(connecting(world, **own), migrations_max=2)
        work = [
            asyncio.create_task(platform.run_impact(move))
            for host, name in zip(sources, names, strict=True)
            for move in moves([name], host, targets=to)
        ]
        await until(lambda: migrations.running == 2)
        for _ in range(40):  # the others would get this far meanwhile
            await platform.libvirts.ask("host-a", lambda connection: connection.getInfo())
        migrations.go.set()
        await asyncio.gather(*work)

    asyncio.run(main())
    assert migrations.most == 2
    assert len(migrations.targets) == 4
