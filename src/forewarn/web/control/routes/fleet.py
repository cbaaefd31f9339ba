"""The fleet: read it, apply a fleet file, get its schema."""

import asyncio
from itertools import islice
from typing import Annotated, Any

from litestar import Controller, Response, get, put
from litestar.params import HeaderParameter, QueryParameter, RawBody

from forewarn import errors
from forewarn.auth.tokens import Role
from forewarn.engine.turns import SLICE
from forewarn.fleetfile.parser import compute_etag, dump_parts, parse
from forewarn.fleetfile.schema import SCHEMA
from forewarn.web.control.dependencies import Call
from forewarn.web.control.json_body import JsonBody
from forewarn.web.control.views import DifferenceView, view

FLEET_BYTES_MAX = 64 * 1024 * 1024

DryRun = Annotated[bool, QueryParameter(description="Return the difference, change nothing.")]
IfMatch = Annotated[
    str,
    HeaderParameter(
        name="If-Match",
        description="The ETag of the fleet that was read; if it has changed since, a 412.",
    ),
]


class FleetController(Controller):
    path = "/api/v1/fleet"
    tags = ("Fleet",)

    @get("/")
    async def read_fleet(self, call: Call) -> Response[dict[str, Any]]:
        """The fleet as JSON that PUT accepts. Its ETag is for the If-Match of that PUT."""
        hosts = call.service.engine.declared_hosts()
        parts = dump_parts(call.service.operations.definitions(), hosts)
        body = JsonBody()
        while slice_ := b"".join(islice(parts, SLICE)):
            body.add(slice_)
            await call.take_turn()
        etag = await asyncio.to_thread(compute_etag, body.chunks)
        return body.respond(call.take_turn, {"ETag": f'"{etag}"'})

    @put(
        "/",
        request_max_body_size=FLEET_BYTES_MAX,
        errors=(errors.VmBusy, errors.ScopeBusy, errors.FleetChanged),
    )
    async def apply_fleet(
        self, body: RawBody, call: Call, *, dry_run: DryRun = False, if_match: IfMatch = "*"
    ) -> DifferenceView:
        """Applies a fleet file, YAML or JSON. Needs the role admin, except with `dry_run`."""
        if not dry_run:
            call.principal.require(Role.ADMIN)
        fleet = await asyncio.to_thread(parse, body, "body")
        tags = {value.strip().strip('"') for value in if_match.split(",")} - {"*"}
        difference = await call.service.operations.apply(
            fleet, by=call.by, dry_run=dry_run, tags=tags
        )
        return view(DifferenceView, difference, dry_run=dry_run)

    @get("/schema")
    async def show_fleet_schema(self) -> Response[dict[str, Any]]:
        """The JSON Schema of a fleet file."""
        return Response(SCHEMA)
