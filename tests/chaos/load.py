"""The clients of one server, as threads of one process that runs where the server runs.

`python -m tests.chaos.load SERVER FOLDER SEED` works until its standard input ends. A line on the
input is a request of the harness, answered with a line on the output:

    ready      print the status of /readyz
    announce   with kinds such as `evict delete`: one operation of each, on a VM that no operator
               works on; does not wait for the response
    late       print how many of these operations have an event and were not acknowledged
    quiet      end the operators; polls and approvals continue
    final      read every document, and print them as JSON
    history    read the whole history of the service into a file
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

from forewarn.client import Client, Document, EndpointError, HttpError
from tests.chaos.connection import METADATA_PORT, Connection, Response, send
from tests.chaos.fleet import (
    ANNOUNCED,
    ANNOUNCER,
    FLEET,
    HOSTS,
    SCOPE_OF,
    VMS,
    server_of,
    spares_of,
)
from tests.chaos.history import (
    AGE_UNKNOWN,
    CALLS_FILE,
    ENTRIES_FILE,
    VM_OPERATIONS,
    Call,
    Kind,
    Recorder,
    Shown,
    seconds_of,
    view_of_bytes,
    view_of_document,
)

EVENTS = "/as/{}/metadata/scheduledevents?api-version=2020-07-01"
TIMEOUT_SECONDS = 5.0
WAIT_SECONDS = 10
PAUSE_SECONDS = 0.2
"""After a request that failed."""
POLL_SECONDS = 0.1
READY_SECONDS = 0.25
REPEATS_MAX = 200
"""How often an operation with a key is repeated: longer than any fault lasts."""
WAITED_SCOPES = ("one-0", "one-1", "one-2", "set-0", "set-1", "set-2")
"""What every server has long polls for, so that a change is timed on the other servers."""


class Clients:
    """What the threads of a process share."""

    def __init__(self, server: str, folder: Path, seed: str) -> None:
        self.server = server
        self.folder = folder
        self.seed = seed
        self.quiet = Flag()
        self._operators: list[Thread] = []
        self._acknowledged: set[str] = set()
        restarted = next(vm for vm in ANNOUNCED if server_of(vm) == server)
        self._announced = {
            Kind.RESTART: (restarted,),
            Kind.EVICT: spares_of(server, Kind.EVICT),
            Kind.DELETE: spares_of(server, Kind.DELETE),
        }
        # When a long run has used up the spares, the servers refuse what it announces.
        self._next_announced = {kind: cycle(vms) for kind, vms in self._announced.items()}
        self._recorder = Recorder(folder / CALLS_FILE.format(server))

    def start(self) -> None:
        number = int(self.server[1:])
        guests = [f"set-{3 + number % 2}-{number}", f"set-5-{number}", f"set-6-{number}"]
        guests.append(f"one-{3 + number}")
        own = [vm for vm in VMS if server_of(vm) == self.server and vm not in ANNOUNCED]
        works: list[tuple[str, Callable[[str], None]]] = [("ready", self.watch_readiness)]
        works += [(f"poll-{each}", self.poll) for each in range(2)]
        works += [(f"wait-{scope}", self.wait_for_changes(scope)) for scope in WAITED_SCOPES]
        works += [(f"guest-{vm}", self.approve_as(vm)) for vm in guests]
        works += [(f"operator-{each}", self.operate_on(own[each::2])) for each in range(2)]
        for name, work in works:
            thread = Thread(target=work, args=(f"{self.server}/{name}",), daemon=True)
            thread.start()
            if name.startswith("operator"):
                self._operators.append(thread)

    def end_operators(self) -> None:
        """Each has the response to its last operation, or gave up, when this returns."""
        self.quiet.set()
        for thread in self._operators:
            thread.join()

    def record(self, client: str, kind: Kind, asked_at: float, status: int, **more: Any) -> Call:
        call = Call(
            client=client,
            server=self.server,
            kind=kind,
            asked_at=asked_at,
            answered_at=time.time(),
            status=status,
            **more,
        )
        self._recorder.call(call)
        return call

    # --- polls, over connections of our own

    def poll(self, client: str) -> None:
        """Poll one scope after the other; every second poll names the document that is known."""
        chance, tags = random.Random(f"{self.seed}/{client}"), dict[str, str]()
        with closing(Connection(TIMEOUT_SECONDS)) as connection:
            while True:  # ends with the process
                time.sleep(POLL_SECONDS)
                scope = chance.choice(tuple(FLEET))
                tag = tags.get(scope, "") if chance.random() < 0.5 else ""
                response = self.read(client, connection, Kind.POLL, scope, tag)
                if response.etag:
                    tags[scope] = response.etag
                if not response.status:
                    time.sleep(PAUSE_SECONDS)

    def wait_for_changes(self, scope: str) -> Callable[[str], None]:
        def work(client: str) -> None:
            tag = ""
            with closing(Connection(TIMEOUT_SECONDS + WAIT_SECONDS)) as connection:
                while True:  # ends with the process
                    response = self.read(client, connection, Kind.WAIT, scope, tag)
                    tag = response.etag or tag
                    if not response.status:
                        time.sleep(PAUSE_SECONDS)

        return work

    def read(
        self, client: str, connection: "Connection", kind: Kind, scope: str, tag: str
    ) -> Response:
        """Get the document of a scope as its first VM sees it, and record it."""
        headers = {"Metadata": "true"} | ({"If-None-Match": tag} if tag else {})
        if kind is Kind.WAIT and tag:
            headers["Prefer"] = f"wait={WAIT_SECONDS}"
        asked_at = time.time()
        response = connection.get(EVENTS.format(FLEET[scope].vms[0]), headers)
        incarnation = int(response.etag.strip('"')) if response.etag else 0
        view = ""
        if response.status == 200:
            assert json.loads(response.body)["DocumentIncarnation"] == incarnation, response
            view = self._recorder.view(*view_of_bytes(response.body))
        self.record(
            client,
            kind,
            asked_at,
            response.status,
            scope=scope,
            incarnation=incarnation,
            view=view,
            age=response.age,
        )
        return response

    def watch_readiness(self, client: str) -> None:
        while True:  # ends with the process
            time.sleep(READY_SECONDS)
            asked_at = time.time()
            status = send("GET", "/readyz", timeout_seconds=2.0).status
            self.record(client, Kind.READY, asked_at, status)

    # --- guests, with the client that we publish

    def approve_as(self, vm: str) -> Callable[[str], None]:
        """A guest that waits for changes and approves half of the events, after a while."""

        def work(client: str) -> None:
            chance, decided = random.Random(f"{self.seed}/{client}"), set[str]()
            endpoint = f"http://127.0.0.1:{METADATA_PORT}/as/{vm}"
            known: Document | None = None
            with Client(endpoint, timeout_seconds=TIMEOUT_SECONDS) as guest:
                while True:  # ends with the process
                    known = self.guest_wait(client, guest, vm, known)
                    if known is None:
                        time.sleep(PAUSE_SECONDS)
                        continue
                    new = [event for event in known.events if event.key not in decided]
                    decided.update(event.key for event in new)
                    for event in new:
                        if event.is_scheduled and chance.random() < 0.6:
                            time.sleep(chance.uniform(0, 1))
                            self.approve(client, guest, vm, event.key)

        return work

    def guest_wait(
        self, client: str, guest: Client, vm: str, known: Document | None
    ) -> Document | None:
        asked_at, scope = time.time(), SCOPE_OF[vm]
        try:
            document = guest.wait(WAIT_SECONDS, since=known) if known else guest.document()
        except EndpointError as error:
            self.record(client, Kind.WAIT, asked_at, status_of(error), scope=scope)
            return None
        view = self._recorder.view(*view_of_document(document))
        self.record(
            client,
            Kind.WAIT,
            asked_at,
            200,
            scope=scope,
            incarnation=document.incarnation,
            view=view,
            age=AGE_UNKNOWN,
        )
        return document

    def approve(self, client: str, guest: Client, vm: str, event_id: str) -> None:
        asked_at, status = time.time(), 200
        try:
            guest.approve(event_id)
        except EndpointError as error:
            status = status_of(error)
        self.record(
            client,
            Kind.APPROVE,
            asked_at,
            status,
            vm=vm,
            scope=SCOPE_OF[vm],
            events=(Shown(event_id, ""),),
        )

    # --- operators, over the control API

    def operate_on(self, vms: list[str]) -> Callable[[str], None]:
        """An operator who restarts and redeploys these VMs, and sometimes thinks better of it."""

        def work(client: str) -> None:
            chance, created = random.Random(f"{self.seed}/{client}"), list[Shown]()
            number = 0
            while not self.quiet.wait(chance.uniform(0.1, 0.6)):
                number += 1
                key = f"{client}/{number}" if chance.random() < 0.5 else ""
                act = chance.random()
                if act < 0.12 and created:
                    self.change(client, chance.choice((Kind.CANCEL, Kind.EXTEND)), created.pop())
                elif act < 0.17 and created:
                    self.change(client, Kind.APPROVE, created.pop())
                elif act < 0.22:
                    text = f"maintenance {number} of {client}"
                    body = {"type": "Reboot", "description": text}
                    host = chance.choice(HOSTS)
                    self.operate(client, Kind.MAINTAIN, f"/hosts/{host}", key, body, text=text)
                else:
                    vm, kind = chance.choice(vms), Kind.RESTART
                    if chance.random() < 0.3:
                        kind = Kind.REDEPLOY
                    created += self.operate(client, kind, f"/vms/{vm}", key, {}, vm=vm)

        return work

    def operate(
        self, client: str, kind: Kind, path: str, key: str, body: object, **more: str
    ) -> tuple[Shown, ...]:
        """The events that it created. With a key it is repeated until the server has decided."""
        for _ in range(REPEATS_MAX if key else 1):
            asked_at = time.time()
            response = send("POST", f"/api/v1{path}/{kind}", body, key=key)
            events = shown_in(response)
            self.record(client, kind, asked_at, response.status, events=events, key=key, **more)
            if 0 < response.status < 500:
                return events
            time.sleep(PAUSE_SECONDS)
        return ()

    def announce(self, kinds: Iterable[Kind]) -> None:
        """Operators who announce events just before or after a fault begins, and do not repeat it.

        One thread of a kind at a time: the harness waits for the responses, or for the end of the
        fault.
        """
        for kind in kinds:
            vm = next(self._next_announced[kind])
            thread = Thread(target=self._announce, args=(kind, vm), daemon=True)
            thread.start()
            self._operators.append(thread)

    def _announce(self, kind: Kind, vm: str) -> None:
        client = f"{self.server}/{kind}-{ANNOUNCER}"
        events = self.operate(client, kind, f"/vms/{vm}", "", {}, vm=vm)
        self._acknowledged |= {event.id for event in events}

    def count_late(self) -> int:
        """How many events the announcers created without knowing it."""
        created = set[str]()
        for kind, vms in self._announced.items():
            query = f"scope={SCOPE_OF[vms[0]]}&what=scheduled&limit=1000"
            response = send("GET", f"/api/v1/history?{query}")
            assert response.status == 200, response
            entries = json.loads(response.body)["history"]
            created |= {
                entry["event"] for entry in entries if VM_OPERATIONS.get(entry["cause"]) is kind
            }
        return len(created - self._acknowledged)

    def change(self, client: str, kind: Kind, event: Shown) -> None:
        """Cancel, extend or approve an event; the server may refuse, because it has started."""
        asked_at, body, not_before = time.time(), {}, 0.0
        if kind is Kind.EXTEND:
            not_before = float(int(max(event.not_before, asked_at)) + 3)
            body = {"not_before": datetime.fromtimestamp(not_before, UTC).isoformat()}
        response = send("POST", f"/api/v1/events/{event.id}/{kind}", body)
        self.record(
            client,
            kind,
            asked_at,
            response.status,
            events=shown_in(response) or (Shown(event.id, ""),),
            not_before=not_before,
        )

    # --- requests of the harness

    def read_finals(self) -> dict[str, tuple[int, int]]:
        """The incarnation of each scope and how many events it has; 0 and 0 if it is not read."""
        found = {}
        with closing(Connection(TIMEOUT_SECONDS)) as connection:
            for scope in FLEET:
                client = f"{self.server}/final"
                response = self.read(client, connection, Kind.FINAL, scope, "")
                document = json.loads(response.body) if response.status == 200 else {}
                incarnation = document.get("DocumentIncarnation", 0)
                found[scope] = (incarnation, len(document.get("Events", ())))
        return found

    def read_history(self) -> int:
        """Write all history entries into a file; how many there are."""
        entries, cursor = [], ""
        while True:  # ends with the last page
            query = f"&cursor={cursor}" if cursor else ""
            response = send("GET", f"/api/v1/history?limit=1000{query}")
            assert response.status == 200, response
            page = json.loads(response.body)
            entries += page["history"]
            cursor = page["next"]
            if not cursor:
                break
        (self.folder / ENTRIES_FILE).write_text(json.dumps(entries))
        return len(entries)


def shown_in(response: Response) -> tuple[Shown, ...]:
    """The events in the response to an operation."""
    if not 200 <= response.status < 300:
        return ()
    result = json.loads(response.body)
    events = result["events"] if "events" in result else [result["event"]]
    return tuple(
        Shown(event["id"], event["status"], seconds_of(event["not_before"]))
        for event in events
        if event is not None
    )


def status_of(error: EndpointError) -> int:
    return error.status if isinstance(error, HttpError) else 0


def main(server: str, folder: str, seed: str) -> None:
    clients = Clients(server, Path(folder), seed)
    clients.start()
    for line in sys.stdin:
        match line.split():
            case ["ready"]:
                print(send("GET", "/readyz", timeout_seconds=2.0).status, flush=True)
            case ["announce", *kinds]:
                clients.announce(map(Kind, kinds))
                print("announced", flush=True)
            case ["late"]:
                print(clients.count_late(), flush=True)
            case ["quiet"]:
                clients.end_operators()
                print("quiet", flush=True)
            case ["final"]:
                print(json.dumps(clients.read_finals()), flush=True)
            case ["history"]:
                print(clients.read_history(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
