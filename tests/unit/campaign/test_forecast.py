"""The forecast: waves that fit, hosts that never will, hosts that will wait, and how much work it
is.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from forewarn.campaign.budget import Standing, standing
from forewarn.campaign.forecast import WINDOW_MAX, WINDOW_MIN, Forecast, forecast, window_of
from forewarn.core.fleet import Budget, Power, Scope
from tests.builders import NOON, scope_of, vm


def plan(
    *scopes: Scope, hosts: Sequence[str], max_hosts: int = 10, budget: Budget | None = None
) -> Forecast:
    found: dict[str, list[Standing]] = {host: [] for host in hosts}
    for one in map(standing, scopes):
        for host in one.residents:
            found[host].append(one)
    return forecast(
        hosts, lambda host: found[host], max_hosts=max_hosts, budget=budget, horizon=NOON
    )


def test_each_wave_has_one_update_domain_of_a_scope() -> None:
    scope = scope_of(
        *(vm(f"v{number}", host=f"h{number}", domain=number % 2) for number in range(6))
    )

    assert plan(scope, hosts=[f"h{number}" for number in range(6)]).waves == (
        ("h0", "h2", "h4"),
        ("h1", "h3", "h5"),
    )


def test_each_wave_keeps_to_the_budget_and_to_max_hosts() -> None:
    scope = scope_of(*(vm(f"v{number}", host=f"h{number}") for number in range(5)))
    hosts = [f"h{number}" for number in range(5)]

    assert [len(wave) for wave in plan(scope, hosts=hosts, budget=Budget(2)).waves] == [2, 2, 1]
    assert [len(wave) for wave in plan(scope, hosts=hosts, max_hosts=3).waves] == [3, 2]


def test_a_host_that_alone_is_too_much_is_marked_with_scope_and_budget() -> None:
    scope = scope_of(vm("a", host="h0"), vm("b", host="h0"), vm("c", host="h1"))
    found = plan(scope, hosts=["h0", "h1"], budget=Budget(1))

    assert found.waves == (("h1",),)
    assert [str(one) for one in found.too_large] == [
        "h0 alone takes 2 VMs of web down at once; max_unavailable there is 1"
    ]
    assert found.hosts == ("h1",)


def test_a_host_that_cannot_have_its_turn_as_things_stand_is_told_and_stays_in_the_campaign() -> (
    None
):
    """A VM is down for another reason, so nobody else of its scope may be, until it is up again."""
    scope = scope_of(replace(vm("a", host="h0"), power=Power.STOPPED), vm("b", host="h1"))
    found = plan(scope, hosts=["h0", "h1"], budget=Budget(1))

    assert found.waves == (("h0",),)
    assert [str(one) for one in found.waiting] == [
        "2 VMs of web would be unavailable; max_unavailable there is 1"
    ]
    assert found.hosts == ("h0", "h1")


def test_the_work_of_a_plan_grows_as_the_fleet_does_and_no_faster() -> None:
    """At worst, with one scope everywhere and one VM at a time, each wave looks at a window of
    hosts and not at all of them.
    """

    def looks_of(count: int) -> int:
        looks = 0

        class Counted(frozenset[str]):
            def __or__(
                self, other: object
            ) -> frozenset[str]:  # how often somebody asks whether one more VM fits
                nonlocal looks
                looks += 1
                return frozenset.__or__(self, other)  # type: ignore[operator]

            def union(self, *others: object) -> "Counted":
                return Counted(frozenset.union(self, *others))  # type: ignore[arg-type]

        scope = standing(
            scope_of(*(vm(f"v{number}", host=f"h{number}") for number in range(count)))
        )
        counted = scope._replace(down=Counted())
        hosts = [f"h{number}" for number in range(count)]
        found = forecast(hosts, lambda host: [counted], max_hosts=2, budget=Budget(1), horizon=NOON)
        assert len(found.waves) == count
        return looks

    assert looks_of(200) < looks_of(400) <= 2.5 * looks_of(200)


def test_the_window_has_its_limits() -> None:
    assert (window_of(1), window_of(100), window_of(250)) == (WINDOW_MIN, 400, WINDOW_MAX)
