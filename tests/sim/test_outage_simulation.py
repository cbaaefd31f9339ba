"""Notice under seeds: all servers are down now and then, and a fault in the rule is found."""

import asyncio

import pytest

from forewarn.core.command import NoteUnread
from forewarn.core.fleet import Scope
from forewarn.engine.readability import Readability
from tests.rules import Broken
from tests.sim.outage_world import OutageWorld

SEEDS = 10
SEEDS_TO_FIND_A_FAULT = 20
ONCE_BROKEN = (9700031,)
"""A server found a gap, and was killed before that was stored with the event.

tests/unit/engine/test_readability.py,
test_preempt_makes_up_for_a_gap_that_was_found_right_before_an_outage.
"""


class Forgetful(Readability):
    """It knows the gaps, and corrects no event."""

    def find_unread(self, scope: Scope) -> NoteUnread | None:
        return None


@pytest.mark.parametrize("seed", [*range(SEEDS), *ONCE_BROKEN])
def test_no_event_starts_by_time_unless_it_was_shown_for_its_minimum_notice(seed: int) -> None:
    world = OutageWorld(seed)

    asyncio.run(world.run())

    assert world.witness.outages
    assert len(world.witness.transcript) > 20


def test_simulation_finds_servers_that_do_not_correct_not_before() -> None:
    def run_all() -> None:
        for seed in range(SEEDS_TO_FIND_A_FAULT):
            asyncio.run(OutageWorld(seed, Forgetful).run())

    with pytest.raises(Broken, match="no event starts by time unless some server showed it"):
        run_all()
