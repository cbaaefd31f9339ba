"""The relay as a process: `python -m tests.e2e.relay_process`.

Reads its settings as a JSON object from the first line of its input. A line after that is the new
`ports` (`{"port": id}`). The end of the input ends it.
"""

import asyncio
import hashlib
import json
import socket
import sys
from contextlib import suppress
from typing import Any

import uvloop

from forewarn.errors import Error, Unavailable
from forewarn.hostd.bridge_listener import BridgeListener
from forewarn.hostd.moves import Moves
from forewarn.hostd.relay import Relay
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Upstream
from forewarn.log import log_to_stderr
from forewarn.option_kind import Address


async def serve(settings: dict[str, Any], lines: asyncio.StreamReader) -> None:
    vms = find_interfaces(settings["ports"])
    _, name, secret = settings["token"].split("_", 2)
    key = hashlib.sha256(secret.encode()).hexdigest().encode()
    upstream = Upstream(settings["servers"])
    relay = Relay(upstream, HostToken(name, "", key), Moves())
    address = Address("169.254.169.254", 80)
    bridges = [BridgeListener(relay, bridge, address, vms) for bridge in settings["bridges"]]
    problems = [await bridge.update() for bridge in bridges]
    if not any(bridge.is_serving for bridge in bridges):
        raise Unavailable(problems[0][0].reason)
    tasks = (relay.run(), *(bridge.follow() for bridge in bridges))
    following = [asyncio.create_task(task) for task in tasks]
    print("ready", flush=True)
    while line := await lines.readline():
        vms.clear()
        vms.update(find_interfaces(json.loads(line)))
        for bridge in bridges:
            bridge.wake()
        print("changed", flush=True)
    for task in following:
        task.cancel()
    await asyncio.gather(*(bridge.stop() for bridge in bridges))
    upstream.close()


def find_interfaces(ports: dict[str, str]) -> dict[int, str]:
    """The VM at each interface that exists, by its index."""
    vms = {}
    for port, vm in ports.items():
        with suppress(OSError):
            vms[socket.if_nametoindex(port)] = vm
    return vms


async def main() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    try:
        await serve(json.loads(await lines.readline()), lines)
    except Error as error:
        print(f"error: {error.message}", flush=True)


if __name__ == "__main__":
    with log_to_stderr():
        uvloop.run(main())
