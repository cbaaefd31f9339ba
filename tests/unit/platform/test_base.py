"""What a platform is asked to do."""

import pytest

from forewarn.core.command import Approve
from forewarn.core.event import Cause, EventType, Impact
from forewarn.core.fleet import RedeployMethod
from forewarn.platform.base import ImpactRequest, make_request
from tests.builders import NOON, guid, maintain, run, scope_of, vm


def request_of(type_: EventType, cause: Cause, method: RedeployMethod) -> ImpactRequest:
    scope = scope_of(vm("web-0"), redeploy=method)
    request = make_request(scope, Impact(guid(1), "web-0", type_, cause, NOON), rate=1)
    assert request is not None
    return request


@pytest.mark.parametrize(
    ("announced", "rate", "seconds"), [(600, 30, 20), (9, 60, 1), (9, 1, 9), (-1, 30, -1)]
)
def test_rate_divides_the_duration_of_a_freeze(announced: int, rate: int, seconds: int) -> None:
    """Ten minutes of a demonstration at rate 30 would be longer than everything else in it."""
    scope = run(scope_of(vm("web-0")), maintain(duration_seconds=announced))
    scope = run(scope, Approve(event_ids=(scope.events[0].id,), vm=""))

    request = make_request(scope, scope.impacts[0], rate)

    assert request is not None
    assert request.duration_seconds == seconds
    assert scope.events[0].duration_seconds == announced


@pytest.mark.parametrize("method", RedeployMethod)
def test_redeploy_is_done_as_the_policy_of_the_scope_says(method: RedeployMethod) -> None:
    assert request_of(EventType.REDEPLOY, Cause.MAINTENANCE, method).method is method


def test_freeze_never_stops_the_vm() -> None:
    request = request_of(EventType.FREEZE, Cause.LIVE_MIGRATION, RedeployMethod.COLD)

    assert (request.method, request.moves) == (RedeployMethod.LIVE_ONLY, True)


def test_failed_host_may_stop_a_vm_whatever_the_policy_says() -> None:
    """The VM may be down already, and stays down otherwise."""
    request = request_of(EventType.REBOOT, Cause.FAILED, RedeployMethod.LIVE_ONLY)

    assert request.method is RedeployMethod.LIVE
