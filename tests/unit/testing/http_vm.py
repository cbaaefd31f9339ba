"""A VM with a plain HTTP client, as simple as one can be."""

import http.client
import json
from typing import Any

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


class HttpVm:
    """Asks one endpoint; each request on a connection of its own."""

    def __init__(self, url: str, base: str = "") -> None:
        self._address = url.removeprefix("http://")
        self._base = base

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=10)
        try:
            connection.request(method, self._base + path, body, {"Metadata": "true"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def events(self) -> list[dict[str, Any]]:
        status, body = self.request("GET", EVENTS)
        assert status == 200, body
        events: list[dict[str, Any]] = json.loads(body)["Events"]
        return events

    def approve(self, event_id: str) -> int:
        body = json.dumps({"StartRequests": [{"EventId": event_id}]}).encode()
        return self.request("POST", EVENTS, body)[0]

    def name(self) -> str:
        status, body = self.request(
            "GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        )
        assert status == 200, body
        return body.decode()
