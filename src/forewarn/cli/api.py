"""The control API over HTTP.

Standard library only: `pip install forewarn` without the server's parts gives a working CLI.
"""

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import typer

from forewarn.cli.exit_codes import Usage
from forewarn.config import ClientConfig, resolve
from forewarn.errors import Error, Invalid, Unavailable

TIMEOUT_SECONDS = 60
ANSWER_BYTES_MAX = 256 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
PAGE_MAX = 1000
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Asked(NamedTuple):
    """What was said before the command: where the service is, and which file tells it."""

    control_url: str | None = None
    file: Path | None = None


class Client:
    """Asks the service and gives back what it says, or raises the Problem that it answered."""

    def __init__(self, config: ClientConfig) -> None:
        self._url = config.control_url
        self._ca_file = config.ca_file
        if config.token and not (config.token.isascii() and config.token.isprintable()):
            raise Usage(
                "token: it holds a character that no token has; expected the text that `forewarn token create` showed"
            )
        self._headers = {"Accept": "application/json"} | (
            {"Authorization": f"Bearer {config.token}"} if config.token else {}
        )

    def get(self, *path: str, query: str = "") -> Any:
        return self._ask("GET", path, query=query)

    def get_tagged(self, *path: str) -> tuple[Any, str]:
        """An answer and its ETag, for a `put` that is meant for what was read; empty from a service
        that gives none.
        """
        with self._asked("GET", path) as response:
            answer = response.read(ANSWER_BYTES_MAX)
        return self._read(response.status, answer), response.headers.get("ETag", "")

    def list(self, kind: str, limit: int, query: str = "") -> Any:
        """The list of a kind, at most so many, as one answer: page by page as far as its cursors
        lead.
        """
        answer = self.get(kind, query=f"limit={min(limit, PAGE_MAX)}{query}")
        page = answer
        while (
            page.get("next") and len(answer[kind]) < limit
        ):  # ends: every page but the last holds something
            more = min(limit - len(answer[kind]), PAGE_MAX)
            page = self.get(kind, query=f"limit={more}&cursor={page['next']}{query}")
            answer[kind] += page[kind]
            answer["next"] = page["next"]
            if not page[kind]:
                break
        return answer

    def post(self, *path: str, said: Mapping[str, object] | None = None) -> Any:
        told = {name: value for name, value in (said or {}).items() if value is not None}
        return self._ask("POST", path, json.dumps(told).encode() if told else b"")

    def delete(self, *path: str) -> Any:
        return self._ask("DELETE", path)

    def put(self, *path: str, body: bytes, query: str = "", tag: str = "") -> Any:
        return self._ask(
            "PUT", path, body, query=query, headers={"If-Match": tag} if tag else NO_HEADERS
        )

    def lines(self, *path: str, query: str = "") -> Iterator[bytes]:
        """An answer that goes on and on, line by line, until the service ends it.

        One that falls silent is given up.
        """
        with self._asked("GET", path, query=query) as response:
            if response.status != HTTPStatus.OK:
                self._read(response.status, response.read(ANSWER_BYTES_MAX))
            while line := response.readline(LINE_BYTES_MAX):
                yield line

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        body: bytes = b"",
        *,
        query: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Any:
        with self._asked(method, path, body, query=query, headers=headers) as response:
            answer = response.read(ANSWER_BYTES_MAX)
        return self._read(response.status, answer)

    @contextmanager
    def _asked(
        self,
        method: str,
        path: tuple[str, ...],
        body: bytes = b"",
        *,
        query: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Iterator[HTTPResponse]:
        """Within this the answer can be read; whatever goes wrong with it becomes a Problem."""
        split = urlsplit(self._url)
        assert split.hostname
        connection = HTTPConnection(split.hostname, split.port, timeout=TIMEOUT_SECONDS)
        if split.scheme == "https":
            connection = HTTPSConnection(
                split.hostname, split.port, timeout=TIMEOUT_SECONDS, context=self._context()
            )
        sent = (
            self._headers
            | ({"Content-Type": "application/json"} if method == "POST" and body else {})
            | dict(headers)
        )
        target = "/".join([f"{split.path}/api/v1", *(quote(part, safe="") for part in path)])
        try:
            connection.request(method, target + (f"?{query}" if query else ""), body or None, sent)
            yield connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            why = f"{error.verify_message}; FOREWARN_CA names a file with the certificates to check it against"
            raise Unavailable(
                f"the certificate of {self._url} is not to be trusted: {why}"
            ) from error
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(
                f"no service answers at {self._url}: {why}; FOREWARN_CONTROL tells where it is"
            ) from error
        finally:
            connection.close()

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except (OSError, ssl.SSLError) as error:
            raise Usage(
                f"ca_file: {self._ca_file} has no certificates that can be read: {error.strerror or error}"
            ) from error

    def _read(self, status: int, answer: bytes) -> Any:
        try:
            said = json.loads(answer)
            if status < 300:
                return said
            raise PROBLEMS.get(said["error"], Error)(str(said["message"]), **said["facts"])
        except (ValueError, TypeError, LookupError) as error:
            raise Unavailable(
                f"what answers at {self._url} is no Forewarn control API (status {status})"
            ) from error


def connect(context: typer.Context) -> Client:
    """The service that the flags, the variables or the file name."""
    asked = context.find_object(Asked) or Asked()
    try:
        found = resolve(
            ClientConfig,
            flags={"control_url": asked.control_url},
            environ=os.environ,
            file=asked.file,
        )
    except Invalid as problem:
        raise Usage(problem.message) from problem
    return Client(found.config)


def _tree(kind: type[Error]) -> Iterator[type[Error]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


PROBLEMS = {kind.code: kind for kind in _tree(Error)}
