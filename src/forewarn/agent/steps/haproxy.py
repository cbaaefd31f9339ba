"""`haproxy`: drains servers through the runtime socket and waits for their sessions to end; in
recover, makes them ready again.
"""

import csv
import re
import socket
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from forewarn.agent.config_reader import checked, is_text, list_of
from forewarn.agent.steps.base import (
    StepContext,
    StepFailed,
    WorkflowPhase,
    call_with_timeout,
    pause,
    run_each,
)

RESPONSE_BYTES_MAX = 16 * 1024 * 1024
CALL_SECONDS = 5.0
CHECK_SECONDS = 0.25
EACH_RESOURCE = "{resource}"
THIS_VM = "{vm}"
SERVER = re.compile(r"[\w.:-]+/[\w.:-]+", re.ASCII)
SERVERS_FORM = f"a list of backend/server, backend/{THIS_VM} or backend/{EACH_RESOURCE}"


def _is_address(value: object) -> bool:
    host, _, port = str(value).rpartition(":")
    is_port = bool(host) and port.isdecimal() and 0 < int(port) < 65536
    return is_text(value) and (is_port or str(value).startswith("/"))


def _is_server(value: object) -> bool:
    name = str(value).replace(EACH_RESOURCE, "x").replace(THIS_VM, "x")
    return bool(SERVER.fullmatch(name))


@dataclass(frozen=True, slots=True)
class HaproxyStep:
    """`web/{vm}` is this VM; `web/{resource}` stands for every VM in the event's Resources, for an
    agent on the load balancer's machine.
    """

    socket: Annotated[str, checked("the path of a socket, or host:port", _is_address)]
    servers: Annotated[tuple[str, ...], list_of(SERVERS_FORM, _is_server)]
    wait: bool = True

    def describe(self) -> str:
        servers = " ".join(self.servers)
        return f"drain {servers} in HAProxy at {self.socket}, or in recover make it ready"

    def run(self, context: StepContext) -> None:
        """A server that fails does not keep the others from being drained."""
        is_recover = context.phase is WorkflowPhase.RECOVER
        state = "ready" if is_recover else "drain"
        changed: list[str] = []
        servers = self._resolve_servers(context)
        attempts = [partial(self._set_state, server, state, context, changed) for server in servers]
        if self.wait and not is_recover:
            attempts.append(partial(self._wait_for_sessions, changed, context))
        run_each(attempts)

    def _set_state(self, server: str, state: str, context: StepContext, changed: list[str]) -> None:
        if not SERVER.fullmatch(server):
            raise StepFailed(f"{server[:60]!r} is not a valid server name for HAProxy")
        response = self._send(f"set server {server} state {state}", context).strip()
        if response:  # HAProxy's response to success is empty
            raise StepFailed(f"HAProxy cannot set {server} to {state}: {response[:300]}")
        changed.append(server)

    def _wait_for_sessions(self, servers: list[str], context: StepContext) -> None:
        while servers and (
            busy := _count_sessions(self._send("show stat -1 4 -1", context), servers)
        ):
            pause(context, CHECK_SECONDS, f"sessions remain: {busy}")

    def _resolve_servers(self, context: StepContext) -> tuple[str, ...]:
        names = [name.removeprefix("_") for name in context.event.resources]
        own = [server.replace(THIS_VM, context.vm.removeprefix("_")) for server in self.servers]
        servers = [
            server.replace(EACH_RESOURCE, name)
            for server in own
            for name in (names if EACH_RESOURCE in server else [""])
        ]
        return tuple(dict.fromkeys(servers))

    def _send(self, command: str, context: StepContext) -> str:
        try:
            return call_with_timeout(context, lambda: _call(self.socket, command), CALL_SECONDS)
        except (OSError, ValueError) as error:  # ValueError: an impossible host name
            raise StepFailed(f"HAProxy at {self.socket} does not respond: {error}") from error


def _call(address: str, command: str) -> str:
    """One command per connection: HAProxy closes it after the response."""
    if is_path := address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CALL_SECONDS)
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), CALL_SECONDS)
    with connection, connection.makefile("rb") as responses:
        if is_path:
            connection.connect(address)
        connection.sendall(command.encode("ascii") + b"\n")
        response = responses.read(RESPONSE_BYTES_MAX + 1)
    if len(response) > RESPONSE_BYTES_MAX:
        raise OSError(f"the response has more than {RESPONSE_BYTES_MAX} bytes")
    return response.decode("utf-8", "replace")


def _count_sessions(stat: str, servers: list[str]) -> dict[str, int]:
    """The servers that still have sessions. `show stat` prints CSV; its header starts with `# `."""
    rows = csv.DictReader(stat.removeprefix("# ").splitlines())
    known = {f"{row.get('pxname')}/{row.get('svname')}": row.get("scur") or "" for row in rows}
    counts = {server: known.get(server, "") for server in servers}
    for server, count in counts.items():
        if not count.isdecimal():
            raise StepFailed(f"HAProxy shows no sessions of {server}: {stat.strip()[:300]}")
    return {server: int(count) for server, count in counts.items() if int(count)}
