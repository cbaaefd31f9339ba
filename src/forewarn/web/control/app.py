"""The control listener's application: Litestar, and what goes around every answer, whoever gives
it.

Safe headers, HEAD as GET without its body, and the keeping of answers to requests with an
Idempotency-Key.
"""

from typing import Any, cast

from litestar import Litestar
from litestar.utils.path import normalize_path

from forewarn.web.control.idempotency import Answers, Slot
from forewarn.web.metadata.rendered_document import Header

HEADERS: tuple[Header, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
"""What an answer gets where it does not say otherwise itself."""
STREAM = "/api/v1/stream"
"""The one GET that never ends, and so cannot stand for a HEAD."""

Message = dict[str, Any]


class Application(Litestar):
    """`answers` keeps the answers of those requests for which the door left a slot in their state."""

    def __init__(self, answers: Answers, **given: Any) -> None:
        super().__init__(**given)
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if scope["method"] == "HEAD" and normalize_path(scope["path"]) != STREAM:
            scope = {
                **scope,
                "method": "GET",
            }  # uvicorn knows that it was a HEAD, and sends no body
        state: Message = scope.setdefault("state", {})
        status, body = 0, b""

        async def pass_on(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_missing(message["headers"])]
            elif message["type"] == "http.response.body" and "slot" in state:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await self._answers.keep(cast("Slot", state["slot"]), status, body)
            await send(message)

        try:
            await super().__call__(scope, receive, cast("Any", pass_on))
        finally:
            if "slot" in state:
                state["slot"].lock.release()


def _missing(said: Any) -> list[Header]:
    names = {bytes(name).lower() for name, _ in said}
    return [header for header in HEADERS if header[0] not in names]
