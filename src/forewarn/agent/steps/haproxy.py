"""`haproxy`: drains servers through the runtime socket and waits for their sessions to end; makes
them ready when all is over.
"""

import csv
import re
import socket
from dataclasses import dataclass

from forewarn.agent.step import Occasion, Phase, StepFailed, StepTimedOut
from forewarn.agent.steps.spec import Spec, only_on_unix
from forewarn.agent.steps.wait import together, until, within

MEMBERS = ("socket", "servers", "wait")
ANSWER_BYTES_MAX = 16 * 1024 * 1024
TALK_SECONDS = 5.0
LOOK_SECONDS = 0.25
EACH = "{resource}"
OWN = "{vm}"
SERVER = re.compile(r"[\w.:-]+/[\w.:-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Haproxy:
    """`web/{vm}` is our own VM;

    `web/{resource}` stands for every VM that the event names: for an agent beside the balancer.
    """

    address: str
    servers: tuple[str, ...]
    is_waiting: bool = True

    def describe(self) -> str:
        return f"drain {' '.join(self.servers)} in HAProxy at {self.address}, or in recover make it ready"

    def run(self, occasion: Occasion) -> None:
        """A server that HAProxy does not know must not keep the others from their drain: all are
        tried, then all is told.
        """
        state = "ready" if occasion.phase is Phase.RECOVER else "drain"
        failures: list[StepFailed] = []
        changed: list[str] = []
        for server in self._servers(occasion):
            try:
                self._set(server, state, occasion)
                changed.append(server)
            except StepFailed as failure:
                failures.append(failure)
        if changed and state == "drain" and self.is_waiting:
            try:
                self._wait(tuple(changed), occasion)
            except StepFailed as failure:
                failures.append(failure)
        if failures:
            raise together(failures)

    def _set(self, server: str, state: str, occasion: Occasion) -> None:
        if not SERVER.fullmatch(server):
            raise StepFailed(f"{server[:60]!r} cannot be the name of a server in HAProxy")
        said = self._ask(f"set server {server} state {state}", occasion).strip()
        if said:  # HAProxy says nothing where it agrees
            raise StepFailed(f"HAProxy does not {state} {server}: {said[:300]}")

    def _wait(self, servers: tuple[str, ...], occasion: Occasion) -> None:
        busy: dict[str, int] = {}

        def is_empty() -> bool:
            busy.clear()
            busy.update(_sessions(self._ask("show stat -1 4 -1", occasion), servers))
            return not busy

        until(
            occasion, is_empty, waiting_for=lambda: f"sessions remain: {busy}", every=LOOK_SECONDS
        )

    def _servers(self, occasion: Occasion) -> tuple[str, ...]:
        names = [name.removeprefix("_") for name in occasion.event.resources]
        own = [server.replace(OWN, occasion.name.removeprefix("_")) for server in self.servers]
        servers = [
            server.replace(EACH, name)
            for server in own
            for name in (names if EACH in server else [""])
        ]
        return tuple(dict.fromkeys(servers))

    def _ask(self, command: str, occasion: Occasion) -> str:
        try:
            return within(occasion, TALK_SECONDS, lambda: _talk(self.address, command))
        except (OSError, ValueError) as error:  # ValueError: a host whose name cannot be one
            kind = StepTimedOut if isinstance(error, TimeoutError) else StepFailed
            raise kind(f"HAProxy at {self.address} does not answer: {error}") from error


def _talk(address: str, command: str) -> str:
    """One command a connection: HAProxy closes it after its answer."""
    with _connect(address) as connection:
        connection.settimeout(TALK_SECONDS)
        connection.sendall(command.encode("ascii") + b"\n")
        answer = bytearray()
        while part := connection.recv(
            65536
        ):  # ends with the connection, or where the answer grows too large
            answer += part
            if len(answer) > ANSWER_BYTES_MAX:
                raise OSError(f"the answer has more than {ANSWER_BYTES_MAX} bytes")
    return answer.decode("utf-8", "replace")


def _connect(address: str) -> socket.socket:
    if not address.startswith("/"):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), TALK_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(TALK_SECONDS)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _sessions(stat: str, servers: tuple[str, ...]) -> dict[str, int]:
    """The servers that still have sessions.

    The table of `show stat` is CSV under a line that begins with `# `.
    """
    rows = csv.DictReader(stat.removeprefix("# ").splitlines())
    known = {f"{row.get('pxname')}/{row.get('svname')}": row.get("scur") or "" for row in rows}
    counts = {server: known.get(server, "") for server in servers}
    for server, count in counts.items():
        if not count.isdecimal():
            raise StepFailed(
                f"HAProxy does not tell the sessions of {server}: {stat.strip()[:300]}"
            )
    return {server: int(count) for server, count in counts.items() if int(count)}


def make(value: object, where: str) -> Haproxy:
    spec = Spec(value, where, members=MEMBERS)
    address = spec.text("socket", expected="the path of a socket, or host:port")
    host, _, port = address.rpartition(":")
    if address.startswith("/"):
        only_on_unix("haproxy with a Unix socket", where)
    elif not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise spec.refused("socket", "the path of a socket, or host:port")
    servers = spec.texts("servers", expected="a list of backend/server")
    if not all(SERVER.fullmatch(server.replace(EACH, "x").replace(OWN, "x")) for server in servers):
        raise spec.refused("servers", f"a list of backend/server, backend/{OWN} or backend/{EACH}")
    return Haproxy(address, servers, spec.is_set("wait", default=True))
