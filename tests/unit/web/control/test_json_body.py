"""Long responses: in chunks of limited size, with a turn before each."""

import asyncio
from typing import Any

import pytest
from litestar.response import Stream

from forewarn.core.event import EventType
from forewarn.engine.turns import Turns
from forewarn.fleetfile.parser import dump_json, parse
from forewarn.web.control.app import make_app
from forewarn.web.control.json_body import CHUNK_BYTES, JsonBody
from tests.unit.web.control_world import World, main, make_client

VMS = 3000
LARGE_FLEET = "scopes:\n" + "".join(
    f"  - {{name: scope-{number:04}, kind: vm, vms: [{{name: vm-{number:04}, host: h}}]}}\n"
    for number in range(VMS)
)


def test_a_large_body_takes_a_turn_before_each_chunk() -> None:
    """Megabytes that are joined and written at once delay polls by milliseconds."""

    async def run() -> None:
        turns = 0

        async def take_turn() -> None:
            nonlocal turns
            turns += 1

        body = JsonBody()
        for _ in range(1000):
            body.add(b"x" * 1000)

        response = body.respond(take_turn)
        assert isinstance(response, Stream)
        iterator: Any = response.iterator
        chunks = [(turns, chunk) async for chunk in iterator]

        assert [taken for taken, _ in chunks] == list(range(1, 17))
        assert all(len(chunk) <= CHUNK_BYTES + 1000 for _, chunk in chunks)
        assert b"".join(chunk for _, chunk in chunks) == b"x" * 1_000_000

    asyncio.run(run())


class CountedTurns(Turns):
    taken = 0

    async def take(self, client: str) -> None:
        self.taken += 1
        await super().take(client)


async def turns_of(world: World, path: str) -> int:
    """How many turns a request for this takes."""
    turns = CountedTurns()
    client = make_client(make_app(world.service._replace(turns=turns), delay_seconds=0))
    assert (await client.get(path)).status_code == 200
    return turns.taken


def test_polls_pass_while_the_fleet_is_rendered() -> None:
    """9,000 parts, 20 in a turn."""

    async def act(world: World) -> None:
        await world.operations.apply(parse(LARGE_FLEET.encode(), "large"), by="ann")
        assert await turns_of(world, "/api/v1/fleet") >= 450

    main(act)


BIG_SCOPES = "scopes:\n" + "".join(
    f"  - name: scope-{scope}\n    kind: scale-set\n    vms:\n"
    + "".join(f"      - {{name: vm-{scope}-{vm:03}, host: h-{scope}}}\n" for vm in range(1000))
    for scope in range(4)
)


@pytest.mark.parametrize("path", ["hosts", "scopes", "events"])
def test_an_item_with_many_vms_takes_a_turn_of_its_own(path: str) -> None:
    """20 hosts may have 40,000 VMs: polls would wait for all of their names.

    One turn is for the request, one for each of the four items, and one to encode them.
    """

    async def act(world: World) -> None:
        await world.operations.apply(parse(BIG_SCOPES.encode(), "large"), by="ann")
        for scope in range(4):
            await world.operations.maintain(f"h-{scope}", by="ann", type=EventType.FREEZE)
        assert await turns_of(world, f"/api/v1/{path}?limit=1000") == 6

    main(act)


def test_a_large_fleet_and_list_arrive_whole_and_with_their_length() -> None:
    """A client that reads by Content-Length gets all of it, and the ETag that PUT compares."""

    async def act(world: World) -> None:
        await world.operations.apply(parse(LARGE_FLEET.encode(), "large"), by="ann")

        response = await world.request("GET", "/api/v1/fleet")
        assert len(response.content) > 2 * CHUNK_BYTES
        assert response.content == dump_json(world.operations.fleet())
        assert response.headers["content-length"] == str(len(response.content))
        again = await world.request(
            "PUT",
            "/api/v1/fleet",
            content=response.content,
            headers={"If-Match": response.headers["etag"]},
        )
        assert again.status_code == 200

        response = await world.request("GET", "/api/v1/vms?limit=10000")
        assert len(response.content) > 2 * CHUNK_BYTES
        assert response.headers["content-type"] == "application/json"
        assert response.headers["content-length"] == str(len(response.content))
        assert [vm["name"] for vm in response.json()["vms"]] == [
            f"vm-{number:04}" for number in range(VMS)
        ]

    main(act)


def test_the_fleet_is_read_as_it_was_when_the_request_began() -> None:
    """It is sent in slices; a mix of two fleets could be applied again by mistake."""

    async def act(world: World) -> None:
        before = world.operations.fleet()
        definitions = world.operations.definitions()
        first = next(definitions)
        await world.operations.apply(parse(LARGE_FLEET.encode(), "large"), by="ann")
        assert (first, *definitions) == before.scopes

    main(act)
