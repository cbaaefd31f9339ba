"""The relay as a process: `python -m tests.e2e.relay_process`.

Reads its settings as a JSON object from the first line of its input. A line after that is the new
`ports` (`{"br0/port": id}`). The end of the input ends it.
"""

import asyncio
import hashlib
import json
import sys
from typing import Any

import uvloop

from forewarn.errors import Error
from forewarn.hostd.connection import parse_servers
from forewarn.hostd.relay import BridgeListener, Relay, Signer
from forewarn.hostd.upstream import Upstream
from forewarn.log import log_to_stderr
from forewarn.option_kind import Address


async def serve(settings: dict[str, Any], lines: asyncio.StreamReader) -> None:
    ports: dict[str, str] = settings["ports"]
    _, name, secret = settings["token"].split("_", 2)
    key = hashlib.sha256(secret.encode()).hexdigest().encode()
    upstream = Upstream(parse_servers(settings["servers"], None))
    relay = Relay(upstream, Signer(name, key))
    address = Address("169.254.169.254", 80)
    bridges = [
        BridgeListener(relay, bridge, address, lambda bridge, port: ports.get(f"{bridge}/{port}"))
        for bridge in settings["bridges"]
    ]
    for bridge in bridges:
        await bridge.start()
    following = [asyncio.create_task(bridge.follow()) for bridge in bridges]
    print("ready", flush=True)
    while line := await lines.readline():
        ports.clear()
        ports.update(json.loads(line))
        print("changed", flush=True)
    for task in following:
        task.cancel()
    relay.stop()
    await asyncio.gather(*(bridge.stop() for bridge in bridges))
    upstream.close()


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
