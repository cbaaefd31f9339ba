"""A lab's metadata listener on a real socket, with the fault filter."""

from random import Random
from typing import Any

from forewarn.lab.fault.active import FaultSet, parse_fault
from forewarn.lab.fault.filter import FaultFilter
from forewarn.lab.fault.tcp import FilteredPolls
from forewarn.lab.transcript import Transcript
from forewarn.option_kind import Address
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Listener
from forewarn.web.http.message import Message
from forewarn.web.metadata import request as metadata_request
from tests.e2e.metadata_world import World


class FaultyWorld(World):
    """`web-0` is the client at /as/web-0 and from 127.0.0.1. Responses have faults."""

    def __init__(self) -> None:
        super().__init__()
        clock = self.engine.clock
        self.faults = FaultSet()
        self.transcript = Transcript(clock.now)
        self.application = FaultFilter(
            self.metadata, self.faults, self.transcript, clock, Random(1), self.get_vm
        )
        self.listener = Listener(
            self._application,
            Address("127.0.0.1", 0),
            FilteredPolls(self.engine, self.config, Limits()),
            server_name=SERVER_METADATA,
            on_stop=self.metadata.stop,
            stop_seconds_max=2.0,
        )

    def get_vm(self, scope: Message) -> str:
        name, _ = metadata_request.split(scope["path"])
        return name or self.engine.board.addresses.get(scope["client"][0], "")

    def add(self, kind: str, **members: Any) -> None:
        """Add a fault in the listener's event loop."""

        async def add() -> None:
            self.faults.add(parse_fault({"fault": kind, **members}), self.engine.clock.now())

        self.run(add())

    def clear(self) -> None:
        async def clear() -> None:
            self.faults.by_id.clear()

        self.run(clear())
