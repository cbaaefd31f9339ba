"""What it costs to decode a body: once, and not more than so many values."""

from typing import ClassVar

import msgspec
import pytest
from litestar import post, put
from litestar.params import JSONBody

from forewarn.web.control.app import make_app
from forewarn.web.control.checks import VALUES_MAX
from tests.unit.web.control_world import World, main, make_client

JSON = {"content-type": "application/json"}


class Anything(msgspec.Struct):
    """A body that is skipped."""

    x: msgspec.Raw


class Counted(msgspec.Struct):
    """A body that counts how often it is decoded."""

    decoded: ClassVar[list[int]] = []
    number: int

    def __post_init__(self) -> None:
        self.decoded.append(self.number)


def test_body_is_decoded_once() -> None:
    """Decoding takes time that polls need."""

    @post("/counted", sync_to_thread=False, status_code=200)
    def count(data: JSONBody[Counted]) -> int:
        return data.number

    async def act(world: World) -> None:
        client = make_client(make_app(world.service, more=[count]))
        response = await client.post("/counted", json={"number": 7})
        assert (response.status_code, response.json(), Counted.decoded) == (200, 7, [7])

    main(act)


@pytest.mark.parametrize("part", [b"0,", b"[],", b"{},", b'"a,",', b"[[[[0]]]],"])
def test_body_with_too_many_values_is_rejected_before_it_is_decoded(part: bytes) -> None:
    """Small values take longest: 6 MB of them took half a second, and no poll was answered."""

    async def act(world: World) -> None:
        @put("/large", request_max_body_size=4 << 20)
        async def read(data: JSONBody[Anything]) -> None:
            assert data

        client = make_client(make_app(world.service, more=[read]))
        for number in (VALUES_MAX // 10, VALUES_MAX):
            content = b'{"x": [' + part * number + b"0]}"
            response = await client.put("/large", content=content, headers=JSON)
            if number < VALUES_MAX:
                assert response.status_code == 200
                continue
            body = response.json()
            assert (response.status_code, body["error"]) == (413, "body_too_large")
            assert body["message"].endswith("values; at most 100000 are accepted")

    main(act)
