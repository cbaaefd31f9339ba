"""A host daemon signs for the VMs of its own host, and for no others."""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import pytest
from uvicorn.server import ServerState

from forewarn.auth.tokens import Role, Tokens
from forewarn.config import Config, Identify
from forewarn.core.fleet import Scope, Vm
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.errors import Forbidden
from forewarn.lab.clock import VirtualClock
from forewarn.store.memory import MemoryStore
from forewarn.web.http.admission import Limits
from forewarn.web.metadata.client_identity import check_signed_time, identify
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.metadata.request import MetadataRequest
from tests.builders import NOON

SECRETS = {"kvm-a": "a" * 64, "kvm-b": "b" * 64}
WEB_0, WEB_1 = "6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f10", "6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f11"
URL = b"/metadata/scheduledevents?api-version=2020-07-01"
CONFIG = Config(identify=(Identify.ADDRESS,))


def signed(
    vm_id: str, by: str = "kvm-a", secret: str = "", at: datetime = NOON
) -> dict[bytes, bytes]:
    """What the daemon sends: its key is the digest of its token's secret, in hexadecimal."""
    key = hashlib.sha256((secret or SECRETS[by]).encode()).hexdigest().encode()
    time = int(at.timestamp())
    return {
        b"x-forewarn-host": by.encode(),
        b"x-instance-id": vm_id.encode(),
        b"x-forewarn-time": b"%d" % time,
        b"x-instance-id-signature": hmac.digest(key, f"{vm_id} {time}".encode(), "sha256")
        .hex()
        .encode(),
    }


class World(NamedTuple):
    """`web-0` on host-a and `web-1` on host-b, at the same address; a daemon on each."""

    engine: Engine
    tokens: Tokens
    polls: Polls

    def identify(self, headers: dict[bytes, bytes], vm: str = "") -> str:
        request = MetadataRequest("GET", vm, "/metadata/scheduledevents", b"", headers, "10.0.0.1")
        name = identify(request, self.engine.board, CONFIG, b"", self.tokens).vm
        check_signed_time(headers, self.engine.clock)
        return name

    def poll(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The response of the fast path; None if it leaves the request to the application."""
        plain = [(b"host", b"h"), (b"metadata", b"true"), *headers.items()]
        poll = self.polls.parse(URL, plain, is_last=False)
        assert poll is not None
        return self.polls.respond(poll, "192.0.2.7")


def with_world(test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
        tokens = Tokens(engine)
        await tokens.create("root", Role.ADMIN, secret="c" * 64, by="test")
        for name, secret in SECRETS.items():
            host = f"host-{name[-1]}"
            await tokens.create(name, Role.HOST, secret=secret, by="test", host=host)
        for name, vm_id, host in (("web-0", WEB_0, "host-a"), ("web-1", WEB_1, "host-b")):
            vm = Vm(name=name, id=vm_id, host=host, address="10.0.0.1")
            engine.board.publish(Scope(name=name, vms=(vm,)), 1)
            engine.board.see(name, NOON, 1)
        await test(World(engine, tokens, Polls(engine, CONFIG, Limits(), tokens)))
        await engine.close()

    asyncio.run(run())


def test_daemon_signs_for_the_vms_of_its_host() -> None:
    """No `--identify` value is needed, and the VM's address does not count."""

    async def test(world: World) -> None:
        assert world.identify(signed(WEB_0)) == "web-0"
        assert world.identify(signed(WEB_1, "kvm-b")) == "web-1"
        assert world.poll(signed(WEB_0)) is not None

    with_world(test)


WRONG = [
    (signed(WEB_1), "is not a VM on host host-a"),
    (signed(WEB_0, "kvm-b"), "is not a VM on host host-b"),
    (signed("no-such-id"), "no-such-id is not a VM on host host-a"),
    (signed("web-0"), "is not a VM on host host-a"),
    (signed(WEB_0, secret="d" * 64), "signature does not match"),
    ({**signed(WEB_0), b"x-instance-id": WEB_1.encode()}, "signature does not match"),
    ({**signed(WEB_0), b"x-forewarn-host": b"kvm-b"}, "signature does not match"),
    ({**signed(WEB_0), b"x-forewarn-host": b"kvm-a, kvm-a"}, "not a valid token"),
    ({**signed(WEB_0), b"x-forewarn-host": b"../\xff"}, "not a valid token"),
    ({**signed(WEB_0), b"x-forewarn-host": b""}, "not a valid token"),
    ({**signed(WEB_0, secret="c" * 64), b"x-forewarn-host": b"root"}, "not a valid token"),
    ({b"x-forewarn-host": b"kvm-a"}, "signature does not match"),
    ({**signed(WEB_0), b"x-forewarn-time": b""}, "signature does not match"),
    ({**signed(WEB_0), b"x-forewarn-time": b"%d" % (NOON.timestamp() + 1)}, "does not match"),
    ({**signed(WEB_0), b"x-forewarn-time": b"9" * 5000}, "signature does not match"),
    (signed(WEB_0, at=NOON - timedelta(seconds=301)), "The signature is of another time"),
    (signed(WEB_0, at=NOON + timedelta(seconds=301)), "server's by 300 seconds"),
]


@pytest.mark.parametrize(("headers", "reason"), WRONG)
def test_any_other_signature_is_forbidden_in_one_line(
    headers: dict[bytes, bytes], reason: str
) -> None:
    """Another host's VM, another token, an admin's token, a name instead of an id, no signature:
    a client that tries is not served as itself either.
    """

    async def test(world: World) -> None:
        with pytest.raises(Forbidden, match=reason) as raised:
            world.identify(headers)
        assert "\n" not in raised.value.message
        assert world.poll(headers) is None

    with_world(test)


def test_revoked_token_and_moved_vm_count_at_the_next_poll() -> None:
    """The fast path remembers the bytes of a poll, not that they were right."""

    async def test(world: World) -> None:
        assert world.poll(signed(WEB_0)) is not None
        moved = Vm(name="web-0", id=WEB_0, host="host-b")
        world.engine.board.publish(Scope(name="web-0", vms=(moved,)), 9)
        assert world.poll(signed(WEB_0)) is None
        assert world.poll(signed(WEB_0, "kvm-b")) is not None

        await world.tokens.revoke("kvm-b", by="test")
        assert world.poll(signed(WEB_0, "kvm-b")) is None
        with pytest.raises(Forbidden, match="'kvm-b' is not a valid token of a host daemon"):
            world.identify(signed(WEB_0, "kvm-b"))

    with_world(test)


@pytest.mark.parametrize("seconds", [-300, 300])
def test_clock_of_a_host_may_be_five_minutes_off(seconds: int) -> None:
    async def test(world: World) -> None:
        headers = signed(WEB_0, at=NOON + timedelta(seconds=seconds))
        assert world.identify(headers) == "web-0"
        assert world.poll(headers) is not None

    with_world(test)


def test_signature_that_was_read_by_somebody_is_useless_soon() -> None:
    """The fast path remembers the bytes of a poll, not that they were sent in time."""

    async def test(world: World) -> None:
        assert world.poll(signed(WEB_0)) is not None
        await world.engine.clock.advance(timedelta(seconds=301))  # type: ignore[attr-defined]
        world.polls.tick(ServerState(), 301.0)
        assert world.poll(signed(WEB_0)) is None

    with_world(test)


@pytest.mark.parametrize("jump_seconds", [-3600.0, 3600.0])
def test_jump_of_the_servers_clock_refuses_no_guest(jump_seconds: float) -> None:
    """The service ignores the jump until its restart. The new time may well be the right one."""

    async def test(world: World) -> None:
        world.engine.clock.jump_seconds = jump_seconds
        jumped = NOON + timedelta(seconds=jump_seconds)
        for at in (NOON, jumped):
            assert world.identify(signed(WEB_0, at=at)) == "web-0"

    with_world(test)


@pytest.mark.parametrize("days", [-10, 10])
@pytest.mark.parametrize("from_jump", [False, True], ids=["old time", "new time"])
def test_jump_of_the_servers_clock_accepts_no_time_between(days: int, *, from_jump: bool) -> None:
    """After a jump of ten days, a request that was read a week ago must stay useless."""

    async def test(world: World) -> None:
        jump = timedelta(days=days)
        world.engine.clock.jump_seconds = jump.total_seconds()
        world.polls.tick(ServerState(), 0.0)
        near = NOON + jump if from_jump else NOON
        for seconds, is_accepted in ((-301, False), (-300, True), (300, True), (301, False)):
            headers = signed(WEB_0, at=near + timedelta(seconds=seconds))
            assert (world.poll(headers) is not None) == is_accepted, seconds
        assert world.poll(signed(WEB_0, at=NOON + jump / 2)) is None

    with_world(test)


def test_expired_token_does_not_sign() -> None:
    async def test(world: World) -> None:
        hour = timedelta(hours=1)
        await world.tokens.create(
            "short", Role.HOST, secret="e" * 64, by="t", host="host-a", expires_in=hour
        )
        assert world.identify(signed(WEB_0, "short", "e" * 64)) == "web-0"
        await world.engine.clock.advance(hour)  # type: ignore[attr-defined]
        with pytest.raises(Forbidden, match="not a valid token"):
            world.identify(signed(WEB_0, "short", "e" * 64))

    with_world(test)


def test_address_of_a_daemon_counts_as_known_once_it_has_signed() -> None:
    """Unknown addresses share a small part of all connections; a host has many guests."""

    async def test(world: World) -> None:
        assert world.polls.is_unknown("192.0.2.7")
        world.poll(signed(WEB_0, secret="d" * 64))
        assert world.polls.is_unknown("192.0.2.7")
        world.poll(signed(WEB_0))
        assert not world.polls.is_unknown("192.0.2.7")

    with_world(test)
