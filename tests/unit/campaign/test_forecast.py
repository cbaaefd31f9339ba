"""The forecast: waves that fit, hosts that never fit, hosts that wait, and what it costs."""

from collections.abc import Mapping, Sequence, Set

from msgspec.structs import replace

from forewarn.campaign.budget import ScopeSummary
from forewarn.campaign.forecast import WINDOW_MAX, WINDOW_MIN, Forecast, forecast, window_size
from forewarn.core.fleet import Budget, Power, Scope
from tests.builders import NOON, scope_of, vm


def plan(
    *scopes: Scope, hosts: Sequence[str], max_hosts: int = 10, budget: Budget | None = None
) -> Forecast:
    by_host: dict[str, list[ScopeSummary]] = {host: [] for host in hosts}
    for summary in map(ScopeSummary, scopes):
        for host in {resident.host for resident in summary.scope.vms}:
            by_host[host].append(summary)
    return forecast(by_host, max_hosts=max_hosts, budget=budget, horizon=NOON)


def test_each_wave_has_one_update_domain_of_a_scope() -> None:
    scope = scope_of(
        *(vm(f"v{number}", host=f"h{number}", domain=number % 2) for number in range(6))
    )

    assert plan(scope, hosts=[f"h{number}" for number in range(6)]).waves == (
        ("h0", "h2", "h4"),
        ("h1", "h3", "h5"),
    )


def test_each_wave_respects_budget_and_max_hosts() -> None:
    scope = scope_of(*(vm(f"v{number}", host=f"h{number}") for number in range(5)))
    hosts = [f"h{number}" for number in range(5)]

    assert [len(wave) for wave in plan(scope, hosts=hosts, budget=Budget(2)).waves] == [2, 2, 1]
    assert [len(wave) for wave in plan(scope, hosts=hosts, max_hosts=3).waves] == [3, 2]


def test_host_that_alone_exceeds_a_budget_is_too_large() -> None:
    scope = scope_of(vm("a", host="h0"), vm("b", host="h0"), vm("c", host="h1"))
    found = plan(scope, hosts=["h0", "h1"], budget=Budget(1))

    assert found.waves == (("h1",),)
    assert [str(blocker) for blocker in found.too_large] == [
        "h0 alone takes 2 VMs of web down at once; its max_unavailable is 1"
    ]
    assert found.hosts == ("h1",)


def test_host_that_cannot_start_at_present_stays_in_the_campaign() -> None:
    """A VM is down for another reason, so no other VM of its scope may be until it is up again."""
    scope = scope_of(replace(vm("a", host="h0"), power=Power.STOPPED), vm("b", host="h1"))
    found = plan(scope, hosts=["h0", "h1"], budget=Budget(1))

    assert found.waves == (("h0",),)
    assert [str(blocker) for blocker in found.waiting] == [
        "2 VMs of web would be unavailable; its max_unavailable is 1"
    ]
    assert found.hosts == ("h0", "h1")


def test_cost_of_a_plan_grows_linearly_with_the_fleet() -> None:
    """With one scope on all hosts and one VM at a time, a wave considers only a window."""

    def checks_of(count: int) -> int:
        checks = 0

        class Counted(ScopeSummary):
            def on(self, host: str) -> Mapping[int, Set[str]]:  # at most twice per check of a host
                nonlocal checks
                checks += 1
                return super().on(host)

        scope = scope_of(*(vm(f"v{number}", host=f"h{number}") for number in range(count)))
        summary = Counted(scope)
        on_host = {f"h{number}": [summary] for number in range(count)}
        found = forecast(on_host, max_hosts=2, budget=Budget(1), horizon=NOON)
        assert len(found.waves) == count
        return checks

    assert checks_of(200) < checks_of(400) <= 2.5 * checks_of(200)


def test_window_is_bounded() -> None:
    assert (window_size(1), window_size(100), window_size(250)) == (WINDOW_MIN, 400, WINDOW_MAX)
