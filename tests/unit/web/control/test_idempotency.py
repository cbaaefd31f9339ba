"""Idempotency-Key: a retried POST gets the first response and is executed once."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from litestar import post

from forewarn.auth.tokens import Role
from forewarn.core.change import ChangeKind
from forewarn.core.command import Seen
from forewarn.engine.engine import Engine
from forewarn.engine.entry import Entry
from forewarn.engine.operations import Operations
from forewarn.errors import StoreLost
from forewarn.fleetfile.parser import parse
from forewarn.store.base import Write
from forewarn.store.memory import MemoryStore
from forewarn.web.control.app import make_app
from forewarn.web.service import build_service
from tests.history import entries_of
from tests.unit.web.control_world import FLEET, World, main, make_client

RESTART, KEY = "/api/v1/vms/web-0/restart", {"idempotency-key": "key-1"}


async def send(world: World, path: str = RESTART, **more: Any) -> httpx.Response:
    return await world.request("POST", path, headers=KEY, **more)


def server_of(world: World, store: Any = None) -> tuple[Engine, httpx.AsyncClient]:
    """Another server on the same store, or the same one after a restart."""
    service = build_service(
        store or world.engine.store,
        world.clock,
        world.engine.timing,
        lambda: "00000000-0000-4000-8000-00000000AAAA",
    )
    return service.engine, make_client(make_app(service))


def test_retry_gets_the_first_response() -> None:
    """The reply was lost on the way; asking again must neither fail nor do it twice."""

    async def act(world: World) -> None:
        first, again = await send(world), await send(world)

        assert (first.status_code, "idempotency-replayed" in first.headers) == (202, False)
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers["idempotency-replayed"] == "true"
        assert (await world.json("GET", "/api/v1/events"))["total"] == 1

    main(act)


def test_retry_gets_the_first_response_after_the_event_ended() -> None:
    """The first response is replayed for a day, whatever became of the event."""

    async def act(world: World) -> None:
        first = await send(world)
        await world.json("POST", f"/api/v1/events/{first.json()['event']['id']}/cancel")
        await world.clock.advance(timedelta(hours=23, minutes=59))

        assert (await send(world)).content == first.content
        assert (await world.json("GET", "/api/v1/events"))["total"] == 0

    main(act)


def test_error_response_is_replayed() -> None:
    """An error is the result of that operation; a new operation has a new key."""

    async def act(world: World) -> None:
        event = (await world.json("POST", RESTART))["event"]["id"]
        first = await send(world)
        await world.json("POST", f"/api/v1/events/{event}/cancel")
        again = await send(world)

        assert (first.status_code, first.json()["error"]) == (409, "already_pending")
        assert (again.status_code, again.content) == (409, first.content)

    main(act)


def test_retry_on_another_server_gets_the_first_response() -> None:
    """It is kept in the store, which is what servers share."""

    async def act(world: World) -> None:
        first = await send(world)
        engine, elsewhere = server_of(world)
        await engine.load()
        async with elsewhere:
            again = await elsewhere.post(RESTART, headers=KEY)

        assert (again.status_code, again.content) == (202, first.content)

    main(act)


class Forgetful(MemoryStore):
    """A store that an operation reaches and its body does not: the server dies, or is cut off, in
    between.
    """

    is_cut_off = False

    async def commit(self, writes: Any, checks: Any = (), entries: Any = None) -> int:
        if self.is_cut_off and not entries and any(one.revision for one in writes):
            raise StoreLost("the server died")
        return await super().commit(writes, checks, entries)


async def forgetful(world: World) -> tuple[Engine, httpx.AsyncClient]:
    """A server whose store accepts operations, but no responses."""
    store = Forgetful()
    engine, client = server_of(world, store)
    await Operations(engine, lambda: "").apply(parse(FLEET, "fleet"), by="test")
    store.is_cut_off = True
    return engine, client


@pytest.mark.parametrize("hours", [0, 13, 23])
@pytest.mark.parametrize(
    ("path", "body", "is_polled"),
    [
        ("/api/v1/hosts/host-a/maintain", {"type": "Freeze"}, True),
        (RESTART, {}, True),
        (RESTART, {}, False),
        ("/api/v1/campaigns", {"type": "Freeze", "hosts": ["host-*"]}, True),
    ],
)
def test_a_retry_after_a_crash_is_the_same_operation(
    path: str, body: dict[str, object], is_polled: bool, hours: int
) -> None:
    """The server died between doing it and storing the body; the retry comes to another server,
    on another day.
    """

    async def act(world: World) -> None:
        engine, client = await forgetful(world)
        for scope in list(engine.board.scopes) if is_polled else ():
            await engine.submit(scope, Seen(), by="test")
        async with client:
            first = await client.post(path, headers=KEY, json=body)
        done = await operations_in(engine)
        await world.clock.advance(timedelta(hours=hours))
        other, elsewhere = server_of(world, engine.store)
        await other.load()
        async with elsewhere:
            again = await elsewhere.post(path, headers=KEY, json=body)

        assert (first.status_code, again.status_code) == (202, 202)
        assert identities(again.json()) == identities(first.json())
        assert await operations_in(engine) == done, "nothing was done a second time"
        assert len(done) == (2 if "maintain" in path else 1)

    main(act)


async def operations_in(engine: Engine) -> list[Entry]:
    """What the history says was announced, done at once, or started as a campaign."""
    changes = await entries_of(engine.store)
    return [
        one
        for one in changes
        if one.what in (ChangeKind.SCHEDULED, ChangeKind.EXECUTED_SILENTLY, ChangeKind.CAMPAIGN)
    ]


def identities(body: dict[str, Any]) -> list[str | None]:
    """The ids in a response; None for an operation without an event."""
    return [
        one and one["id"]
        for one in body.get("events") or [body.get("event") or body.get("campaign")]
    ]


def test_key_works_again_after_a_day() -> None:
    """A cron job often has one key for ever; to say 202 and do nothing would leave its VM as it
    was.
    """

    async def act(world: World) -> None:
        events = []
        for _ in range(3):
            body = (await send(world)).json()
            again = await send(world)
            assert again.headers["idempotency-replayed"] == "true"
            assert again.json() == body
            events.append(body["event"]["id"])
            await world.json("POST", f"/api/v1/events/{events[-1]}/cancel")
            await world.clock.advance(timedelta(hours=24))
            await world.engine.submit("web", Seen(), by="test")

        assert len(set(events)) == 3

    main(act)


def test_trimmed_key_is_a_new_operation() -> None:
    """Of very many keys only the newest are known; one that is forgotten must do its work, not
    nothing.
    """

    async def act(world: World) -> None:
        first = (await send(world)).json()["event"]["id"]
        await world.json("POST", f"/api/v1/events/{first}/cancel")
        for one in (await world.engine.store.load("answer/")).records:
            await world.engine.store.commit([Write(one.key, None, one.revision)])
        again = (await send(world)).json()["event"]

        assert again["status"] == "Scheduled"
        assert again["id"] != first

    main(act)


def test_response_stored_by_version_0_2_is_replayed() -> None:
    """A retry may come after an upgrade; without tokens the record of the key has the same name."""

    async def act(world: World) -> None:
        await send(world)
        ((found,),) = [(await world.engine.store.load("answer/")).records]
        body = json.loads(found.value or b"")["value"]["asked"]
        old = {
            "format": 1,
            "value": {
                "asked": body,
                "status": 202,
                "body": '{"event":null}',
                "at": "2030-01-31T12:00:00Z",
            },
        }
        await world.engine.store.commit(
            [Write(found.key, json.dumps(old).encode(), found.revision)]
        )
        again = await send(world)

        assert (again.status_code, again.json()) == (202, {"event": None})

    main(act)


def test_one_key_on_two_servers_starts_one_campaign() -> None:
    """The record of the key decides, also for two servers at once."""
    body = {"type": "Freeze", "hosts": ["host-*"]}

    async def act(world: World) -> None:
        engine, elsewhere = server_of(world)
        await engine.load()
        async with elsewhere:
            here = [send(world, "/api/v1/campaigns", json=body) for _ in range(2)]
            there = [elsewhere.post("/api/v1/campaigns", headers=KEY, json=body) for _ in range(2)]
            responses = await asyncio.gather(*here, *there)
        assert [body.json()["campaign"]["id"] for body in responses] == ["c1"] * 4

    main(act)


def test_concurrent_retries_get_one_response() -> None:
    """An impatient client retries before the first response.

    This holds for every POST, whatever it does.
    """
    counted: list[int] = []

    @post("/api/v1/count", status_code=200)
    async def count() -> dict[str, int]:
        await asyncio.sleep(0)
        counted.append(1)
        return {"count": len(counted)}

    async def act(world: World) -> None:
        async with make_client(make_app(world.service, more=[count])) as client:
            responses = await asyncio.gather(
                *(client.post("/api/v1/count", headers=KEY) for _ in range(5))
            )

        assert [body.json() for body in responses] == [{"count": 1}] * 5

    main(act)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/api/v1/vms/web-1/restart", {}),
        (RESTART, {"json": {"not_before": "2030-01-31T13:00:00Z"}}),
    ],
)
def test_key_of_another_request_is_rejected(path: str, more: dict[str, Any]) -> None:
    """Somebody's generator of keys is broken; to body with another request's event would be a
    lie.
    """

    async def act(world: World) -> None:
        await send(world)
        refused = await world.error("POST", path, headers=KEY, **more)

        assert refused[:2] == (422, "idempotency_key_reused")

    main(act)


def test_keys_belong_to_their_token() -> None:
    """A client cannot read another's response by guessing a key."""

    async def act(world: World) -> None:
        for name, secret in (("a", "a" * 64), ("b", "b" * 64)):
            await world.service.tokens.create(name, Role.ADMIN, secret=secret, by="test")
        first = await world.request(
            "POST", RESTART, headers=KEY | {"authorization": f"Bearer fw_a_{'a' * 64}"}
        )
        other = await world.request(
            "POST", RESTART, headers=KEY | {"authorization": f"Bearer fw_b_{'b' * 64}"}
        )

        assert (first.status_code, other.status_code, other.json()["error"]) == (
            202,
            409,
            "already_pending",
        )

    main(act)


def test_new_token_of_an_old_name_has_its_own_keys() -> None:
    """The name was an operator's and is a viewer's now; what the operator was answered is not the
    viewer's to read.
    """

    async def act(world: World) -> None:
        tokens = world.service.tokens
        await tokens.create("root", Role.ADMIN, secret="a" * 64, by="test")
        _, old = await tokens.create("ci", Role.OPERATOR, secret="b" * 64, by="test")
        first = await world.request(
            "POST", RESTART, headers=KEY | {"authorization": f"Bearer {old}"}
        )
        await tokens.revoke("ci", by="test")
        _, new = await tokens.create("ci", Role.OPERATOR, secret="c" * 64, by="test")
        again = await world.request(
            "POST", RESTART, headers=KEY | {"authorization": f"Bearer {new}"}
        )

        assert first.status_code == 202
        assert (again.status_code, again.json()["error"]) == (409, "already_pending")
        assert "idempotency-replayed" not in again.headers

    main(act)


def test_only_the_newest_responses_are_kept() -> None:
    """A client that makes up keys without end must not fill the store.

    Records of a newer server, or damaged ones, are deleted like all others.
    """

    async def act(world: World) -> None:
        store = world.engine.store
        for number in range(21):
            value = b'{"format": 9}'
            await store.commit(
                [Write(f"answer/{99 - number}-{one:02}/", value, 0) for one in range(100)]
            )
        await send(world)

        kept = [one.key for one in (await store.load("answer/")).records]
        assert len(kept) == 2000
        assert [key for key in kept if key.startswith("answer/99-")] == []
        assert "answer/98-00/" not in kept
        assert "answer/98-99/" in kept
        assert (await send(world)).headers["idempotency-replayed"] == "true"

    main(act)


@pytest.mark.parametrize(("size", "is_kept"), [(16 * 1024, True), (16 * 1024 + 1, False)])
def test_response_over_16_kib_is_not_stored(size: int, is_kept: bool) -> None:
    """All of them together are read now and then, while VMs wait for their documents."""

    @post("/api/v1/large", status_code=200)
    async def large() -> str:
        return "x" * size

    async def act(world: World) -> None:
        async with make_client(make_app(world.service, more=[large])) as client:
            first, again = [await client.post("/api/v1/large", headers=KEY) for _ in range(2)]

        assert (len(first.content), again.status_code) == (size, 200)
        assert ("idempotency-replayed" in again.headers) == is_kept

    main(act)


@pytest.mark.parametrize("key", ["", " ", "x" * 201, "caf\u00e9", "a\tb"])
def test_invalid_key_is_rejected(key: str) -> None:
    """At most 200 printable ASCII characters; an empty one would be everybody's."""

    async def act(world: World) -> None:
        response = await world.client.post(
            RESTART, headers=[(b"idempotency-key", key.encode("latin-1"))]
        )

        assert (response.status_code, response.json()["error"]) == (400, "invalid")
        assert (await world.json("GET", "/api/v1/events"))["total"] == 0

    main(act)


def test_key_of_maximum_length_is_accepted() -> None:
    """A limit that is off by one refuses what it promises to take."""

    async def act(world: World) -> None:
        assert (
            await world.request("POST", RESTART, headers={"idempotency-key": "x" * 200})
        ).status_code == 202

    main(act)


def test_response_to_a_bug_is_not_stored() -> None:
    """After a fix, the retry succeeds."""
    broken = [True]

    class Clumsy(Operations):
        async def degrade(self, host: str, **more: Any) -> Any:
            if broken:
                raise RuntimeError("a bug")
            return await super().degrade(host, **more)

    async def act(world: World) -> None:
        clumsy = Clumsy(world.engine, world.operations.new_id)
        async with make_client(make_app(world.service._replace(operations=clumsy))) as client:
            first = await client.post("/api/v1/hosts/host-a/degrade", headers=KEY)
            broken.clear()
            again = await client.post("/api/v1/hosts/host-a/degrade", headers=KEY)

        assert (first.status_code, again.status_code) == (500, 202)

    main(act)


def test_response_to_a_store_failure_is_not_stored() -> None:
    """Try again later must mean that trying again helps."""

    class Sulking(MemoryStore):
        is_down = False

        async def commit(self, writes: Any, checks: Any = (), entries: Any = None) -> int:
            if self.is_down:
                raise StoreLost("the store does not body")
            return await super().commit(writes, checks, entries)

    async def act(world: World) -> None:
        store = Sulking()
        engine, client = server_of(world, store)
        async with client:
            assert (await client.put("/api/v1/fleet", content=FLEET)).status_code == 200
            store.is_down = True
            down = await client.post(RESTART, headers=KEY)
            store.is_down = False
            up = await client.post(RESTART, headers=KEY)
        await engine.close()

        assert (down.status_code, up.status_code) == (503, 202)

    main(act)


def test_keys_of_one_token_do_not_push_out_those_of_another() -> None:
    """An operator retries a restart; meanwhile another token makes up keys without end."""

    async def act(world: World) -> None:
        for name, secret in (("ann", "a" * 64), ("bob", "b" * 64)):
            await world.service.tokens.create(name, Role.ADMIN, secret=secret, by="test")
        ann, bob = (
            {"authorization": f"Bearer fw_{name}_{name[0] * 64}"} for name in ("ann", "bob")
        )
        store = world.engine.store
        first = await world.request("POST", RESTART, headers=KEY | ann)
        (known,) = [record.key for record in (await store.load("answer/")).records]
        await world.request("POST", RESTART, headers=KEY | bob)
        (key,) = [one.key for one in (await store.load("answer/")).records if one.key != known]
        prefix = key.rsplit("/", 2)[0]
        for number in range(22):
            writes = [Write(f"{prefix}/{number}-{one}/", b"x", 0) for one in range(100)]
            await store.commit(writes)
        for number in range(100):
            await world.request("POST", RESTART, headers={"idempotency-key": f"b{number}"} | bob)

        assert len((await store.load("answer/")).records) <= 2000 + 100
        again = await world.request("POST", RESTART, headers=KEY | ann)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.content == first.content

    main(act)
