"""A relay on loopback as a process of its own, for the bench.

Prints its port when it listens, and its memory for each line of input. What it asks the kernel is
what it asks on a bridge: it reads the notices of changes at every request.
"""

import argparse
import asyncio
import hashlib
import socket
import sys

import uvloop

from forewarn.hostd.moves import Moves
from forewarn.hostd.netlink import AF_BRIDGE, Neighbour, Netlink
from forewarn.hostd.ports import SAVE_FROM_ETHERNET, TCP_SAVE_SYN, BridgePorts
from forewarn.hostd.relay import Relay, RelayPolicy
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Upstream
from forewarn.option_kind import Address
from forewarn.web.http.admission import Limits
from forewarn.web.http.listener import SERVER_METADATA, Listener
from tests.bench.memory import rss_bytes

CLIENTS_MAX = 1000


class LoopbackTables(Netlink):
    """Every client is at the same port."""

    def neighbour(self, interface: int, address: str) -> bytes:
        return b""

    def forwarding_entry(self, bridge: int, mac: bytes) -> Neighbour:
        return Neighbour(AF_BRIDGE, bridge, 0, mac, "", bridge)


async def serve(arguments: argparse.Namespace) -> None:
    _, name, secret = arguments.token.split("_", 2)
    key = hashlib.sha256(secret.encode()).hexdigest().encode()
    upstream = Upstream([arguments.server])
    relay = Relay(upstream, HostToken(name, "", key), Moves())
    index = socket.if_nametoindex("lo")
    ports = BridgePorts(index, LoopbackTables.open(), {index: arguments.vm})
    limits = Limits(connections_per_address_max=CLIENTS_MAX)
    policy = RelayPolicy(ports, limits)
    bound = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS_MAX)
    bound.setsockopt(socket.IPPROTO_TCP, TCP_SAVE_SYN, SAVE_FROM_ETHERNET)
    listener = Listener(
        relay, Address("127.0.0.1", 0), policy, server_name=SERVER_METADATA, bound=bound
    )
    await listener.start()
    print(listener.address.port, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):  # ends with the input
        print(rss_bytes(), flush=True)
    await listener.stop()
    upstream.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("server", "token", "vm"):
        parser.add_argument(f"--{name}", required=True)
    uvloop.run(serve(parser.parse_args()))
