"""What the control API offers in a lab besides: its clock, its faults, its transcript, its doors."""

from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from litestar import Controller, Response, Router, delete, get, post, put
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, JSONBody, QueryParameter, RawBody
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED

from forewarn import errors
from forewarn.engine.clock import VirtualClock
from forewarn.fleetfile import yaml_source as text
from forewarn.lab.fault import active as fault
from forewarn.lab.service import LabService
from forewarn.lab.transcript import Entry
from forewarn.web.control.dependencies import Limit
from forewarn.web.control.openapi import COMMON_ERRORS, error_responses
from forewarn.web.http_status import BodyTooLarge

Lab = NamedDependency[LabService]
After = Annotated[
    int, QueryParameter(ge=0, description="Only what came after the entry of this number.")
]
Newest = Annotated[
    bool,
    QueryParameter(description="The newest, where there are more than the limit; else the oldest."),
]


class ClockView(msgspec.Struct, frozen=True):
    """The lab's time.

    Only a virtual clock can be moved; it follows the real time while `is_running`.
    """

    now: datetime
    rate: float
    is_virtual: bool
    is_running: bool


class ClockChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to change: another rate, a later moment to jump to, run or stand still."""

    rate: float | None = None
    now: datetime | None = None
    is_running: bool | None = None


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class FaultsView(msgspec.Struct, frozen=True):
    faults: list[dict[str, Any]]
    total: int


class FaultView(msgspec.Struct, frozen=True):
    fault: dict[str, Any]


class TranscriptView(msgspec.Struct, frozen=True):
    """The entries after the one that was named, the oldest of them or the newest; `total` counts
    all that are kept.

    `left_out` counts those that the limit leaves out.
    """

    entries: list[Entry]
    total: int
    left_out: int


class DoorsView(msgspec.Struct, frozen=True):
    """The VMs that have a listener of their own, and its URL: requests to it count as that VM's.

    `total` counts all VMs.
    """

    doors: dict[str, str]
    total: int


def routes(lab: LabService) -> Router:
    return Router(
        path="/api/v1",
        route_handlers=[Clocks, Faults, Transcripts, Doors],
        dependencies={"lab": Provide(lambda: lab, sync_to_thread=False)},
        tags=["Lab"],
    )


class Clocks(Controller):
    path = "/clock"

    @get("/", responses=COMMON_ERRORS)
    async def read_clock(self, lab: Lab) -> ClockView:
        """The lab's time, and how fast things happen."""
        return clock_view(lab)

    @put("/", responses=error_responses(errors.Refused, BodyTooLarge))
    async def set_clock(self, data: JSONBody[ClockChange], lab: Lab) -> ClockView:
        """Sets the rate, jumps to a later moment, runs or stands still: all that is asked, or
        nothing.
        """
        await lab.change_clock(rate=data.rate, moment=data.now, is_running=data.is_running)
        return clock_view(lab)

    @post(
        "/advance", status_code=HTTP_200_OK, responses=error_responses(errors.Refused, BodyTooLarge)
    )
    async def advance_clock(self, data: JSONBody[Span], lab: Lab) -> ClockView:
        """Lets the time pass, moment by moment, and answers when all that was due is done."""
        try:
            span = timedelta(seconds=data.seconds)
        except (OverflowError, ValueError) as error:
            raise errors.Invalid(
                f"body.seconds is {data.seconds:g}; expected a number of seconds", field="seconds"
            ) from error
        await lab.advance(span)
        return clock_view(lab)


class Faults(Controller):
    path = "/faults"

    @get("/", responses=COMMON_ERRORS)
    async def list_faults(self, lab: Lab, limit: Limit = 1000) -> FaultsView:
        """The faults that are in force or will be."""
        now = lab.clock.now()
        shown = [fault_view(one) for one in lab.faults.standing.values() if not one.is_over(now)]
        return FaultsView(shown[:limit], len(shown))

    @post(
        "/", status_code=HTTP_201_CREATED, responses=error_responses(errors.Refused, BodyTooLarge)
    )
    async def add_fault(self, body: RawBody, lab: Lab) -> FaultView:
        """From its moment on, the endpoint misbehaves so; the schema is at /api/v1/faults/schema."""
        said = text.load(body, "body")
        if not isinstance(said, dict):
            raise errors.Invalid("body: expected a mapping that names the fault", field="body")
        added = lab.add_fault(fault.parse(said))
        await lab.enforce_faults()
        return FaultView(fault_view(added))

    @get("/schema", responses=COMMON_ERRORS)
    async def fault_schema(self) -> Response[dict[str, Any]]:
        """What a fault may say."""
        return Response(fault.SCHEMA)

    @delete("/{fault_id:str}", status_code=HTTP_200_OK, responses=error_responses(errors.NotFound))
    async def remove_fault(self, fault_id: FromPath[str], lab: Lab) -> FaultView:
        """The endpoint behaves again in this respect."""
        removed = lab.remove_fault(fault_id)
        await lab.enforce_faults()
        return FaultView(fault_view(removed))

    @delete("/", status_code=HTTP_200_OK, responses=COMMON_ERRORS)
    async def clear_faults(self, lab: Lab) -> FaultsView:
        """The endpoint behaves again. The answer shows what was taken away."""
        removed = [fault_view(lab.remove_fault(name)) for name in list(lab.faults.standing)]
        await lab.enforce_faults()
        return FaultsView(removed, len(removed))


class Transcripts(Controller):
    path = "/transcript"

    @get("/", responses=COMMON_ERRORS)
    async def read_transcript(
        self, lab: Lab, after: After = 0, limit: Limit = 1000, *, newest: Newest = False
    ) -> TranscriptView:
        """Every request with its answer, every change, every step, in order."""
        kept = lab.transcript.entries
        entries = [entry for entry in kept if entry.number > after]
        shown = entries[-limit:] if newest else entries[:limit]
        return TranscriptView(shown, len(kept), len(entries) - len(shown))


class Doors(Controller):
    path = "/doors"

    @get("/", responses=COMMON_ERRORS)
    async def list_doors(self, lab: Lab) -> DoorsView:
        """The listeners that are open. Opens none."""
        return DoorsView(lab.door_urls(), len(lab.engine.board.vms))

    @post("/", status_code=HTTP_200_OK, responses=error_responses(errors.Refused))
    async def make_doors(self, lab: Lab) -> DoorsView:
        """Opens a listener for each VM that has none yet, up to 256 in all.

        Repeating it changes nothing.
        """
        return DoorsView(await lab.doors(), len(lab.engine.board.vms))


def clock_view(lab: LabService) -> ClockView:
    is_virtual = isinstance(lab.clock, VirtualClock)
    return ClockView(
        now=lab.clock.now(),
        rate=lab.rate,
        is_virtual=is_virtual,
        is_running=not isinstance(lab.clock, VirtualClock) or lab.clock.is_running,
    )


def fault_view(standing: fault.Standing) -> dict[str, Any]:
    """The fault as it was said, its id, and what is left of it."""
    times = {
        "begins_at": standing.begins_at,
        "ends_at": standing.ends_at,
        "requests_left": standing.left,
    }
    return {"id": standing.id, **msgspec.to_builtins(standing.fault), **msgspec.to_builtins(times)}
