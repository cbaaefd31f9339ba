"""Our side of the bench, as a process of its own: a metadata listener over a fleet that fills the
board.

It prints one JSON line when it listens, and one for each `rss` on stdin; `change` makes it change
the callers' document. The end of its input ends it.
"""

import argparse
import asyncio
import gc
import json
import sys
from datetime import UTC, datetime

import uvloop

from forewarn.config import Config, Identify
from forewarn.core.command import Restart, SetMembers
from forewarn.core.fleet import Policy, Scope, ScopeKind, Vm
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.option_kind import Address
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Listener
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from tests.bench.memory import rss_bytes

CONNECTIONS_MAX = 20_000
CALLERS = tuple(Vm(name=f"caller-{number}", address=f"127.0.0.{number}") for number in range(1, 5))
EVENT_ID = "602D9444-D2CD-49C7-8624-8643E7171297"


def fill(engine: Engine, *, vms: int, vms_per_scope: int) -> None:
    """Show the fleet on the board directly. Every scope was just polled."""
    now = datetime.now(UTC)
    for first in range(0, vms, vms_per_scope):
        members = tuple(
            Vm(
                name=f"vm-{number}",
                address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
                host=f"host-{number % 1000}",
            )
            for number in range(first, first + vms_per_scope)
        )
        name = f"scope-{first}"
        engine.board.publish(Scope(name=name, vms=members), first + 1)
        engine.board.see(name, now, first + 2)


async def serve(arguments: argparse.Namespace) -> None:
    engine = Engine(MemoryStore(), RealClock(), Timing())
    before = rss_bytes()
    fill(engine, vms=arguments.vms, vms_per_scope=arguments.vms_per_scope)
    filled = rss_bytes() - before
    await engine.submit(
        "callers",
        SetMembers(kind=ScopeKind.AVAILABILITY_SET, policy=Policy(), vms=CALLERS),
        by="bench",
    )
    await engine.seen(engine.board.scopes["callers"])
    config = Config(identify=(Identify.ADDRESS, Identify.PATH), wait_seconds_max=600)
    application = Metadata(engine, config)
    polls = Polls(engine, config, Limits(connections_per_address_max=CONNECTIONS_MAX))
    listener = Listener(
        application,
        Address("127.0.0.1", 0),
        polls,
        server_name=SERVER_METADATA,
        on_stop=application.stop,
    )
    await listener.start()
    gc.freeze()  # the fleet is no garbage, and is not looked through for any
    act(port=listener.address.port, filled=filled)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):  # ends with the input
        if line == "rss\n":
            act(rss=rss_bytes(), waiting=len(engine.board.scopes["callers"].waiters or ()))
        else:
            await engine.submit(
                "callers", Restart(vm=CALLERS[0].name, event_id=EVENT_ID), by="bench"
            )
    await listener.stop()


def act(**facts: int) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vms", type=int, required=True)
    parser.add_argument("--vms-per-scope", type=int, default=1)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
