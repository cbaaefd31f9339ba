"""What must always hold of the hosts that a VM may move to."""

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.platform.placement import Candidate, rank_targets

patient = settings(deadline=None)  # a busy machine must not fail the test
sizes = st.integers(-5, 20)
hosts = st.lists(
    st.builds(Candidate, st.text("abc", max_size=3), sizes, st.integers(0, 2), st.integers(0, 3)),
    max_size=8,
    unique_by=lambda candidate: candidate.host,
)


@patient
@given(hosts, st.integers(0, 20))
def test_exactly_the_hosts_with_room_are_targets(candidates: list[Candidate], need: int) -> None:
    assert sorted(rank_targets(candidates, need)) == sorted(
        candidate.host for candidate in candidates if candidate.free_bytes >= need
    )


@patient
@given(hosts, st.integers(0, 20), st.randoms())
def test_order_does_not_depend_on_who_answered_first(
    candidates: list[Candidate], need: int, random: Random
) -> None:
    shuffled = random.sample(candidates, len(candidates))
    assert rank_targets(shuffled, need) == rank_targets(candidates, need)


@patient
@given(hosts, st.integers(0, 20))
def test_no_target_is_worse_than_the_next_one(candidates: list[Candidate], need: int) -> None:
    """A later reason decides only between hosts that are equal in all earlier ones."""
    by_name = {candidate.host: candidate for candidate in candidates}
    ranked = [by_name[host] for host in rank_targets(candidates, need)]
    for better, worse in pairwise(ranked):
        assert better.avoid <= worse.avoid
        if better.avoid == worse.avoid:
            assert better.scope_vms <= worse.scope_vms
            if better.scope_vms == worse.scope_vms:
                assert better.free_bytes >= worse.free_bytes
