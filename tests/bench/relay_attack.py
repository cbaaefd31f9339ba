"""What one hostile guest costs the polls of another guest of its host, at the relay of the host.
`python -m tests.bench.relay_attack`, as root; exits 1 where the limit is exceeded.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.bench.attack import PAUSE_SECONDS
from tests.bench.load import LOAD_CORE, SERVER_CORE
from tests.bench.rounds import PROCESS_SECONDS_MAX, Polls, Result, summarize, take_rounds
from tests.e2e.bridge_world import ALIAS, POLL, BridgeWorld, GuestClient

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
THREADS = 8
HELD_MAX = 500

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


def hammer() -> None:
    with connect() as client:
        while True:  # ends with the connection
            client.sendall(POLL)
            if not client.recv(1 << 16):
                return
            got["answers"] += 1


ATTACKS: dict[str, Callable[[], None]] = {
    "a guest connects and resets": connect_and_reset,
    "a guest holds half requests": hold_half_requests,
    "a guest polls flat out": hammer,
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


def measure() -> list[Result]:
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
        return [take_rounds(name, observe, *inside, *module, name) for name in ATTACKS]


def main() -> int:
    results = measure()
    for result in results:
        print(*result.lines(), sep="\n")
    return 0 if all(result.is_met for result in results) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        attack(sys.argv[1])
    else:
        os.sched_setaffinity(0, {int(LOAD_CORE)})
        sys.exit(main())
