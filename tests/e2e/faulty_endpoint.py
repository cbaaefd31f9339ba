"""An endpoint that answers by script, on a real socket: whatever a real one has been seen to do,
and worse.
"""

import asyncio
import re
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from enum import Enum, auto
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from forewarn.client import AsyncClient, Change, Client

PATIENCE_SECONDS = 10.0
LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
NO_EVENTS = b'{"DocumentIncarnation":1,"Events":[]}'


class AfterResponse(Enum):
    """What becomes of the connection after an answer."""

    KEEP = auto()
    CLOSE = auto()
    RESET = auto()
    STAY_SILENT = auto()


class ScriptedResponse(NamedTuple):
    """What one request gets. With `drip_seconds` it gets it byte by byte."""

    sent: bytes
    then: AfterResponse = AfterResponse.KEEP
    drip_seconds: float = 0.0


def response(
    body: bytes = NO_EVENTS,
    status: int = 200,
    *,
    then: AfterResponse = AfterResponse.KEEP,
    **headers: str,
) -> ScriptedResponse:
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ScriptedResponse("\r\n".join([*lines, "", ""]).encode() + body, then)


def document(incarnation: int, *events: tuple[str, str]) -> ScriptedResponse:
    """A document with these events: id and status."""
    entries = ",".join(
        f'{{"EventId":"{id}","EventStatus":"{status}","EventType":"Reboot","Resources":["web-0"],'
        f'"NotBefore":"{"Fri, 01 Mar 2999 12:00:00 GMT" if status == "Scheduled" else ""}"}}'
        for id, status in events
    )
    return response(
        f'{{"DocumentIncarnation":{incarnation},"Events":[{entries}]}}'.encode(),
        ETag=f'"{incarnation}"',
    )


class FaultyEndpoint:
    """Each request gets the next turn; the last turn is for all that follow.

    `asked` has every request, with its connection.
    """

    def __init__(self, *turns: ScriptedResponse) -> None:
        self.asked: list[tuple[int, bytes]] = []
        self._turns = list(turns)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()

    @property
    def requests(self) -> list[bytes]:
        return [request for _, request in self.asked]

    @property
    def connections(self) -> list[int]:
        return [number for number, _ in self.asked]

    def _accept(self) -> None:
        with suppress(OSError):
            for number in range(10_000):
                connection, _ = self._listening.accept()
                thread = threading.Thread(target=self._serve, args=(connection, number))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        connection.settimeout(0.05)
        with closing(connection), suppress(ConnectionError):
            while (
                request := self._request(connection)
            ) is not None:  # ends when the client leaves, or as a turn says
                with self._lock:
                    self.asked.append((number, request))
                    turn = self._turns.pop(0) if len(self._turns) > 1 else self._turns[0]
                self._say(connection, turn)
                if turn.then is AfterResponse.STAY_SILENT:
                    continue
                if turn.then is AfterResponse.RESET:
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                if turn.then is not AfterResponse.KEEP:
                    return

    def _say(self, connection: socket.socket, turn: ScriptedResponse) -> None:
        connection.settimeout(PATIENCE_SECONDS)
        if not turn.drip_seconds:
            connection.sendall(turn.sent)
        for byte in turn.sent if turn.drip_seconds else b"":
            connection.sendall(bytes([byte]))
            time.sleep(turn.drip_seconds)
        connection.settimeout(0.05)

    def _request(self, connection: socket.socket) -> bytes | None:
        """The next whole request; None when there is none any more."""
        came = b""
        while not self._is_over.is_set():
            try:
                piece = connection.recv(65536)
            except TimeoutError:
                continue
            if not piece:
                return None
            came += piece
            head, blank, body = came.partition(b"\r\n\r\n")
            found = LENGTH.search(head)
            if blank and len(body) >= (int(found[1]) if found else 0):
                return came
        return None


def in_thread(
    url: str, verb: str, *given: object, asking: dict[str, Any] | None = None, **options: Any
) -> Any:
    """One call of the ordinary client.

    `asking` are keywords of the call, `options` those of the client.
    """
    with Client(url, **options) as client:
        return getattr(client, verb)(*given, **(asking or {}))


def in_loop(
    url: str, verb: str, *given: object, asking: dict[str, Any] | None = None, **options: Any
) -> Any:
    """The same call of the asyncio client."""

    async def call() -> Any:
        async with AsyncClient(url, **options) as client:
            return await getattr(client, verb)(*given, **(asking or {}))

    return asyncio.run(call())


class InstantStop(threading.Event):
    """A stop that is never set and does not wait: `pauses` is told how long it would."""

    def __init__(self, pauses: list[float]) -> None:
        super().__init__()
        self._pauses = pauses

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._pauses.append(timeout)
        return False


class AsyncInstantStop(asyncio.Event):
    """The same for the asyncio client; which pauses its schedule asks for is not visible here."""

    async def wait(self) -> Literal[True]:
        await asyncio.sleep(0)
        return True


def watch_in_thread(
    url: str, *, watching: dict[str, Any], before: str = "", **options: Any
) -> list[Change]:
    """All that a watch tells, after another call if one is named. It does not sleep."""
    with Client(url, **options) as client:
        if before:
            getattr(client, before)()
        return list(client.watch(**{"stop": InstantStop([]), **watching}))


def watch_in_loop(
    url: str, *, watching: dict[str, Any], before: str = "", **options: Any
) -> list[Change]:
    async def call() -> list[Change]:
        async with AsyncClient(url, **options) as client:
            if before:
                await getattr(client, before)()
            return [change async for change in client.watch(stop=AsyncInstantStop(), **watching)]

    return asyncio.run(call())


class Unreachable:
    """An address where no connection is made and none is refused, as behind a firewall that drops:
    a listener with a full backlog, whose kernel drops every further SYN.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._filling = [socket.socket() for _ in range(4)]
        for one in self._filling:
            one.settimeout(0)
            one.connect_ex(("127.0.0.1", self.port))
        self._own = {f":{one.getsockname()[1]:04X}" for one in self._filling}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in (*self._filling, self._listening):
            one.close()

    def attempts(self) -> int:
        """How many sockets of others are in SYN_SENT to our port.

        Counted by local port: under load the kernel may list a socket twice.
        """
        with open("/proc/net/tcp") as table:
            rows = [row.split() for row in table.readlines()[1:]]
        remote = f":{self.port:04X}"
        connecting = {row[1][-5:] for row in rows if row[2].endswith(remote) and row[3] == "02"}
        return len(connecting - self._own)
