"""Lists in pages: whatever changes meanwhile, what was there throughout is shown exactly once."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.errors import Invalid
from forewarn.web.control.dependencies import PageRequest
from forewarn.web.control.pagination import build_page, decode, encode, name_key, page, render_list
from forewarn.web.control.views import VmList
from tests.unit.web.control_world import World, main

NAMES = st.sets(st.text(max_size=5), max_size=12)


@given(lasting=NAMES, turns=st.lists(NAMES, max_size=20), limit=st.integers(1, 4))
def test_items_that_persist_are_listed_exactly_once(
    lasting: set[str], turns: list[set[str]], limit: int
) -> None:
    """Changes between two pages neither skip nor repeat other items."""
    shown: list[str] = []
    cursor: str | None = None
    for turn in range(200):
        passing = turns[turn] if turn < len(turns) else set()
        items = sorted(lasting | passing)
        part, cursor = page(items, lambda name: (name,), limit, cursor)
        shown += part
        assert len(part) <= limit
        if cursor is None:
            break

    assert cursor is None
    assert [name for name in shown if name in lasting] == sorted(lasting)
    assert len(shown) == len(set(shown))


def test_last_full_page_has_no_next() -> None:
    """Otherwise everybody would ask once more for nothing."""
    assert page(["a", "b"], lambda name: (name,), 2, None) == (["a", "b"], None)
    assert page(["a", "b", "c"], lambda name: (name,), 2, None) == (["a", "b"], encode(("b",)))
    assert page([], lambda name: (name,), 2, None) == ([], None)


@given(st.lists(st.text(max_size=20), min_size=1, max_size=3).map(tuple))
def test_cursor_survives_encoding(key: tuple[str, ...]) -> None:
    """It is part of a URL, so it must need no quoting."""
    assert encode(key).replace("-", "").replace("_", "").isalnum()
    assert decode(encode(key)) == key


@pytest.mark.parametrize(
    "cursor", ["", "x", "!!!!", "W10", "WzFd", "bnVsbA", "é", "A" * 2000, "W1tbW1tb"]
)
def test_invalid_cursor_is_rejected(cursor: str) -> None:
    """It came from elsewhere, or was cut on the way."""
    with pytest.raises(Invalid, match="cursor: expected the `next` of an earlier page"):
        decode(cursor)


async def walk(world: World, kind: str, limit: int) -> list[Any]:
    found: list[Any] = []
    body = await world.json("GET", f"/api/v1/{kind}?limit={limit}")
    while True:  # ends with the last page
        found += [one.get("name", one.get("id")) for one in body[kind]]
        if body["next"] is None:
            return found
        body = await world.json("GET", f"/api/v1/{kind}?limit={limit}&cursor={body['next']}")


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_every_list_is_paginated(limit: int) -> None:
    """Scopes, VMs, hosts and events; the last page says that it is."""

    async def act(world: World) -> None:
        for vm in ("web-1", "web-0", "FrontEnd_IN_0"):
            await world.json("POST", f"/api/v1/vms/{vm}/restart")
            await world.clock.advance(timedelta(seconds=1))

        assert await walk(world, "vms", limit) == [
            "BackEnd_IN_0",
            "FrontEnd_IN_0",
            "web-0",
            "web-1",
        ]
        assert await walk(world, "scopes", limit) == ["shop", "web"]
        assert await walk(world, "hosts", limit) == ["host-a", "host-b", "host-c"]
        assert [id_[-1] for id_ in await walk(world, "events", limit)] == ["9", "8", "7"]

    main(act)


def test_invalid_cursor_is_reported_by_name() -> None:
    """A listing that silently restarted would never end."""

    async def act(world: World) -> None:
        assert (await world.error("GET", "/api/v1/vms?cursor=zzz"))[:2] == (400, "invalid")

    main(act)


def test_polls_pass_between_the_slices_of_a_list() -> None:
    """A page of 10,000 VMs is neither built nor encoded in one piece, and the fleet is not."""

    async def act(world: World) -> None:
        taken = 0

        async def take_turn() -> None:
            nonlocal taken
            taken += 1

        page = PageRequest(10_000, None, take_turn)
        shown = await build_page(
            VmList, [str(number) for number in range(100)], name_key, list, page
        )
        assert taken == 5
        response = await render_list(shown, take_turn)
        body: Any = response.content
        assert taken == 10  # five slices more
        assert json.loads(body)["vms"] == [str(number) for number in range(100)]

    main(act)
