"""A bridge that cannot be served. Those that can need a network namespace: see tests/e2e."""

from forewarn.hostd.bridge_listener import BridgeListener
from forewarn.hostd.moves import Moves
from forewarn.hostd.relay import Relay
from forewarn.hostd.settings import HostToken
from forewarn.hostd.upstream import Upstream
from forewarn.option_kind import Address
from forewarn.platform.remote import UnservedBridge
from tests.unit.hostd.http_server import in_loop


@in_loop
async def test_bridge_that_does_not_exist_yet_is_reported_without_vms() -> None:
    upstream = Upstream(["http://127.0.0.1:9"])
    relay = Relay(upstream, HostToken("hostd", "", b"key"), Moves())
    listener = BridgeListener(relay, "nobr0", Address("169.254.169.254", 80), {1: "id-1"})

    (problem,) = await listener.update()

    reason = "the bridge nobr0 does not exist; expected a bridge of this host"
    assert (problem.text, problem.reason) == ("guests are not served", reason)
    assert relay.unconfirmed.list_bridges() == [UnservedBridge("nobr0", reason, 0)]
    upstream.close()
