"""What a server knows of the hosts that run a daemon."""

from forewarn.core.fleet import Scope
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.managed_hosts import HostedVm, ManagedHost, ManagedHosts
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
