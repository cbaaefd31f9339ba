"""How many connections an operator's address may have."""

from forewarn.web.control.operator_policy import OperatorPolicy
from forewarn.web.http.admission import Limits
from forewarn.web.http_status import control_body


class BusyConnection:
    """A connection that cannot be closed for another."""

    due_at = 0.0
    is_evictable = False
    state = None

    def __init__(self, address: str) -> None:
        self.address = address

    def time_out(self) -> None: ...

    def abort(self) -> None: ...


def test_address_with_a_valid_token_may_have_more_connections() -> None:
    """It may be a proxy, or a network behind one address."""
    policy = TestedPolicy(Limits(connections_max=80, connections_per_address_max=80), control_body)
    untrusted = [policy.admit(BusyConnection("10.0.0.1")) for _ in range(20)]
    policy.trust("10.0.0.2")
    trusted = [policy.admit(BusyConnection("10.0.0.2")) for _ in range(20)]

    assert (sum(untrusted), sum(trusted)) == (10, 20)


class TestedPolicy(OperatorPolicy):
    """Without half-read requests."""

    __test__ = False

    def _evict(self, group: object) -> bool:
        return False
