"""What goes around every response of the control listener: security headers and HEAD."""

import asyncio

from forewarn.engine.turns import Turns
from forewarn.web.control.app import make_app
from tests.unit.web.control_world import World, main, make_client


class ClosedTurns(Turns):
    """No request may begin until `is_open`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = asyncio.Event()
        self.waiting = asyncio.Event()

    async def start(self, client: str) -> None:
        self.waiting.set()
        await self.is_open.wait()


def test_every_response_has_security_headers() -> None:
    """Errors too, also those of unknown paths."""

    async def act(world: World) -> None:
        for path in ("/api/v1/vms", "/api/v1/vms/nope", "/nope", "/healthz", "/api/openapi.json"):
            headers = (await world.request("GET", path)).headers
            assert headers["x-content-type-options"] == "nosniff", path
            assert headers["cache-control"] == "no-store"
            policy = "default-src 'none'; frame-ancestors 'none'"
            assert headers["content-security-policy"] == policy
            assert "access-control-allow-origin" not in headers

    main(act)


def test_head_is_a_get_without_the_body() -> None:
    """Health checks of older load balancers send HEAD (RFC 9110, 9.3.2)."""

    async def act(world: World) -> None:
        for path in ("/healthz", "/api/v1/vms", "/api/docs"):
            head, get = await world.request("HEAD", path), await world.request("GET", path)
            assert (head.status_code, head.content) == (200, b"")
            length = str(len(get.content))
            assert head.headers["content-length"] == get.headers["content-length"] == length
        assert (await world.request("HEAD", "/api/v1/vms/web-0/restart")).status_code == 405

    main(act)


def test_a_request_begins_when_it_is_its_turn() -> None:
    """What Litestar does for each of many requests at once would delay polls."""

    async def act(world: World) -> None:
        turns = ClosedTurns()
        client = make_client(make_app(world.service._replace(turns=turns), delay_seconds=0))
        request = asyncio.ensure_future(client.get("/healthz"))
        await turns.waiting.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not request.done()
        turns.is_open.set()
        assert (await request).status_code == 200

    main(act)
