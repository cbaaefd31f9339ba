"""The routes of a lab only: clock, faults, transcript, listeners, scenarios."""

from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from litestar import Controller, Response, Router, delete, get, post, put
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, JSONBody, QueryParameter, RawBody
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED
from msgspec import Meta

from forewarn import errors
from forewarn.fleetfile.schema import number_from
from forewarn.fleetfile.yaml_source import SourceText
from forewarn.lab.clock import VirtualClock
from forewarn.lab.fault.active import ActiveFault, parse_fault
from forewarn.lab.fault.kinds import SCHEMA
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.run_options import RunOptions
from forewarn.lab.scenario.runner import run
from forewarn.lab.scenario.schema import list_library, load_from_library
from forewarn.lab.service import ADVANCE_MAX, LabService
from forewarn.lab.transcript import TranscriptEntry
from forewarn.web.control.dependencies import Limit

LINES_MAX = 2000
ADVANCE_SECONDS_MAX = int(ADVANCE_MAX.total_seconds())
Lab = NamedDependency[LabService]
After = Annotated[int, QueryParameter(ge=0, description="Only entries after this number.")]
Newest = Annotated[
    bool, QueryParameter(description="The newest entries instead of the oldest, up to the limit.")
]


class ClockView(msgspec.Struct, frozen=True):
    """The lab's clock. A virtual clock follows the real time while `is_running`."""

    now: datetime
    rate: float
    is_virtual: bool
    is_running: bool


class ClockChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new rate, a later time to jump to, run or pause."""

    rate: Annotated[float | None, Meta(description="a number")] = None
    now: Annotated[datetime | None, Meta(description="a time")] = None
    is_running: Annotated[bool | None, Meta(description="true or false")] = None


class Advance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: Annotated[float, number_from(0, ADVANCE_SECONDS_MAX, "a number of seconds")]


class FaultsView(msgspec.Struct, frozen=True):
    faults: list[dict[str, Any]]
    total: int


class FaultView(msgspec.Struct, frozen=True):
    fault: dict[str, Any]


class TranscriptView(msgspec.Struct, frozen=True):
    """Entries of the transcript.

    `total` counts all that are kept, `left_out` those beyond the limit.
    """

    entries: list[TranscriptEntry]
    total: int
    left_out: int


class ListenersView(msgspec.Struct, frozen=True):
    """The URLs of the VMs that have a listener. `total` counts all VMs."""

    listeners: dict[str, str]
    total: int


class ScenarioView(msgspec.Struct, frozen=True):
    name: str
    lasts: str
    about: str


class ScenarioList(msgspec.Struct, frozen=True):
    scenarios: list[ScenarioView]
    total: int


class ScenarioRun(msgspec.Struct, frozen=True):
    """What happened, line by line, with the verdicts at the end."""

    is_passed: bool
    lines: list[str]


def make_router(lab: LabService) -> Router:
    return Router(
        path="/api/v1",
        route_handlers=[LabRoutes],
        dependencies={"lab": Provide(lambda: lab, sync_to_thread=False)},
        tags=["Lab"],
    )


class LabRoutes(Controller):
    @get("/clock")
    async def read_clock(self, lab: Lab) -> ClockView:
        """Returns the lab's time and rate."""
        return view_clock(lab)

    @put("/clock", errors=(errors.Refused,))
    async def set_clock(self, data: JSONBody[ClockChange], lab: Lab) -> ClockView:
        """Sets the rate, jumps to a later time, resumes or pauses: all of it or nothing."""
        await lab.change_clock(rate=data.rate, time=data.now, is_running=data.is_running)
        return view_clock(lab)

    @post("/clock/advance", status_code=HTTP_200_OK, errors=(errors.Refused,))
    async def advance_clock(self, data: JSONBody[Advance], lab: Lab) -> ClockView:
        """Lets time pass. Responds when everything that was due is done."""
        await lab.advance(timedelta(seconds=data.seconds))
        return view_clock(lab)

    @get("/faults")
    async def list_faults(self, lab: Lab, limit: Limit = 1000) -> FaultsView:
        """Returns the faults that are active or will be."""
        now = lab.clock.now()
        faults = [view_fault(each) for each in lab.faults.by_id.values() if not each.is_over(now)]
        return FaultsView(faults[:limit], len(faults))

    @post("/faults", status_code=HTTP_201_CREATED, errors=(errors.Refused,))
    async def add_fault(self, body: RawBody, lab: Lab) -> FaultView:
        """Adds a fault to the endpoint. Its schema is at /api/v1/faults/schema."""
        values = SourceText("body", body).load()
        if not isinstance(values, dict):
            raise errors.Invalid("body: expected a mapping that names the fault", field="body")
        return FaultView(view_fault(await lab.add_fault(parse_fault(values))))

    @get("/faults/schema")
    async def show_fault_schema(self) -> Response[dict[str, Any]]:
        """Returns the JSON Schema of a fault."""
        return Response(SCHEMA)

    @delete("/faults/{fault_id:str}", status_code=HTTP_200_OK, errors=(errors.NotFound,))
    async def remove_fault(self, fault_id: FromPath[str], lab: Lab) -> FaultView:
        """Removes a fault."""
        return FaultView(view_fault(lab.remove_fault(fault_id)))

    @delete("/faults", status_code=HTTP_200_OK)
    async def clear_faults(self, lab: Lab) -> FaultsView:
        """Removes all faults and returns them."""
        removed = [view_fault(lab.remove_fault(fault_id)) for fault_id in list(lab.faults.by_id)]
        return FaultsView(removed, len(removed))

    @get("/transcript")
    async def read_transcript(
        self, lab: Lab, after: After = 0, limit: Limit = 1000, *, newest: Newest = False
    ) -> TranscriptView:
        """Returns every request with its response, every change and step, in order."""
        kept = lab.transcript.entries
        entries = [entry for entry in kept if entry.number > after]
        shown = entries[-limit:] if newest else entries[:limit]
        return TranscriptView(shown, len(kept), len(entries) - len(shown))

    @get("/listeners")
    async def list_listeners(self, lab: Lab) -> ListenersView:
        """Returns the open listeners of VMs. Opens none."""
        return ListenersView(lab.vm_urls(), len(lab.engine.board.vms))

    @post("/listeners", status_code=HTTP_200_OK, errors=(errors.Refused,))
    async def open_listeners(self, lab: Lab) -> ListenersView:
        """Opens a listener for each VM that has none, up to 256 in all. Idempotent."""
        return ListenersView(await lab.listen_vms(), len(lab.engine.board.vms))

    @get("/scenarios")
    async def list_scenarios(self) -> ScenarioList:
        """Returns the scenarios that come with Forewarn."""
        found = [load_from_library(name).file for name in list_library()]
        views = [ScenarioView(file.name, file.until, file.about) for file in found]
        return ScenarioList(views, len(views))

    @post("/scenarios/{name:str}/run", status_code=HTTP_200_OK, errors=(errors.NotFound,))
    async def run_scenario(self, name: FromPath[str]) -> ScenarioRun:
        """Runs a scenario to its end, in virtual time and with a fleet of its own."""
        lines: list[str] = []
        console = Console(lines.append)
        result = await run(load_from_library(name), RunOptions(to_the_end=True), console)
        console.print_result(name, result)
        return ScenarioRun(result.is_passed, lines[-LINES_MAX:])


def view_clock(lab: LabService) -> ClockView:
    clock = lab.clock
    is_running = not isinstance(clock, VirtualClock) or clock.is_running
    return ClockView(clock.now(), lab.rate, isinstance(clock, VirtualClock), is_running)


def view_fault(active: ActiveFault) -> dict[str, Any]:
    """Return the fault as it was written, with its id, times and remaining requests."""
    state = {name: getattr(active, name) for name in ("begins_at", "ends_at", "requests_left")}
    return {"id": active.id, **msgspec.to_builtins(active.fault), **msgspec.to_builtins(state)}
