"""The VMs of this host, and where they are plugged in.

They come from a source: libvirt (`libvirt_source.py`), or a command that prints them.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import NamedTuple, Protocol

import msgspec

from forewarn.errors import Error, Unavailable
from forewarn.log import log
from forewarn.option_kind import ExecCommand
from forewarn.platform.base import PROBLEM_LENGTH_MAX
from forewarn.platform.exec import Output, resolve_program, run_command
from forewarn.platform.remote import UNDECODABLE, ReportedVm

COMMAND_SECONDS_MAX = 30.0
COMMAND_BYTES_MAX = 1 << 23
GRACE_SECONDS = 1.0
SETTLE_SECONDS = 0.2
"""Events come in bursts, when a host starts all its VMs; they are looked at together."""
RETRY_SECONDS_MAX = 10.0


class ListedVm(ReportedVm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A VM of this host. `ports` are the names of its interfaces here; servers ignore them."""

    scope: str = ""
    ports: tuple[str, ...] = ()


class Report(NamedTuple):
    """All VMs of this host, and its memory."""

    memory_bytes: int = 0
    vms: tuple[ListedVm, ...] = ()


class Source(Protocol):
    """Lists the VMs of this host. `woken` is set when that is worth doing again at once."""

    woken: asyncio.Event

    async def list_vms(self) -> Report:
        """Raises an Error, or OSError, if they cannot be listed now."""
        ...


class Inventory:
    """The VMs that the source listed last.

    `tried` is set when the source has been asked. `problem` is why it did not answer then, which
    stays the same until it answers. `listed_at` is the loop's time when it last began
    to. `on_change` is called when there is something new.
    `ids` has the id of the VM at each interface of this host, by its index: a name may be used
    again for another VM. `interfaces` lists the index and name of each.
    """

    def __init__(
        self,
        source: Source,
        every_seconds: float,
        interfaces: Callable[[], list[tuple[int, str]]] = socket.if_nameindex,
    ) -> None:
        self._source = source
        self._every_seconds = every_seconds
        self._interfaces = interfaces
        self.ids: dict[int, str] = {}
        self.report = Report()
        self.tried = asyncio.Event()
        self.problem = ""
        self.on_change: Callable[[], None] = lambda: None
        self.on_ports: Callable[[], None] = lambda: None
        self._refreshes = self._listed = 0
        self.listed_at = 0.0

    @property
    def is_stale(self) -> bool:
        """Whether the VMs were listed before the last `refresh`."""
        return self._listed != self._refreshes

    def refresh(self) -> None:
        """List the VMs again: an impact may have removed one, a port has come or gone, or a server
        wants a new list.
        """
        self._refreshes += 1
        self._source.woken.set()

    async def run(self) -> None:
        """List the VMs when the source is woken, and every few seconds, until cancelled."""
        pause = 0.0
        while True:  # ends when cancelled
            self._source.woken.clear()
            refreshes = self._refreshes
            try:
                before, began_at = self._interfaces(), asyncio.get_running_loop().time()
                self._update(await self._source.list_vms(), before)
                pause, self.listed_at = self._every_seconds, began_at
                if self.is_stale:
                    self._listed = refreshes
                    self.on_change()
            except (Error, OSError) as error:
                self._on_failure(str(error) or type(error).__name__)
                pause = min(max(2 * pause, 1.0), RETRY_SECONDS_MAX)
            self.tried.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._source.woken.wait()
                    await asyncio.sleep(SETTLE_SECONDS)

    def _update(self, report: Report, before: list[tuple[int, str]]) -> None:
        """Only an interface that was there all the time is certainly the one that was listed."""
        indexes = {name: index for index, name in {*before} & {*self._interfaces()}}
        known = dict(self.ids)
        self.ids.clear()
        for vm in [each for each in report.vms if each.power == "running"]:
            for index in [indexes[port] for port in vm.ports if port in indexes]:
                self.ids[index] = "" if index in self.ids else vm.id.lower()
        if self.ids != known:
            self.on_ports()
        if self.problem or not self.tried.is_set():
            log.info("the VMs of this host are listed", vms=len(report.vms))
        if report != self.report or self.problem:
            self.report, self.problem = report, ""
            self.on_change()

    def _on_failure(self, problem: str) -> None:
        if not self.problem:
            log.warning("the VMs of this host cannot be listed", problem=problem)
            self.problem = f"its VMs cannot be listed: {problem}"[:PROBLEM_LENGTH_MAX]
            self.on_change()


class CommandSource:
    """Runs a command that prints a JSON list of VMs, see docs/hostd.md."""

    def __init__(
        self,
        command: ExecCommand,
        environ: Mapping[str, str],
        seconds_max: float = COMMAND_SECONDS_MAX,
    ) -> None:
        self._words = resolve_program(command.words, environ, "inventory_command")
        self._environ = dict(environ)  # uvloop accepts nothing else
        self._seconds_max = seconds_max
        self._memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.woken = asyncio.Event()

    async def list_vms(self) -> Report:
        with closing(Output(COMMAND_BYTES_MAX)) as printed, closing(Output()) as errors:
            limits = self._seconds_max, GRACE_SECONDS
            problem = await run_command(self._words, self._environ, (printed, errors), limits)
        if len(printed.content) > COMMAND_BYTES_MAX:
            raise Unavailable(f"inventory_command printed more than {COMMAND_BYTES_MAX} bytes")
        if problem:
            raise Unavailable(f"inventory_command {problem}: {errors.text()}")
        try:
            vms = msgspec.json.decode(printed.content, type=tuple[ListedVm, ...])
        except UNDECODABLE as error:
            raise Unavailable(f"inventory_command printed something else: {error}") from error
        return Report(self._memory_bytes, vms)
