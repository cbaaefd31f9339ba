"""What one hostile guest costs the polls of another guest of its host, at the relay of the host.
`python -m tests.bench.relay_attack [ATTACK...]`, as root; exits 1 where the limit is exceeded.

The relay has one core. The server, the guest that polls and the attacker share the other one.
"""

import json
import math
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path

from forewarn.hostd.relay import LIMITS
from tests.bench.attack import APPROVAL, PAUSE_SECONDS
from tests.bench.load import LOAD_CORE, SERVER_CORE
from tests.bench.rounds import PROCESS_SECONDS_MAX, Polls, Result, summarize, take_rounds
from tests.e2e.bridge_world import ALIAS, BRIDGE_MAC, POLL, BridgeWorld, GuestClient
from tests.e2e.raw_tcp import ETH_P_IP, SYN, Wire, tcp_packet

POLLS = 500
POLL_SECONDS_MAX = 5.0
NEIGHBOR, ATTACKER = (f"00000000-0000-4000-8000-00000000000{number}" for number in range(2))
FLEET = {
    "scopes": [
        {"name": name, "kind": "vm", "vms": [{"name": name, "id": vm, "host": "h"}]}
        for name, vm in (("neighbor", NEIGHBOR), ("attacker", ATTACKER))
    ]
}
RESET = struct.pack("ii", 1, 0)
ATTACK = "--attack"
"""What goes before the name of an attack when this program is started as the attacker."""
THREADS = 8
HELD_MAX = 500
PIPELINED = 400
STATUS_LINE = b"HTTP/1.1 "
LARGEST_BODY = b"{" + b" " * (LIMITS.body_bytes_max - 2) + b"}"
LARGEST = (
    POLL.replace(b"GET", b"POST", 1)[:-2]
    + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(LARGEST_BODY)
    + LARGEST_BODY
)

got = Counter[str]()


def connect() -> socket.socket:
    return socket.create_connection((ALIAS, 80), POLL_SECONDS_MAX)


def connect_and_reset() -> None:
    with connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    got["resets"] += 1


def hold_half_requests() -> None:
    """Hold as many connections as we get, each with half a request, and open more."""
    held = list[socket.socket]()
    for _ in range(HELD_MAX // THREADS):
        with suppress(OSError):
            client = connect()
            held.append(client)
            client.sendall(POLL[:-2])
            got["half requests"] += 1
    time.sleep(1)
    for client in held:
        client.close()


def hold_half_open() -> None:
    """The first packet of each connection, and never the rest, with ever other addresses."""
    own = bytes.fromhex(Path("/sys/class/net/eth0/address").read_text().replace(":", ""))
    bridge = bytes.fromhex(BRIDGE_MAC.replace(":", ""))
    with closing(Wire()) as wire:
        for number in count():  # ends with the process
            source = f"192.168.122.{100 + number % 100}"
            packet = tcp_packet(source, ALIAS, 1024 + number % 60_000, SYN, number & 0xFFFF_FFFF)
            wire.send(own, bridge, ETH_P_IP, packet)
            got["first packets"] += 1


def reconnect() -> None:
    with connect() as client:
        client.sendall(POLL)
        got[client.recv(1 << 16)[9:12].decode() or "closed"] += 1


def repeat(request: bytes) -> Callable[[], None]:
    """Send a request again and again on one connection, each time when its response has come."""

    def run() -> None:
        with connect() as client:
            while True:  # ends with the connection
                client.sendall(request)
                if not (response := client.recv(1 << 16)):
                    return
                got[response[9:12].decode()] += 1

    return run


def pipeline() -> None:
    """Send many polls at once, and the next ones when all have been answered.

    A connection whose requests only pile up is closed.
    """
    with connect() as client:
        while True:  # ends with the connection
            client.sendall(POLL * PIPELINED)
            left, tail = PIPELINED, b""
            while left > 0:
                if not (received := client.recv(1 << 18)):
                    return
                tail += received
                answers = tail.count(STATUS_LINE)
                tail = tail[-len(STATUS_LINE) + 1 :]  # one that is cut in two is counted once
                left -= answers
                got["answers"] += answers


ATTACKS: dict[str, Callable[[], None]] = {
    "a guest connects and resets": connect_and_reset,
    "a guest holds half requests": hold_half_requests,
    "a guest half-opens connections": hold_half_open,
    "a guest reconnects for each poll": reconnect,
    "a guest polls flat out": repeat(POLL),
    "a guest pipelines polls": pipeline,
    "a guest approves 1,000 unknown ids": repeat(APPROVAL),
    "a guest sends the largest bodies": repeat(LARGEST),
}


def attack(name: str) -> None:
    """Until it is ended; then print what the attacker got."""

    def run() -> None:
        while True:  # ends with the process
            with suppress(OSError):
                ATTACKS[name]()

    def stop(*_: object) -> None:
        print(json.dumps(got), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(PROCESS_SECONDS_MAX)
    for _ in range(THREADS):
        threading.Thread(target=run, daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()  # ends with the process


def poll_times(namespace: str) -> Iterator[float]:
    """How long each poll of the neighbor takes, in turn on a kept connection and on a new one.

    Infinite if it fails.
    """
    kept: GuestClient | None = None
    for number in range(POLLS):
        began = time.perf_counter()
        try:
            if number % 2:
                kept = kept or GuestClient(namespace, seconds_max=POLL_SECONDS_MAX)
                status = kept.ask().status
            else:
                with GuestClient(namespace, seconds_max=POLL_SECONDS_MAX) as client:
                    status = client.ask().status
            yield time.perf_counter() - began if status == 200 else math.inf
        except OSError:
            kept = None
            yield math.inf
        time.sleep(PAUSE_SECONDS)


def measure(names: Sequence[str] = tuple(ATTACKS)) -> list[Result]:
    """The polls of the neighbor with and without each attack, from the core of this process."""
    if os.geteuid():
        print("the attacks on a relay need root, and are left out", file=sys.stderr)
        return []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        world = BridgeWorld(stack, Path(folder))
        (world.folder / "fleet.yaml").write_text(json.dumps(FLEET))
        world.add_bridge("br0", "192.168.122.1/24")
        server = world.start_server(0, "--fleet", str(world.folder / "fleet.yaml"))
        os.sched_setaffinity(server.pid, {int(LOAD_CORE)})
        token = world.create_host_token("h")
        assert world.start_relay("http://127.0.0.1:8080", token=token) == "ready\n"
        os.sched_setaffinity(world.relay_pid, {int(SERVER_CORE)})
        neighbor = world.add_guest("br0", "192.168.122.10/24", NEIGHBOR)
        attacker = world.add_guest("br0", "192.168.122.11/24", ATTACKER)

        def observe() -> Polls:
            return summarize(poll_times(neighbor.namespace))

        inside = ("ip", "netns", "exec", attacker.namespace)
        module = (sys.executable, "-m", "tests.bench.relay_attack")
        words = (*inside, *module, ATTACK)
        return [take_rounds(name, observe, *words, name) for name in names]


def main() -> int:
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    results = measure(sys.argv[1:] or tuple(ATTACKS))
    for result in results:
        print(*result.lines(), sep="\n")
    return 0 if all(result.is_met for result in results) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [ATTACK]:
        attack(sys.argv[2])
    else:
        sys.exit(main())
