"""What polls read: who is found where, what is shown, who is woken."""

import asyncio
from itertools import permutations

import pytest
from msgspec.structs import replace

from forewarn.core.fleet import Power, Scope
from forewarn.engine.board import Board, PublishedScope, wait_for_change
from forewarn.errors import UnknownHost, UnknownScope, UnknownVm
from tests.builders import NOON, guid, restart, run, scope_of, vm


def board_with(*scopes: Scope) -> Board:
    board = Board(seen_interval_seconds=3600)
    for scope in scopes:
        board.publish(scope, 1)
    return board


WEB = replace(
    scope_of(vm("web-0", address="10.0.0.1", id=guid(1)), vm("web-1", domain=1, host="host-b")),
    name="web",
)
DB = replace(scope_of(vm("db-0", address="10.0.0.2")), name="db")


def test_a_vm_is_found_by_name_address_id_and_host() -> None:
    board = board_with(WEB, DB)

    assert board.find_vm("web-0") == (board.scopes["web"], WEB.vms[0])
    assert board.addresses == {"10.0.0.1": "web-0", "10.0.0.2": "db-0"}
    assert board.ids == {guid(1): "web-0"}
    assert [place.scope.name for place in board.scopes_on("host-a")] == ["db", "web"]


def test_what_is_unknown_is_named() -> None:
    board = board_with(WEB)

    with pytest.raises(UnknownVm, match="'web-7'"):
        board.find_vm("web-7")
    with pytest.raises(UnknownScope, match="'db'"):
        board.find_scope("db")
    with pytest.raises(UnknownHost, match="'host-z'"):
        board.scopes_on("host-z")


@pytest.mark.parametrize("leaving", list(permutations(["a", "b", "c"])))
@pytest.mark.parametrize("returning", ["a", "b", "c"])
def test_id_stays_shared_until_a_single_vm_has_it(
    leaving: tuple[str, str, str], returning: str
) -> None:
    """A request with a shared id could be any of them: while two have it, it must not be taken for
    one VM's.
    """
    scopes = {name: replace(scope_of(vm(name, id=guid(1))), name=name) for name in "abc"}
    board = board_with(*scopes.values())
    present = {"a", "b", "c"}

    def check() -> None:
        assert board.shared_ids == ({guid(1): present} if len(present) > 1 else {})
        assert board.ids == (
            {guid(1): min(present) if len(present) == 1 else ""} if present else {}
        )

    check()
    for revision, name in enumerate(leaving, start=2):
        present.remove(name)
        board.withdraw(name, revision)
        check()
        if name == returning:
            present.add(name)
            board.publish(scopes[name], revision + 10)
            check()


def test_address_that_two_vms_have_belongs_to_neither() -> None:
    """Their hosts have networks of their own: which one polls cannot be told by the address."""
    twin = replace(DB, vms=(replace(DB.vms[0], address="10.0.0.1", host="host-b"),))
    board = board_with(WEB, twin)

    assert board.addresses == {"10.0.0.1": ""}
    assert board.shared_addresses == {"10.0.0.1": {"web-0", "db-0"}}

    board.publish(DB, 2)

    assert board.addresses == {"10.0.0.1": "web-0", "10.0.0.2": "db-0"}
    assert board.shared_addresses == {}


def test_vm_of_unknown_power_keeps_its_address() -> None:
    """It may still run. Otherwise it would read and approve the events of another VM."""
    unknown = replace(WEB.vms[0], power=Power.UNKNOWN)
    web = replace(WEB, vms=(unknown, *WEB.vms[1:]))
    later = replace(DB.vms[0], address="10.0.0.1", host="host-b", is_address_taken=True)

    board = board_with(web, replace(DB, vms=(later,)))

    assert board.addresses["10.0.0.1"] == "web-0"


def test_a_declared_host_without_vms_is_known() -> None:
    board = board_with(WEB)
    board.declare_hosts((), ("host-z",))

    assert board.scopes_on("host-z") == []
    assert board.known_hosts[:] == ["host-a", "host-b", "host-z"]


def test_vm_that_changes_scopes_is_found_in_the_new_one() -> None:
    """Another server's commits may be told in either order; the VM must never see its old scope's
    document again.
    """
    without = replace(WEB, vms=WEB.vms[1:])
    with_it = replace(DB, vms=(*DB.vms, WEB.vms[0]))
    for order in ((without, with_it), (with_it, without)):
        board = board_with(WEB, DB)
        for scope in order:
            board.publish(scope, 2)

        assert board.find_vm("web-0")[0].scope.name == "db"
        assert board.addresses["10.0.0.1"] == "web-0"


def test_a_new_address_replaces_the_old_one() -> None:
    board = board_with(WEB)
    board.publish(replace(WEB, vms=(replace(WEB.vms[0], address="10.0.0.9"), WEB.vms[1])), 2)

    assert board.addresses == {"10.0.0.9": "web-0"}


def test_addresses_may_be_exchanged() -> None:
    a, b = vm("a", address="10.0.0.1"), vm("b", address="10.0.0.2")
    board = board_with(scope_of(a, b))
    board.publish(scope_of(replace(a, address="10.0.0.2"), replace(b, address="10.0.0.1")), 2)

    assert board.addresses == {"10.0.0.1": "b", "10.0.0.2": "a"}


def test_pages_last_until_the_visible_document_changes() -> None:
    board = board_with(WEB)
    place = board.scopes["web"]
    place.pages["2020-07-01"] = b"page"

    board.see("web", NOON, 2)
    assert place.pages == {"2020-07-01": b"page"}
    board.publish(run(WEB, restart()), 3)
    assert place.pages == {}


def test_events_are_found_while_they_live_and_for_a_while_after() -> None:
    board = board_with(WEB)
    board.publish(run(WEB, restart()), 2)
    assert (set(board.events), set(board.ended)) == ({guid(1)}, set())

    board.withdraw("web", 3)
    assert (board.events, board.ended) == ({}, {})


async def waiting(place: PublishedScope, seconds: float = 30) -> "asyncio.Task[bool]":
    task = asyncio.create_task(wait_for_change(place, place.scope.incarnation, seconds))
    await asyncio.sleep(0)
    return task


def test_change_wakes_the_waits_of_its_scope_only() -> None:
    async def main() -> None:
        board = board_with(WEB, DB)
        here = [await waiting(board.scopes["web"]) for _ in range(3)]
        there = await waiting(board.scopes["db"])
        board.publish(run(WEB, restart()), 2)
        await asyncio.gather(*here)

        assert board.scopes["web"].waiters is None
        assert not there.done()
        there.cancel()

    asyncio.run(main())


def test_invisible_change_wakes_no_wait() -> None:
    async def main() -> None:
        board = board_with(WEB)
        task = await waiting(board.scopes["web"])
        board.see("web", NOON, 2)
        await asyncio.sleep(0)

        assert not task.done()
        task.cancel()

    asyncio.run(main())


def test_an_abandoned_wait_leaves_nothing_behind() -> None:
    async def main() -> None:
        board = board_with(WEB)
        task = await waiting(board.scopes["web"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        assert board.scopes["web"].waiters is None

    asyncio.run(main())


def test_wait_ends_at_its_limit_or_if_the_document_is_new() -> None:
    async def main() -> None:
        place = board_with(WEB).scopes["web"]
        await wait_for_change(place, 1, 0.01)
        await wait_for_change(place, 99, 30)
        assert place.waiters is None

    asyncio.run(main())
