"""The daemon's call to the servers: what it has, and what it should do.

Each request reports everything, and is held until the server has something new. When the daemon has
something new, it abandons that request for the next one.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from forewarn.core.fleet import Vm
from forewarn.errors import Error, HostTaken, Invalid, Unavailable
from forewarn.hostd.inventory import Inventory, Report
from forewarn.hostd.refusals import Refusals
from forewarn.hostd.settings import HostToken
from forewarn.hostd.unconfirmed import Unconfirmed
from forewarn.hostd.upstream import Request, ServerLost, Upstream
from forewarn.hostd.worker import ImpactRunner
from forewarn.log import log
from forewarn.platform.base import ImpactRequest
from forewarn.platform.remote import (
    UNCONFIRMED_SECONDS_MAX,
    UNDECODABLE,
    HostReport,
    Work,
    WorkRequest,
)

OK, SERVER_ERROR, TOO_MANY_REQUESTS, REJECTED = 200, 500, 429, (401, 403)
REPORT_EVERY_SECONDS = 1.0
REPORT_AGAIN_SECONDS = 60.0
"""The same inventory is sent again: the fleet may have been changed otherwise."""
PAUSE_SECONDS = 0.05
"""Between two requests, so that a server that does not hold them is not flooded."""
RETRY_SECONDS = 1.0
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


class ReceivedVm(Vm, frozen=True, forbid_unknown_fields=False):
    """A VM as a server describes it. A newer server may know more of it."""


@dataclass(frozen=True, slots=True)
class ReceivedImpact(ImpactRequest):
    """An impact as a server hands it out."""

    vm: ReceivedVm


class ReceivedWork(Work, frozen=True):
    """Work as a server hands it out."""

    impacts: tuple[ReceivedImpact, ...] = ()


class ControlLoop:
    """One run of the daemon.

    `session` distinguishes it from another run, `machine` from a daemon with its host name on
    another machine.
    """

    def __init__(
        self,
        upstream: Upstream,
        host: str,
        token: HostToken,
        inventory: Inventory,
        runner: ImpactRunner,
        session: str,
        machine: str,
        retry_seconds: float = RETRY_SECONDS,
        chance: Callable[[], float] = random.random,
        refusals: Refusals | None = None,
        unconfirmed: Unconfirmed | None = None,
        *,
        relays: bool = True,
    ) -> None:
        self._upstream = upstream
        self._inventory = inventory
        self._runner = runner
        self._session = session
        self._machine = machine
        self._relays = relays
        self._numbers = itertools.count(1)
        self._retry_seconds = retry_seconds
        self._chance = chance
        self._refusals = refusals or Refusals()
        self._unconfirmed = unconfirmed or Unconfirmed()
        self._target = f"/api/v1/hosts/{host}/work".encode()
        self._headers = (
            (b"authorization", f"Bearer {token.text}".encode()),
            (b"content-type", b"application/json"),
        )
        self._news = asyncio.Event()
        inventory.on_change, runner.on_change = self._news.set, self._on_result
        self._unconfirmed.on_change = self._news.set
        self._reported: Report | None = None
        self._reported_at = -REPORT_AGAIN_SECONDS
        self._server = ""
        self._answered_by, self._answered_at = "", 0.0
        self._failures = 0
        self._was_accepted = False
        self._rejected_by: set[str] = set()
        self._logged: set[str] = set()

    async def run(self) -> None:
        """Work until cancelled, then end the session."""
        try:
            while True:  # ends when cancelled
                await self._inventory.tried.wait()
                if not self._inventory.problem:
                    await self._runner.find_begun()
                await self._turn()
        except asyncio.CancelledError:
            await self._leave()
            raise
        finally:
            self._upstream.close()

    async def _turn(self) -> None:
        self._news.clear()
        report = self._next_report()
        try:
            work = await self._exchange(report)
        except (Unavailable, HostTaken, CallRefused) as error:
            self._on_failure(error)
            pause = min(self._failures, 3) * self._retry_seconds
            await asyncio.sleep(pause * (1 + self._chance() / 2))
            return
        if work is not None:
            self._on_work(work, report)
        await asyncio.sleep(PAUSE_SECONDS)

    def _next_report(self) -> Report | None:
        """The inventory, if it has to be sent now."""
        loop, report = asyncio.get_running_loop(), self._inventory.report
        is_new = report is not self._reported
        due = self._reported_at + (REPORT_EVERY_SECONDS if is_new else REPORT_AGAIN_SECONDS)
        if self._inventory.is_stale or self._inventory.problem:
            return None  # it may have a VM that an impact has removed
        if due <= loop.time():
            return report
        if is_new:
            loop.call_at(due, self._news.set)
        return None

    def _on_result(self) -> None:
        self._inventory.refresh()
        self._news.set()

    async def _exchange(self, report: Report | None) -> Work | None:
        """Report everything, and get what is new; None if the daemon has something new first."""
        sent = None
        if report is not None:
            age_seconds = asyncio.get_running_loop().time() - self._inventory.listed_at
            vms = [msgspec.Raw(msgspec.json.encode(vm)) for vm in report.vms]
            sent = HostReport(vms, report.memory_bytes, max(age_seconds, 0.0))
        is_held = report is None and self._server != "" and not self._unconfirmed.has_ended
        request = self._make_request(inventory=sent, wait=is_held)
        if not is_held:  # the first response says whether this server serves us
            try:
                return await self._call(request)
            except CallRefused as error:
                if report is None:
                    raise
                return Work(problems=(error.message,))  # the work goes on without it
        call = asyncio.ensure_future(self._call(request))
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait((call, news), return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            call.cancel()
            news.cancel()

    def _make_request(self, **fields: Any) -> WorkRequest:
        refusals = self._refusals
        return WorkRequest(
            self._session,
            self._machine,
            self._runner.running(),
            number=next(self._numbers),
            refusals=dict(refusals.counts),
            refused=refusals.lasting(),
            problem=self._inventory.problem,
            unserved=self._unconfirmed.list_bridges(),
            unconfirmed_seconds=self._unconfirmed.seconds,
            no_server_seconds=self._no_server_seconds(),
            relays=self._relays,
            **fields,
        )

    def _no_server_seconds(self) -> int | None:
        """How long no server has answered, rounded up; None while one does, or if none ever has."""
        if not self._answered_by or not self._failures:
            return None
        seconds = asyncio.get_running_loop().time() - self._answered_at
        return min(math.ceil(seconds), UNCONFIRMED_SECONDS_MAX)

    async def _call(self, request: WorkRequest) -> Work:
        """It may be repeated: that changes nothing.

        Raises ServerLost, TokenRejected, HostTaken, or CallRefused.
        """
        body = msgspec.json.encode(request)
        response = await self._upstream.send(Request("POST", self._target, self._headers, body))
        url, status = self._upstream.current, response.status
        try:
            if status == OK:
                work = msgspec.json.decode(response.body, type=ReceivedWork)
                self._on_response(request)
                return work
            refusal = msgspec.json.decode(response.body, type=Refusal)
        except UNDECODABLE as error:
            problem = f"status {status} and not what was expected: {error}"
            raise ServerLost(f"{url} answered with {problem}") from error
        message = f"{url}: {refusal.message} (status {status})"
        if status >= SERVER_ERROR or status == TOO_MANY_REQUESTS:
            raise ServerLost(message)
        if status in REJECTED:
            raise TokenRejected(message)
        raise HostTaken(message) if refusal.error == HostTaken.code else CallRefused(message)

    def _on_response(self, request: WorkRequest) -> None:
        """Note for how long there was none, if the last server was lost."""
        now, server = asyncio.get_running_loop().time(), self._upstream.current
        self._unconfirmed.report(request.unconfirmed_seconds)
        if self._answered_by and (self._failures or server != self._answered_by):
            self._unconfirmed.miss(now - self._answered_at)
        self._answered_by, self._answered_at = server, now

    def _on_work(self, work: Work, report: Report | None) -> None:
        server = self._upstream.current
        if not self._server:
            log.info("connected to server", server=server)
            self._logged.clear()
        if report is not None:
            self._reported = report
            self._reported_at = asyncio.get_running_loop().time()
        if not work.is_merged or (report is None and self._server != server):
            self._reported = None  # it gets everything again
        if not work.is_merged and not self._inventory.problem:
            self._inventory.refresh()  # it wants to know which VMs run now
        self._server, self._was_accepted, self._failures = server, True, 0
        for problem in work.problems:
            self._log_once("VM not accepted", problem)
        self._runner.apply(work)

    def _on_failure(self, error: Error) -> None:
        """Raise Invalid if no server has ever accepted the token: only an operator can help."""
        if isinstance(error, TokenRejected) and not self._was_accepted:
            self._rejected_by.add(self._upstream.current)
            if len(self._rejected_by) == self._upstream.count:
                raise Invalid(f"token_file: {error.message}", option="token_file") from error
        if isinstance(error, TokenRejected):
            self._upstream.skip()
        if isinstance(error, HostTaken):  # another daemon acts on these VMs
            self._runner.cancel_all()
        state = "server lost" if self._server else "no server serves this host"
        self._log_once(f"{state}; trying again", error.message)
        self._server, self._reported = "", None
        self._failures += 1

    def _log_once(self, text: str, problem: str) -> None:
        """Until the next connection."""
        if problem not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(problem)
            log.warning(text, problem=problem)

    async def _leave(self) -> None:
        """Stop all calls, and make the host unreachable at once."""
        await self._runner.stop()
        with suppress(Error, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS_MAX):
                await self._call(self._make_request(is_leaving=True))
