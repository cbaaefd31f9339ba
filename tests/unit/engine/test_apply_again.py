"""A large fleet is applied in several commits.

What stopped it half-way is no harm: applying it again does the rest.
"""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from forewarn.core import command as ask
from forewarn.core.fleet import Scope, ScopeKind
from forewarn.engine.operations import Operations
from forewarn.errors import VmBusy
from forewarn.fleetfile.parser import Fleet
from forewarn.store.base import WRITES_MAX, RevisionCheck, Write
from forewarn.store.memory import MemoryStore
from tests.builders import guid, vm
from tests.unit.engine.test_engine import World, run_in_world

COUNT = 2 * WRITES_MAX + 50
LAST = f"s{COUNT - 1:03}"


def many(domain: int) -> Fleet:
    """More scopes than one commit takes, each with one VM in the update domain."""
    names = [f"s{number:03}" for number in range(COUNT)]
    return Fleet(
        scopes=tuple(
            Scope(name=name, kind=ScopeKind.SCALE_SET, vms=(vm(f"vm-{name}", domain=domain),))
            for name in names
        ),
        hosts=(),
    )


class Interrupted(MemoryStore):
    """Runs `deed` before the second commit after it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.deed: Callable[[], Awaitable[object]] | None = None
        self._commits = 0

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        if self.deed is not None:
            self._commits += 1
            if self._commits == 2:
                deed, self.deed = self.deed, None
                await deed()
        return await super().commit(writes, checks, entries)


async def server(world: World) -> Operations:
    return Operations(await world.engine(), world.make_id)


def domains(operations: Operations) -> set[int]:
    return {vm.update_domain for scope in operations.fleet().scopes for vm in scope.vms}


def test_event_announced_during_an_apply_stops_it() -> None:
    """A VM keeps its update domain while something is pending for it, also if that came after the
    fleet was checked.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, Interrupted)
        operations = await server(world)
        await operations.apply(many(domain=0), by="ann")
        other = await world.engine()
        await other.submit(LAST, ask.Seen(), by="poll")
        announced = ask.Restart(vm=f"vm-{LAST}", event_id=guid(1))
        world.store.deed = lambda: other.submit(LAST, announced, by="bob")
        with pytest.raises(VmBusy, match=f"vm-{LAST} cannot change its update domain"):
            await operations.apply(many(domain=1), by="ann")
        assert domains(operations) == {0, 1}

        await operations.cancel(guid(1), by="ann")
        difference = await operations.apply(many(domain=1), by="ann")
        assert 0 < len(difference.changed) < COUNT  # the rest
        for one in (operations, await server(world)):
            assert domains(one) == {1}

    run_in_world(main, Interrupted())


def test_vm_deleted_during_an_apply_does_not_stop_it() -> None:
    """VMs are deleted all the time.

    What a deletion raises, the number that new scopes start above, has its own record.
    """

    async def main(world: World) -> None:
        assert isinstance(world.store, Interrupted)
        operations = await server(world)
        solo = Scope(name="solo", kind=ScopeKind.VM, vms=(vm("solo", domain=1),))
        before, after = many(domain=0), many(domain=1)
        await operations.apply(Fleet(scopes=(*before.scopes, solo), hosts=()), by="ann")
        other = await server(world)
        engine = await world.engine()
        world.store.deed = lambda: engine.submit("solo", ask.Retire(), by="bob")
        wanted = Fleet(scopes=(*after.scopes, solo), hosts=())
        await operations.apply(wanted, by="ann")
        assert domains(operations) == {1}
        await operations.apply(wanted, by="ann")  # brings the VM back

        await other._engine.load()
        assert domains(operations) == {1} == domains(other)
        assert len(other.fleet().scopes) == COUNT + 1

    run_in_world(main, Interrupted())
