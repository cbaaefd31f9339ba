"""A lab's metadata listener on a real socket: the metadata application behind the filter, on
connections that can be broken.
"""

from random import Random
from typing import Any

from forewarn.config import Address
from forewarn.lab.fault.active import Faults, parse
from forewarn.lab.fault.filter import FaultFilter, FilteredPolls
from forewarn.lab.transcript import Transcript
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Listener
from forewarn.web.metadata import request as ask
from forewarn.web.metadata.app import Message
from tests.e2e.metadata_world import World


class FaultyWorld(World):
    """`web-0` calls at /as/web-0 or from 127.0.0.1. Answers come with faults."""

    def __init__(self) -> None:
        super().__init__()
        clock = self.engine.clock
        self.faults = Faults()
        self.transcript = Transcript(clock.now)
        self.application = FaultFilter(
            self.metadata, self.faults, self.transcript, clock, Random(1), self.vm_of
        )
        self.listener = Listener(
            self._application,
            Address("127.0.0.1", 0),
            FilteredPolls(self.engine, self.config, Limits()),
            server_name=SERVER_METADATA,
            on_stop=self.metadata.stop,
            stop_seconds_max=2.0,
        )

    def vm_of(self, scope: Message) -> str:
        named, _ = ask.split(scope["path"])
        return named or self.engine.board.addresses.get(scope["client"][0], "")

    def add(self, kind: str, **members: Any) -> None:
        """In the loop of the listener, as whoever drives a lab does."""

        async def add() -> None:
            self.faults.add(
                f"f{len(self.faults.standing) + 1}",
                parse({"fault": kind, **members}),
                self.engine.clock.now(),
            )

        self.run(add())

    def clear(self) -> None:
        async def clear() -> None:
            self.faults.clear()

        self.run(clear())
