"""What must always hold of the hosts that a VM may move to."""

from itertools import pairwise
from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.platform.placement import Move, rank_targets

patient = settings(deadline=None)  # a busy machine must not fail the test


class Host(NamedTuple):
    name: str
    free: int
    avoid: int
    scope_vms: int
    coming: int


hosts = st.lists(
    st.builds(
        Host,
        st.text("abc", max_size=3),
        st.integers(-5, 20),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=8,
    unique_by=lambda host: host.name,
)


def rank(known: list[Host], need: int) -> list[str]:
    return rank_targets(
        Move("web-0", "web", need),
        {host.name: host.free for host in known},
        hosts=0,
        moves=[Move("db", "db", 0, host.name) for host in known for _ in range(host.coming)],
        avoid={host.name: host.avoid for host in known},
        scope_hosts=[host.name for host in known for _ in range(host.scope_vms)],
    )


@patient
@given(hosts, st.integers(0, 20))
def test_exactly_the_hosts_with_room_are_targets(known: list[Host], need: int) -> None:
    assert sorted(rank(known, need)) == sorted(host.name for host in known if host.free >= need)


@patient
@given(hosts, st.integers(0, 20), st.randoms())
def test_order_does_not_depend_on_who_answered_first(
    known: list[Host], need: int, random: Random
) -> None:
    assert rank(random.sample(known, len(known)), need) == rank(known, need)


@patient
@given(hosts, st.integers(0, 20))
def test_no_target_is_worse_than_the_next_one(known: list[Host], need: int) -> None:
    """A later reason decides only between hosts that are equal in all earlier ones."""
    by_name = {host.name: host for host in known}
    ranked = [by_name[name] for name in rank(known, need)]
    for better, worse in pairwise(ranked):
        reasons = [
            (host.avoid, host.scope_vms, host.coming >= 2, -host.free, host.name)
            for host in (better, worse)
        ]
        assert reasons[0] < reasons[1]
