"""What the relay on a bridge warns of. A bridge that is served needs a network namespace: see
tests/e2e.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.bridge_listener import ADDRESS_V6, BridgeListener, check_backlog
from forewarn.hostd.bridge_table import BridgeTable
from forewarn.hostd.moves import Moves
from forewarn.hostd.relay import Relay
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Upstream
from forewarn.option_kind import Address
from forewarn.platform.remote import UnservedBridge
from tests.unit.hostd.http_server import in_loop

UNPROTECTED = (
    "guests may be without notice for minutes after a move, and one guest can make the relay"
    " refuse the others"
)


@pytest.fixture
def relay() -> Iterator[Relay]:
    upstream = Upstream(["http://127.0.0.1:9"])
    yield Relay(upstream, HostToken("hostd", "", b"key"), Moves())
    upstream.close()


@pytest.fixture
def interfaces(tmp_path: Path) -> Path:
    """The kernel's folder of interfaces, with a bridge that has no ports."""
    (tmp_path / "br0" / "brif").mkdir(parents=True)
    (tmp_path / "br0" / "address").write_text("02:00:00:00:00:01\n")
    return tmp_path


async def run_nothing(arguments: Sequence[str], script: str) -> str:
    return "table bridge forewarn_br0"


async def run_missing(arguments: Sequence[str], script: str) -> str:
    raise Unavailable("the program nft is not installed")


@in_loop
async def test_bridge_that_does_not_exist_yet_is_reported_without_vms(relay: Relay) -> None:
    listener = BridgeListener(relay, "nobr0", Address("169.254.169.254", 80), {1: "id-1"})

    (problem,) = await listener.update()

    reason = "the bridge nobr0 does not exist; expected a bridge of this host"
    assert (problem.text, problem.reason) == ("guests are not served", reason)
    assert relay.unconfirmed.list_bridges() == [UnservedBridge("nobr0", reason, 0)]


@in_loop
async def test_bridge_without_nft_is_warned_of_with_all_that_follows(
    relay: Relay, interfaces: Path
) -> None:
    """The table does two things: it leads guests to their host, and limits their connections."""
    address = Address("169.254.169.254", 80)
    table = BridgeTable("br0", (address.host, ADDRESS_V6), run_missing, lambda: 1)
    listener = BridgeListener(relay, "br0", address, {}, table=table, interfaces=interfaces)

    assert await listener.keep_table() == (UNPROTECTED, "the program nft is not installed", False)


@pytest.mark.parametrize(
    ("host", "is_protected"), [("169.254.169.254", True), ("10.0.0.1", False), ("fd00::1", False)]
)
@in_loop
async def test_address_without_rules_is_warned_of(
    relay: Relay, interfaces: Path, host: str, is_protected: bool
) -> None:
    """The table has no rules for an address by which the host itself may be reached."""
    table = BridgeTable("br0", (host, ADDRESS_V6), run_nothing, lambda: 1)
    listener = BridgeListener(
        relay, "br0", Address(host, 80), {}, table=table, interfaces=interfaces
    )

    problem = await listener.keep_table()

    assert (problem is None) == is_protected
    if problem is not None:
        assert (problem.text, problem.is_usual) == (UNPROTECTED, False)
        assert f"link-local addresses only; {host} is none" in problem.reason


@pytest.mark.parametrize(("somaxconn", "is_enough"), [("4096\n", True), ("4095\n", False)])
def test_kernel_that_holds_fewer_half_open_connections_is_warned_of(
    tmp_path: Path, somaxconn: str, is_enough: bool
) -> None:
    file = tmp_path / "somaxconn"
    file.write_text(somaxconn)

    problem = check_backlog(file)

    assert (problem is None) == is_enough
    if problem is not None:
        assert problem.reason == "net.core.somaxconn is 4095; expected at least 4096"


def test_limit_of_the_kernel_that_cannot_be_read_is_not_warned_of(tmp_path: Path) -> None:
    assert check_backlog(tmp_path / "somaxconn") is None
