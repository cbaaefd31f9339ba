"""Requests of the clients to the server that runs where they run."""

import json
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

METADATA_PORT, CONTROL_PORT = 8080, 8081
OPERATION_TIMEOUT_SECONDS = 15.0


class Response(NamedTuple):
    """Status 0: there was none."""

    status: int
    body: bytes = b""
    etag: str = ""
    age: int = 0


class Connection:
    """One connection that is kept, and opened again after an error."""

    def __init__(self, timeout_seconds: float) -> None:
        self._http = HTTPConnection("127.0.0.1", METADATA_PORT, timeout=timeout_seconds)

    def get(self, path: str, headers: dict[str, str]) -> Response:
        try:
            self._http.request("GET", path, headers=headers)
            response = self._http.getresponse()
            etag, age = response.getheader("ETag", ""), int(response.getheader("Age", "0"))
            return Response(response.status, response.read(), etag, age)
        except (OSError, HTTPException):
            self._http.close()
            return Response(0)

    def close(self) -> None:
        self._http.close()


def send(
    method: str,
    path: str,
    body: object = None,
    *,
    key: str = "",
    timeout_seconds: float = OPERATION_TIMEOUT_SECONDS,
) -> Response:
    """A request to the control API, on a connection of its own."""
    headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
    request = urllib.request.Request(
        f"http://127.0.0.1:{CONTROL_PORT}{path}",
        None if body is None else json.dumps(body).encode(),
        headers,
        method=method,
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as response:
            return Response(response.status, response.read())
    except urllib.error.HTTPError as error:
        with error, suppress(OSError, HTTPException):
            return Response(error.code, error.read())
        return Response(0)
    except (OSError, HTTPException):
        return Response(0)
