"""What a server knows of the hosts that run a daemon."""

import pytest

from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import MANAGED_HOST, HostedVm, ManagedHost, ManagedHosts
from forewarn.engine.record import SCOPE
from forewarn.lab.clock import VirtualClock
from forewarn.store.base import Record
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, vm

ID = "00000000-0000-4000-8000-000000000001"


def test_report_of_an_id_that_two_vms_share_concerns_both() -> None:
    """A store may hold that. Looking such a VM up by its id finds no name."""
    engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
    managed = ManagedHosts(engine)
    for revision, name in enumerate(("a", "b"), start=1):
        scope = Scope(name=name, vms=(vm(name, id=ID, host=f"host-{name}"),))
        engine.learn(Record(f"scope/{name}/", SCOPE.encode(scope), revision))
    record = ManagedHost("host-a", "s1", "server-1", NOON, vms={ID: HostedVm(1, is_running=True)})

    assert managed.vms_of(None, record) == {"a", "b"}


@pytest.mark.parametrize(
    ("record", "is_counted"),
    [
        (ManagedHost("host-a", "s1", "alive", NOON), False),
        (ManagedHost("host-a", "s1", "lost", NOON), True),
        (ManagedHost("host-a", "s1", "", NOON), True),
        (ManagedHost("host-a", "s1", "alive", NOON, problem="no libvirt"), True),
        (ManagedHost("host-a", "s1", "lost", NOON, problem="no libvirt"), True),
        (ManagedHost("host-a", "s1", "", NOON, rivals={"s2": NOON}), True),
        (ManagedHost("host-a", "", "", NOON), False),
        (ManagedHost("host-a", "", "", NOON, unreported_since=NOON), False),
        (None, False),
    ],
)
@pytest.mark.parametrize("problem", ["", "no libvirt"])
def test_hosts_without_contact_are_counted(
    record: ManagedHost | None, problem: str, *, is_counted: bool
) -> None:
    """The count changes with each record, whatever was known of the host before."""
    engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
    managed = ManagedHosts(engine)
    engine.learn(Record("lease/server/alive", b"", 1))
    before = ManagedHost("host-a", "s1", "alive", NOON, problem=problem)
    engine.learn(Record("hostd/host-a/", MANAGED_HOST.encode(before), 2))
    assert managed.count_unreachable() == bool(problem)

    content = MANAGED_HOST.encode(record) if record else None
    engine.learn(Record("hostd/host-a/", content, 3))
    assert managed.count_unreachable() == is_counted
