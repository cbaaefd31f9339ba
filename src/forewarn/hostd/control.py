"""The daemon's session with the servers: it reports VMs, asks for work and sends results.

It talks to one server at a time. A server that fails is left for the next one, which is sent
everything again; the servers agree among themselves which of them serves this host.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any, TypeVar

import msgspec

from forewarn.errors import Error, HostTaken, Invalid, Unavailable
from forewarn.hostd.connection import ServerAddress, ServerLost
from forewarn.hostd.inventory import Inventory, Report
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Request, Upstream
from forewarn.hostd.worker import Result, RunningImpact, Work, Worker
from forewarn.log import log

T = TypeVar("T")

OK, SERVER_ERROR, TOO_MANY_REQUESTS, REJECTED = 200, 500, 429, (401, 403)
CALL_SECONDS_MAX = 15.0
WAIT_SECONDS = 10.0
"""How long a server holds a request for work: less than it lets a daemon be silent."""
REPORT_EVERY_SECONDS = 1.0
REFUSED_SECONDS = 30.0
IDLE_SECONDS = 0.1
"""The pause after an answer without work, so that a server that does not wait is not flooded."""
LEAVE_SECONDS_MAX = 3.0
LOGGED_MAX = 100


class TokenRejected(Unavailable, code="token_rejected"):
    """The server does not accept the token for this host."""


class CallRefused(Error, code="call_refused"):
    """The server understood the call and refused its content."""


class Refusal(msgspec.Struct):
    """The body of an error response."""

    error: str = ""
    message: str = ""


class InventoryAnswer(msgspec.Struct):
    problems: list[str] = []


class ServerCalls:
    """The calls to one server. Each of them may be repeated: that changes nothing.

    They raise ServerLost, TokenRejected, HostTaken, or CallRefused.
    """

    def __init__(self, server: ServerAddress, host: str, token: HostToken, session: str) -> None:
        self.url = server.url
        self._upstream = Upstream([server])
        self._session = session
        self._path = f"/api/v1/hosts/{host}"
        self._headers = (
            (b"authorization", f"Bearer {token.text}".encode()),
            (b"content-type", b"application/json"),
        )

    async def put_inventory(self, report: Report) -> list[str]:
        """What is wrong with some of the VMs; the others were accepted."""
        answer = await self._call("PUT", "/inventory", report.as_sent(), InventoryAnswer)
        return answer.problems

    async def ask_for_work(self, running: list[RunningImpact], wait_seconds: float) -> Work:
        body = {"running": running, "wait_seconds": wait_seconds}
        return await self._call("POST", "/work", body, Work, wait_seconds + CALL_SECONDS_MAX)

    async def send_result(self, result: Result) -> bool:
        """Whether the server still wanted it."""
        answer = await self._call("POST", "/results", {"results": [result]}, dict)
        return bool(answer.get("accepted"))

    async def end_session(self) -> None:
        await self._call("DELETE", f"/session?session={self._session}", None, dict)

    def close(self) -> None:
        self._upstream.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        answer: type[T],
        seconds_max: float = CALL_SECONDS_MAX,
    ) -> T:
        target = f"{self._path}{path}".encode()
        content = None if body is None else msgspec.json.encode({"session": self._session} | body)
        response = await self._upstream.send(
            Request(method, target, self._headers, content, seconds_max)
        )
        try:
            if response.status == OK:
                return msgspec.json.decode(response.body, type=answer)
            refusal = msgspec.json.decode(response.body, type=Refusal)
        except msgspec.MsgspecError as error:
            problem = f"status {response.status} and not what was expected: {error}"
            raise ServerLost(f"{self.url} answered with {problem}") from error
        raise error_of(response.status, refusal, self.url)


def error_of(status: int, refusal: Refusal, url: str) -> Error:
    message = f"{url}: {refusal.message} (status {status})"
    if status >= SERVER_ERROR or status == TOO_MANY_REQUESTS:
        return ServerLost(message)
    if status in REJECTED:
        return TokenRejected(message)
    return HostTaken(message) if refusal.error == HostTaken.code else CallRefused(message)


def pause_seconds(failures: int, servers: int) -> float:
    """The pause after so many failed servers in a row: none before each of them was tried once,
    then 1, 2 and 3 seconds, and up to half as much again at random.

    It stays short: another server takes over as soon as the lease of the lost one has ended.
    """
    rounds = failures // servers
    return min(rounds, 3) * (1 + random.random() / 2)  # noqa: S311, not for secrets


class Session:
    """One run of the daemon. `id_` distinguishes it from another daemon with its host name."""

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        host: str,
        token: HostToken,
        inventory: Inventory,
        worker: Worker,
        id_: str,
        pause: Callable[[int, int], float] = pause_seconds,
    ) -> None:
        self._servers = [ServerCalls(server, host, token, id_) for server in servers]
        self._inventory = inventory
        self._worker = worker
        self._pause = pause
        self._failures = 0
        self._was_accepted = self._is_connected = False
        self._logged: set[str] = set()

    async def run(self) -> None:
        """Work until cancelled, then end the session."""
        await self._inventory.readable.wait()
        for calls in cycle(self._servers):  # ends when cancelled
            try:
                await self._talk_until_lost(calls)
            except asyncio.CancelledError:
                await self._leave(calls)
                raise
            finally:
                calls.close()

    async def _talk_until_lost(self, calls: ServerCalls) -> None:
        try:
            await self._talk(calls)
        except (Unavailable, HostTaken) as error:
            self._on_lost(error)
        await asyncio.sleep(self._pause(self._failures, len(self._servers)))

    async def _talk(self, calls: ServerCalls) -> None:
        """Talk to one server until it fails."""
        self._worker.send_again()
        await self._report(calls)
        works = (self._report_changes(calls), self._ask_for_work(calls), self._send_results(calls))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(self, calls: ServerCalls) -> float | None:
        """Send the inventory. Returns when to send it again if it was refused, in seconds."""
        self._inventory.changed.clear()
        try:
            problems = await calls.put_inventory(self._inventory.report)
        except CallRefused as error:
            problems = [error.message]
        for problem in problems:
            self._log_once("the server refused VMs of this host", problem)
        return REFUSED_SECONDS if problems else None

    async def _report_changes(self, calls: ServerCalls) -> None:
        again_seconds: float | None = None
        while True:  # ends when cancelled, or when the server fails
            await asyncio.sleep(REPORT_EVERY_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(again_seconds):
                    await self._inventory.changed.wait()
            again_seconds = await self._report(calls)

    async def _ask_for_work(self, calls: ServerCalls) -> None:
        wait_seconds = 0.0  # the first answer tells whether this server serves us
        while True:  # ends when cancelled, or when the server fails
            await self._inventory.readable.wait()  # a host that cannot act is unreachable
            work = await calls.ask_for_work(self._worker.running(), wait_seconds)
            wait_seconds = WAIT_SECONDS
            self._on_connected(calls)
            self._worker.apply(work)
            if not work.impacts:
                await asyncio.sleep(IDLE_SECONDS)

    async def _send_results(self, calls: ServerCalls) -> None:
        while True:  # ends when cancelled, or when the server fails
            await self._worker.has_results.wait()
            for result in self._worker.results():
                try:
                    is_accepted = await calls.send_result(result)
                except CallRefused as error:
                    self._log_once("the server refused a result", error.message)
                    is_accepted = False
                self._worker.on_answer(result, is_accepted=is_accepted)

    def _on_connected(self, calls: ServerCalls) -> None:
        if not self._is_connected:
            log.info("connected to server", server=calls.url)
            self._logged.clear()
        self._was_accepted = self._is_connected = True
        self._failures = 0

    def _on_lost(self, error: Error) -> None:
        """Raise Invalid if the token was never accepted: only an operator can change that."""
        if isinstance(error, TokenRejected) and not self._was_accepted:
            raise Invalid(f"token_file: {error.message}", option="token_file") from error
        state = "server lost" if self._is_connected else "no server serves this host"
        self._log_once(f"{state}; trying again", error.message)
        self._is_connected = False
        self._failures += 1

    def _log_once(self, text: str, problem: str) -> None:
        """Until the next connection."""
        if problem not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(problem)
            log.warning(text, problem=problem)

    async def _leave(self, calls: ServerCalls) -> None:
        """Stop all calls, and release the lease of this host at once."""
        await self._worker.stop()
        with suppress(Error, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS_MAX):
                for result in self._worker.results():
                    await calls.send_result(result)
                await calls.end_session()
