"""The control API over HTTP. Standard library only: `pip install forewarn` without the server's parts gives a working CLI."""

import json
import os
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import typer

from forewarn.cli.usage import Usage
from forewarn.config import ClientConfig, resolve
from forewarn.errors import Invalid, Problem, Unavailable

TIMEOUT_SECONDS = 60
ANSWER_BYTES_MAX = 256 * 1024 * 1024


class Asked(NamedTuple):
    """What was said before the command: where the service is, and which file tells it."""

    control_url: str | None = None
    file: Path | None = None


class Client:
    """Asks the service and gives back what it says, or raises the Problem that it answered."""

    def __init__(self, config: ClientConfig) -> None:
        self._url = config.control_url
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {config.token}"} if config.token else {})

    def get(self, *path: str, query: str = "") -> Any:
        return self._ask("GET", path, query=query)

    def post(self, *path: str, said: Mapping[str, object] | None = None) -> Any:
        told = {name: value for name, value in (said or {}).items() if value is not None}
        return self._ask("POST", path, json.dumps(told).encode() if told else b"")

    def put(self, *path: str, body: bytes, query: str = "") -> Any:
        return self._ask("PUT", path, body, query=query)

    def _ask(self, method: str, path: tuple[str, ...], body: bytes = b"", *, query: str = "") -> Any:
        split = urlsplit(self._url)
        assert split.hostname
        kind = HTTPSConnection if split.scheme == "https" else HTTPConnection
        connection = kind(split.hostname, split.port, timeout=TIMEOUT_SECONDS)
        target = "/".join([f"{split.path}/api/v1", *(quote(part, safe="") for part in path)])
        try:
            connection.request(method, target + (f"?{query}" if query else ""), body or None, self._headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX)
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(f"no service answers at {self._url}: {why}; FOREWARN_CONTROL tells where it is") from error
        finally:
            connection.close()
        return self._read(response.status, answer)

    def _read(self, status: int, answer: bytes) -> Any:
        try:
            said = json.loads(answer)
            if status < 300:
                return said
            raise PROBLEMS.get(said["error"], Problem)(str(said["message"]), **said["facts"])
        except (ValueError, TypeError, LookupError) as error:
            raise Unavailable(f"what answers at {self._url} is no Forewarn control API (status {status})") from error


def connect(context: typer.Context) -> Client:
    """The service that the flags, the variables or the file name."""
    asked = context.find_object(Asked) or Asked()
    try:
        found = resolve(ClientConfig, flags={"control_url": asked.control_url}, environ=os.environ, file=asked.file)
    except Invalid as problem:
        raise Usage(problem.message) from problem
    return Client(found.config)


def _tree(kind: type[Problem]) -> Iterator[type[Problem]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


PROBLEMS = {kind.code: kind for kind in _tree(Problem)}
