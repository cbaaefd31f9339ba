"""While the store is lost every write gets a 503 in time and changes nothing, and reads continue.
A commit whose reply was lost is resolved by reading before the response.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import httpx
import pytest

from forewarn.auth.tokens import Role
from forewarn.engine.entry import Entry
from forewarn.errors import StoreLost
from forewarn.store.base import Record, RevisionCheck, Snapshot, Write
from forewarn.store.memory import MemoryStore
from tests.history import entries_of
from tests.unit.web.control_world import FLEET, World, start
from tests.unit.web.guest import EVENT_ID, EVENTS, TRUE, Guest
from tests.unit.web.guest import run as guest_run
from tests.unit.web.instant_loop import EagerLoop

RESPONSE_SECONDS_MAX = 10
STORE_TIMEOUT_SECONDS = 3
SECRET = "5ec4e7" + "0" * 58
ADMIN = {"authorization": f"Bearer fw_root_{SECRET}"}
LARGE_FLEET = FLEET.replace(
    b"scopes:\n",
    b"scopes:\n"
    + b"".join(b"  - {name: s%d, kind: vm, vms: [{name: s%d}]}\n" % (n, n) for n in range(150)),
)
"""More scopes than fit into one commit."""


class FaultyStore(MemoryStore):
    """Works until `fault` names what is wrong with it."""

    fault = ""

    async def _check(self) -> None:
        if self.fault == "slow":
            await asyncio.sleep(STORE_TIMEOUT_SECONDS)
        if self.fault == "never answers":
            await asyncio.Event().wait()
        if self.fault in ("refuses", "slow"):
            raise StoreLost("no answer")

    async def commit(
        self,
        writes: Sequence[Write],
        checks: Sequence[RevisionCheck] = (),
        entries: bytes | None = None,
    ) -> int:
        await self._check()
        revision = await super().commit(writes, checks, entries)
        if self.fault == "loses replies":
            raise StoreLost("the reply was lost")
        return revision

    async def get(self, key: str) -> Record:
        await self._check()
        return await super().get(key)

    async def load(self, prefix: str = "") -> Snapshot:
        await self._check()
        return await super().load(prefix)


CAMPAIGN = {"type": "Freeze", "hosts": ["host-*"]}
ARM = (
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/availabilitySets/web"
    "/providers/Microsoft.Maintenance/scheduledevents"
)
VERSION = "api-version=2023-10-01-preview"
RETURN_AT = {"not_before": "2030-01-31T13:00:00.250Z"}
WRITES: dict[str, tuple[str, str, Any]] = {
    "restart": ("POST", "/api/v1/vms/FrontEnd_IN_0/restart", None),
    "redeploy": ("POST", "/api/v1/vms/FrontEnd_IN_0/redeploy", None),
    "evict": ("POST", "/api/v1/vms/FrontEnd_IN_0/evict", RETURN_AT),
    "delete": ("POST", "/api/v1/vms/FrontEnd_IN_0/delete", None),
    "maintain": ("POST", "/api/v1/hosts/host-a/maintain", {"type": "Freeze"}),
    "degrade": ("POST", "/api/v1/hosts/host-b/degrade", {}),
    "fail": ("POST", "/api/v1/hosts/host-b/fail", {}),
    "approve": ("POST", "/api/v1/events/{scheduled}/approve", {}),
    "approve as a VM": ("POST", "/api/v1/events/{scheduled}/approve", {"vm": "web-1"}),
    "acknowledge": ("POST", f"{ARM}/{{scheduled}}/acknowledge?{VERSION}", None),
    "cancel": ("POST", "/api/v1/events/{scheduled}/cancel", None),
    "extend": ("POST", "/api/v1/events/{scheduled}/extend", RETURN_AT),
    "complete": ("POST", "/api/v1/events/{started}/complete", None),
    "apply": ("PUT", "/api/v1/fleet", LARGE_FLEET),
    "start a campaign": ("POST", "/api/v1/campaigns", CAMPAIGN),
    "pause a campaign": ("POST", "/api/v1/campaigns/c1/pause", None),
    "cancel a campaign": ("POST", "/api/v1/campaigns/c1/cancel", None),
    "create a token": ("POST", "/api/v1/tokens", {"name": "new", "role": "viewer"}),
    "revoke a token": ("DELETE", "/api/v1/tokens/old", None),
}
READS = [
    *("fleet", "scopes", "scopes/web", "vms", "vms/web-0", "hosts", "hosts/host-a"),
    *("events", "events/{scheduled}", "campaigns", "campaigns/c1", "tokens"),
]


class Prepared:
    """A world with events, a campaign and tokens, so that each of the writes has a target."""

    def __init__(self, world: World, store: FaultyStore) -> None:
        self.world, self.store = world, store
        self.ids: dict[str, str] = {}

    async def prepare(self) -> None:
        service = self.world.service
        await service.tokens.create("root", Role.ADMIN, secret=SECRET, by="test")
        await service.tokens.create("old", Role.VIEWER, secret=SECRET, by="test")
        await self._request("POST", "/api/v1/campaigns", CAMPAIGN)
        for name, vm in (("scheduled", "web-0"), ("started", "web-1")):
            response = await self._request("POST", f"/api/v1/vms/{vm}/restart")
            self.ids[name] = response.json()["event"]["id"]
        await self._request("POST", f"/api/v1/events/{self.ids['started']}/approve", {})

    async def _request(
        self, method: str, path: str, body: Any = None, key: str = ""
    ) -> httpx.Response:
        headers = {**ADMIN, **({"Idempotency-Key": key} if key else {})}
        if isinstance(body, bytes):
            headers["content-type"] = "application/yaml"
            return await self.world.request(method, path, content=body, headers=headers)
        return await self.world.request(method, path, json=body, headers=headers)

    async def write(self, name: str, key: str = "") -> httpx.Response:
        method, path, body = WRITES[name]
        return await self._request(method, path.format(**self.ids), body, key)

    async def read(self, path: str) -> httpx.Response:
        return await self._request("GET", f"/api/v1/{path.format(**self.ids)}")

    async def stored(self) -> tuple[tuple[Record, ...], list[Entry]]:
        return (await MemoryStore.load(self.store)).records, await entries_of(self.store)


def run(act: Callable[[Prepared], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        store = FaultyStore()
        async with start(store=store) as world:
            prepared = Prepared(world, store)
            await prepared.prepare()
            result = await act(prepared)
            store.fault = ""
            return result

    loop = EagerLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.mark.parametrize("fault", ["refuses", "slow", "never answers"])
@pytest.mark.parametrize("name", WRITES)
def test_write_gets_503_in_time_and_changes_nothing(name: str, fault: str) -> None:
    """An operator's script must be able to retry, and not wait for minutes to know that."""

    async def act(prepared: Prepared) -> None:
        before, loop = await prepared.stored(), asyncio.get_running_loop()
        prepared.store.fault = fault
        began = loop.time()
        response = await prepared.write(name)

        assert (response.status_code, response.headers["retry-after"]) == (503, "1"), response.text
        assert loop.time() - began <= RESPONSE_SECONDS_MAX
        prepared.store.fault = ""
        assert await prepared.stored() == before
        assert (await prepared.write(name)).is_success

    run(act)


@pytest.mark.parametrize("path", READS)
def test_reads_continue_while_the_store_is_lost(path: str) -> None:
    async def act(prepared: Prepared) -> None:
        before = (await prepared.read(path)).json()
        prepared.store.fault = "never answers"
        response = await prepared.read(path)
        assert (response.status_code, response.json()) == (200, before)

    run(act)


def test_reads_have_their_age_while_the_store_is_lost() -> None:
    """A command with several servers would show the past without a word."""

    async def act(prepared: Prepared) -> None:
        engine = prepared.world.engine
        assert "age" not in (await prepared.read("vms")).headers
        engine.stale_since = engine.clock.now() - timedelta(seconds=30)
        for path in ("vms", "events/{scheduled}", "session", "vms/unknown"):
            assert (await prepared.read(path)).headers["age"] == "39"  # it may be noticed 9 s late
        prepared.store.fault = "refuses"
        assert "age" not in (await prepared.write("restart")).headers
        assert "age" not in (await prepared.world.request("GET", "/healthz")).headers

    run(act)


@pytest.mark.parametrize("key", ["", "key-1"])
@pytest.mark.parametrize("name", WRITES)
def test_lost_reply_of_a_commit_is_not_seen_by_the_client(name: str, key: str) -> None:
    """The response and the history are those of a day on which no reply was lost."""

    async def act(prepared: Prepared, fault: str) -> tuple[int, Any, object]:
        prepared.store.fault = fault
        response = await prepared.write(name, key)
        prepared.store.fault = ""
        body = response.json() if response.content else {}
        body.pop("text", "")  # of a token: its secret is random
        _, entries = await prepared.stored()
        return response.status_code, body, entries

    expected = run(lambda prepared: act(prepared, ""))
    assert expected[0] < 300
    assert run(lambda prepared: act(prepared, "loses replies")) == expected


def test_command_that_waits_behind_others_gets_its_503_in_time() -> None:
    """Each commit in front of it waits for the store, one after the other."""

    async def act(prepared: Prepared) -> None:
        loop = asyncio.get_running_loop()
        prepared.store.fault = "slow"

        async def restart(after_seconds: float) -> float:
            await asyncio.sleep(after_seconds)
            began = loop.time()
            response = await prepared.write("restart")
            assert response.status_code == 503
            return loop.time() - began

        durations = await asyncio.gather(*(restart(second) for second in range(5)))
        assert max(durations) <= RESPONSE_SECONDS_MAX

    run(act)


def test_refusal_is_not_believed_while_the_store_is_lost() -> None:
    """Another server may have announced the event that this one does not know."""

    async def act(prepared: Prepared) -> None:
        prepared.store.fault = "refuses"
        response = await prepared.write("restart")
        again = await prepared._request("POST", "/api/v1/vms/web-0/restart")
        unknown = await prepared.read("events/602D9444-D2CD-49C7-8624-8643E7171297")

        assert [response.status_code, again.status_code, unknown.status_code] == [503, 503, 503]
        malformed = {"not_before": "2040-01-31T13:00:00Z"}
        invalid = await prepared._request("POST", "/api/v1/vms/web-0/evict", malformed)
        assert invalid.status_code == 400

    run(act)


@pytest.mark.parametrize("name", ["apply", "pause a campaign", "cancel a campaign"])
def test_write_that_is_already_true_is_not_believed_either(name: str) -> None:
    """Another server may have applied another fleet, or resumed the campaign."""

    async def act(prepared: Prepared) -> None:
        assert (await prepared.write(name)).is_success
        await prepared.world.engine.load()
        prepared.world.engine.is_ready = True
        assert (await prepared.write(name)).is_success
        prepared.store.fault = "never answers"
        assert (await prepared.write(name)).status_code == 503

    run(act)


def test_vm_polls_and_gets_503_for_an_approval() -> None:
    async def act(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        await guest.restart()
        guest.store.is_lost = True
        body = b'{"StartRequests": [{"EventId": "%s"}]}' % EVENT_ID.encode()
        refused = await guest.call(EVENTS, TRUE, method="POST", body=body)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        await guest.clock.advance(timedelta(hours=2))
        (event,) = (await guest.call(EVENTS, TRUE)).json["Events"]
        assert (event["EventId"], event["EventStatus"]) == (EVENT_ID, "Scheduled")

    guest_run(act)
