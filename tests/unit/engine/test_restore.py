"""A backup that is made fit to be served again: its numbers and its tokens."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from forewarn.auth.tokens import Role
from forewarn.core.fleet import Instance, Scope, ScopeKind
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.engine.record import SCOPE
from forewarn.engine.replica import SCOPE_KEY
from forewarn.engine.restore import JUMP, NUMBER_MAX, raise_incarnations
from forewarn.errors import RecordUnreadable, Refused
from forewarn.fleetfile.parser import Fleet
from forewarn.history.query import EntryFilter, read
from forewarn.store.base import Write
from forewarn.web.service import Service, build_service
from tests.builders import vm
from tests.unit.engine.test_engine import FLEET, World, run_in_world

SECRET = "5" * 64


async def service_on(engine: Engine) -> Service:
    """Another server on the store."""
    service = build_service(engine.store, engine.clock, Timing(), lambda: "")
    await service.engine.load()
    return service


async def renewed(engine: Engine) -> Engine:
    """Another server on the store after its numbers were raised."""
    service = await service_on(engine)
    await raise_incarnations(service.engine, "backup.db")
    return (await service_on(engine)).engine


async def show_number(engine: Engine, number: int) -> None:
    """Let the document of a scope have this number."""
    scope = replace(engine.board.scopes["db"].scope, incarnation=number)
    key = SCOPE_KEY.format("db")
    revision = (await engine.store.get(key)).revision
    await engine.store.commit([Write(key, SCOPE.encode(scope), revision)])


def story_of(act: Callable[[World, Operations, Engine], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        engine = await world.engine()
        operations = Operations(engine, world.make_id)
        await operations.apply(FLEET, by="test")
        await engine.seen(engine.board.scopes["web"])
        await operations.restart("web-0", by="test")
        await act(world, operations, engine)

    run_in_world(main)


def numbers(engine: Engine) -> dict[str, int]:
    return {name: place.scope.incarnation for name, place in engine.board.scopes.items()}


def test_restored_documents_continue_above_all_numbers() -> None:
    """A client that holds the ETag of before would be answered 304 for another document."""

    async def act(world: World, operations: Operations, engine: Engine) -> None:
        assert numbers(engine) == {"web": 2, "db": 1}
        await show_number(engine, 40)
        fresh = await renewed(engine)
        assert numbers(fresh) == {"web": JUMP + 40, "db": JUMP + 40}
        assert len(fresh.board.scopes["web"].scope.events) == 1

    story_of(act)


def test_scopes_of_any_size_are_restored() -> None:
    """Together they may be larger than one commit."""

    async def act(world: World, operations: Operations, engine: Engine) -> None:
        large = Instance(user_data="x" * 60_000)
        for number in range(4):
            names = [f"large-{number}-{each}" for each in range(10)]
            vms = tuple(replace(vm(name), instance=large) for name in names)
            scope = Scope(name=f"large-{number}", kind=ScopeKind.SCALE_SET, vms=vms)
            await world.store.commit([Write(SCOPE_KEY.format(scope.name), SCOPE.encode(scope), 0)])
        await show_number(engine, 40)
        fresh = await renewed(engine)
        assert set(numbers(fresh).values()) == {JUMP + 40}

    story_of(act)


def test_new_scope_starts_above_all_numbers_after_a_restore() -> None:
    """It may have existed between the backup and the restore, and VMs remember its numbers."""

    async def act(world: World, operations: Operations, engine: Engine) -> None:
        await show_number(engine, 40)
        fresh = await renewed(engine)
        more = replace(
            FLEET.scopes[1],
            name="db-2",
            vms=(replace(FLEET.scopes[1].vms[0], name="db-2", address=""),),
        )
        await Operations(fresh, world.make_id).apply(
            Fleet(scopes=(*FLEET.scopes, more), hosts=()), by="ann"
        )
        assert numbers(fresh)["db-2"] > JUMP + 40

    story_of(act)


def test_numbers_that_would_not_fit_into_32_bits_are_refused() -> None:
    async def act(world: World, operations: Operations, engine: Engine) -> None:
        await show_number(engine, NUMBER_MAX - 2 * JUMP + 1)
        before = await engine.store.load()
        with pytest.raises(
            Refused, match=r"document numbers would continue at .*; at most .* is accepted"
        ):
            await renewed(engine)
        assert await engine.store.load() == before
        await show_number(engine, NUMBER_MAX - 2 * JUMP)
        assert set(numbers(await renewed(engine)).values()) == {NUMBER_MAX - JUMP}

    story_of(act)


def test_backup_with_an_unreadable_scope_is_refused() -> None:
    """Its document number could not be raised, so its VMs would be answered 304 for another
    document.
    """

    async def act(world: World, operations: Operations, engine: Engine) -> None:
        (found,) = (await engine.store.load("scope/db/")).records
        assert found.value
        newer = found.value.replace(b'"format":1', b'"format":9')
        await engine.store.commit([Write(found.key, newer, found.revision)])
        backup = await world.engine()
        before = await engine.store.load("")

        with pytest.raises(
            RecordUnreadable,
            match=r"scope db was written by a newer version of Forewarn, or is damaged",
        ):
            await renewed(backup)
        assert await engine.store.load("") == before

    story_of(act)


def test_tokens_of_a_backup_are_revoked_and_the_api_stays_closed() -> None:
    """A backup does not know which were revoked since.

    Without any token the API would be open to all on loopback.
    """

    async def act(world: World, operations: Operations, engine: Engine) -> None:
        tokens = (await service_on(engine)).tokens
        _, boss = await tokens.create("boss", Role.ADMIN, secret="1" * 64, by="test")
        _, ci = await tokens.create("ci", Role.OPERATOR, secret="2" * 64, by="test")
        revoked, text = await tokens.replace_all("restored", secret=SECRET, by="test")
        fresh = (await service_on(engine)).tokens

        assert revoked == ["boss", "ci"]
        assert (fresh.authenticate(boss), fresh.authenticate(ci)) == (None, None)
        holder = fresh.authenticate(text)
        assert holder
        assert holder.role is Role.ADMIN

    story_of(act)


def test_no_token_is_made_where_there_was_none() -> None:
    async def act(world: World, operations: Operations, engine: Engine) -> None:
        service = await service_on(engine)
        assert await service.tokens.replace_all("restored", secret=SECRET, by="test") == ([], "")
        assert not service.tokens

    story_of(act)


def test_the_history_tells_of_the_restore() -> None:
    async def act(world: World, operations: Operations, engine: Engine) -> None:
        fresh = await renewed(engine)
        ((shown,), _) = await read(fresh.store, EntryFilter(what="restored"), limit=10)
        assert (shown.by, shown.detail) == (
            "store restore",
            f"from backup.db; document numbers continue at {JUMP + 2}",
        )

    story_of(act)


def test_a_large_fleet_is_renewed_in_several_commits() -> None:
    async def main(world: World) -> None:
        engine = await world.engine()
        (_, one) = FLEET.scopes
        many = tuple(
            replace(one, name=f"s{n}", vms=(replace(one.vms[0], name=f"v{n}", address=""),))
            for n in range(250)
        )
        await Operations(engine, world.make_id).apply(Fleet(scopes=many, hosts=()), by="test")
        fresh = await renewed(engine)
        assert set(numbers(fresh).values()) == {JUMP + 1}

    asyncio.run(main(World()))
