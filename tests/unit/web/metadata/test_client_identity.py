"""Who is calling, in each way and in all of them together."""

import hmac

import pytest

from forewarn.config import Config, Identify
from forewarn.core.fleet import Scope, Vm
from forewarn.core.timing import Timing
from forewarn.engine.board import Board
from forewarn.engine.engine import Engine
from forewarn.errors import Forbidden, Invalid
from forewarn.lab.clock import VirtualClock
from forewarn.store.memory import MemoryStore
from forewarn.web.http.message import plain_address
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.client_identity import identify
from forewarn.web.metadata.request import MetadataRequest
from tests.builders import NOON

KEY = b"a shared secret"
ADDRESS = Config(identify=(Identify.ADDRESS,))
PATH = Config(identify=(Identify.PATH,))
PROXY = Config(identify=(Identify.PROXY,))
ALL = Config(identify=tuple(Identify))


def board() -> Board:
    shown = Board(seen_interval_seconds=3600)
    vms = (Vm(name="web-0", address="10.0.0.1", id="6f1c"), Vm(name="web-1", address="fd00::1"))
    shown.publish(Scope(name="web", vms=vms), 1)
    shown.publish(Scope(name="db", vms=(Vm(name="db-0", address="10.0.0.3"),)), 2)
    return shown


def make_request(
    address: str = "10.0.0.1", vm: str = "", headers: dict[bytes, bytes] | None = None
) -> MetadataRequest:
    return MetadataRequest("GET", vm, "/metadata/scheduledevents", b"", headers or {}, address)


def signed(vm: str, key: bytes = KEY) -> dict[bytes, bytes]:
    return {
        b"x-instance-id": vm.encode(),
        b"x-instance-id-signature": hmac.digest(key, vm.encode(), "sha256").hex().encode(),
    }


def test_vm_is_identified_by_its_address() -> None:
    client = identify(make_request("10.0.0.1"), board(), ADDRESS, KEY)
    assert (client.vm, client.place.scope.name) == ("web-0", "web")


@pytest.mark.parametrize(
    ("address", "written"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:0:1", "::ffff:0:1"),
    ],
)
def test_addresses_are_normalized(address: str, written: str) -> None:
    """On a socket for both families the kernel reports IPv4 callers in IPv6 form."""
    assert plain_address(address) == written


def test_unknown_address_is_forbidden() -> None:
    with pytest.raises(Forbidden, match=r"10\.9\.9\.9"):
        identify(make_request("10.9.9.9"), board(), ADDRESS, KEY)


def test_removed_vm_is_forbidden_at_once() -> None:
    shown = board()
    shown.publish(Scope(name="web", vms=()), 3)
    with pytest.raises(Forbidden):
        identify(make_request("10.0.0.1"), shown, ADDRESS, KEY)


def test_path_names_the_vm_where_enabled() -> None:
    assert identify(make_request("10.9.9.9", vm="db-0"), board(), PATH, KEY).vm == "db-0"


def test_unknown_vm_in_the_path_is_forbidden() -> None:
    with pytest.raises(Forbidden, match="db-9"):
        identify(make_request("10.0.0.1", vm="db-9"), board(), ALL, KEY)


VICTIM = "6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f10"


@pytest.mark.parametrize("value", [VICTIM, VICTIM.upper()])
def test_id_wins_over_an_equal_name(value: str) -> None:
    """The proxy signs ids.

    A VM that is named like another VM's id must not get what was signed for the other.
    """
    shown = Board(seen_interval_seconds=3600)
    shown.publish(Scope(name="db", vms=(Vm(name="db-0", id=VICTIM),)), 1)
    shown.publish(Scope(name="evil", vms=(Vm(name=value),)), 2)

    assert identify(make_request(headers=signed(value)), shown, PROXY, KEY).vm == "db-0"


def test_shared_id_is_forbidden() -> None:
    """Version 0.1 took such fleets, so a store may hold one.

    Any response would be a guess whose events to show.
    """
    shown = Board(seen_interval_seconds=3600)
    shown.publish(Scope(name="a", vms=(Vm(name="a-0", id=VICTIM),)), 1)
    shown.publish(Scope(name="b", vms=(Vm(name="b-0", id=VICTIM), Vm(name="b-1", id=VICTIM))), 2)

    for number, vms in enumerate(
        [(Vm(name="b-1", id=VICTIM),), (Vm(name="b-1", id=VICTIM), Vm(name="b-2"))], start=3
    ):
        with pytest.raises(Forbidden, match=f"^Forbidden. Several VMs have the id {VICTIM}$"):
            identify(make_request(headers=signed(VICTIM)), shown, PROXY, KEY)
        shown.publish(Scope(name="b", vms=vms), number)
    shown.publish(Scope(name="b", vms=(Vm(name="b-2"),)), 5)
    assert identify(make_request(headers=signed(VICTIM)), shown, PROXY, KEY).vm == "a-0"
    shown.withdraw("a", 6)
    with pytest.raises(Forbidden, match="is not a VM of this fleet"):
        identify(make_request(headers=signed(VICTIM)), shown, PROXY, KEY)


def test_shared_address_is_forbidden_unless_the_vm_is_named() -> None:
    """Hosts may have networks of their own, with the same addresses."""
    shown = board()
    twin = Vm(name="twin", address="10.0.0.1", host="host-b")
    shown.publish(Scope(name="twin", vms=(twin,)), 3)

    with pytest.raises(
        Forbidden,
        match=r"^Forbidden. Several VMs have the address 10.0.0.1; expected forewarn hostd on their"
        " hosts, or --identify proxy$",
    ):
        identify(make_request("10.0.0.1"), shown, ALL, KEY)
    assert identify(make_request("10.0.0.1", vm="twin"), shown, ALL, KEY).vm == "twin"
    assert (
        identify(make_request("10.0.0.1", headers=signed("web-0")), shown, ALL, KEY).vm == "web-0"
    )
    shown.withdraw("twin", 4)
    assert identify(make_request("10.0.0.1"), shown, ALL, KEY).vm == "web-0"


@pytest.mark.parametrize(("value", "vm"), [("web-0", "web-0"), ("6f1c", "web-0"), ("db-0", "db-0")])
def test_proxy_names_a_vm_by_name_or_id(value: str, vm: str) -> None:
    assert identify(make_request("10.9.9.9", headers=signed(value)), board(), PROXY, KEY).vm == vm


def test_signature_is_case_insensitive() -> None:
    headers = signed("web-0")
    headers[b"x-instance-id-signature"] = headers[b"x-instance-id-signature"].upper()
    assert identify(make_request(headers=headers), board(), PROXY, KEY).vm == "web-0"


@pytest.mark.parametrize(
    "headers",
    [
        signed("web-0", key=b"another key"),
        {**signed("web-0"), b"x-instance-id": b"db-0"},
        {b"x-instance-id": b"web-0"},
        {b"x-instance-id-signature": b"00"},
        {**signed("web-0"), b"x-instance-id-signature": b"\xff"},
        {**signed("web-0"), b"x-instance-id": b"web-0, db-0"},
    ],
)
def test_wrong_signature_is_forbidden_from_a_known_address(
    headers: dict[bytes, bytes],
) -> None:
    """A client that tries to impersonate a VM is not served as itself."""
    with pytest.raises(Forbidden, match="signature"):
        identify(make_request("10.0.0.1", headers=headers), board(), ALL, KEY)


def test_valid_signature_of_an_unknown_vm_is_forbidden() -> None:
    with pytest.raises(Forbidden, match="web-9"):
        identify(make_request(headers=signed("web-9")), board(), PROXY, KEY)


def test_proxy_headers_are_ignored_without_proxy_mode() -> None:
    """A guest can send any header it likes."""
    assert (
        identify(make_request("10.0.0.1", headers=signed("db-0")), board(), ADDRESS, KEY).vm
        == "web-0"
    )


def test_proxy_mode_forbids_unsigned_requests() -> None:
    with pytest.raises(Forbidden):
        identify(make_request("10.0.0.1"), board(), PROXY, KEY)


def test_identification_methods_can_be_combined() -> None:
    shown = board()
    assert identify(make_request("10.0.0.3"), shown, ALL, KEY).vm == "db-0"
    assert identify(make_request("10.0.0.3", vm="web-1"), shown, ALL, KEY).vm == "web-1"
    assert (
        identify(make_request("10.0.0.3", headers=signed("web-0")), shown, ALL, KEY).vm == "web-0"
    )


@pytest.mark.parametrize("vm", ["", "web-0"])
def test_forwarded_request_is_rejected(vm: str) -> None:
    """A proxy that forwards requests hides who asks; the protocol refuses them all."""
    with pytest.raises(Invalid, match="X-Forwarded-For"):
        identify(make_request(vm=vm, headers={b"x-forwarded-for": b"10.0.0.1"}), board(), ALL, KEY)


def test_signing_proxy_may_forward_requests() -> None:
    """OpenStack's metadata proxy adds X-Forwarded-For to all that it signs."""
    headers = {**signed("web-0"), b"x-forwarded-for": b"10.0.0.1"}
    assert identify(make_request("10.9.9.9", headers=headers), board(), PROXY, KEY).vm == "web-0"


def test_proxy_mode_needs_a_key() -> None:
    """With an empty key anybody could sign."""
    engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
    with pytest.raises(Invalid, match="the key is empty"):
        Metadata(engine, PROXY, b"")
