"""The rules of campaigns: who is next, when to brake, what is asked twice, what it costs."""

from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest
from msgspec.structs import replace

from forewarn.campaign import model as said
from forewarn.campaign.budget import Standing, standing
from forewarn.campaign.model import (
    TROUBLES_MAX,
    Campaign,
    Phase,
    State,
    Told,
    Trouble,
    UnderWay,
    Wish,
    estimate,
    host_seconds,
    operation_id,
)
from forewarn.campaign.rules import Decision, View, decide, hindrance_of_next
from forewarn.core import command as ask
from forewarn.core.event import Ended, EndReason, Event, EventType
from forewarn.core.fleet import Budget, Power, Scope
from forewarn.core.machine import decide as decide_scope
from forewarn.core.scheduling import event_id_of
from forewarn.errors import CampaignOver
from tests.builders import MINUTE, NOON, SECOND, STANDARD, restart, run_impact, scope_of, vm


class Fleet:
    """Scopes, looked at and counted. `revision` is what is known to have been told."""

    def __init__(self, *scopes: Scope, hosts: tuple[str, ...] = ("h1", "h2", "h3")) -> None:
        self.scopes = {scope.name: scope for scope in scopes}
        self.hosts = hosts
        self.revision = 10
        self.looks = 0

    def standing(self, scope: str) -> Standing | None:
        self.looks += 1
        return standing(self.scopes[scope], self.revision) if scope in self.scopes else None

    def on_host(self, host: str) -> list[Standing] | None:
        found = [
            scope for scope in self.scopes.values() if any(vm.host == host for vm in scope.vms)
        ]
        self.looks += len(found) or 1
        return [standing(scope, self.revision) for scope in found] if host in self.hosts else None

    def submit(self, command: ask.Command, scope: str = "web", minutes: int = 0) -> None:
        self.scopes[scope] = decide_scope(
            self.scopes[scope], command, NOON + minutes * MINUTE, STANDARD
        ).scope

    def maintained(self, host: str, campaign: Campaign, scope: str = "web") -> said.Announced:
        """The host's maintenance is announced, as the engine does it."""
        number = operation_id(campaign, host)
        self.submit(ask.Maintain(host=host, operation_id=number, type=campaign.wish.type), scope)
        known = {one.id for one in self.scopes[scope].events} | {
            one.id for one in self.scopes[scope].ended
        }
        ids = [one for domain in range(3) if (one := event_id_of(number, scope, domain)) in known]
        return said.Announced(host, tuple(Told(scope, one, self.revision) for one in ids))

    def event(self) -> Event:
        return self.scopes["web"].events[0]


def web(*domains: int, max_unavailable: Budget | None = None) -> Scope:
    """One VM on each of h1, h2, …, of these update domains."""
    vms = (
        vm(f"web-{number}", host=f"h{number + 1}", domain=domain)
        for number, domain in enumerate(domains)
    )
    return scope_of(*vms, max_unavailable=max_unavailable)


def campaign_of(hosts: int = 3, **wish: object) -> Campaign:
    wanted = replace(Wish(type=EventType.REBOOT, patterns=("h*",), max_hosts=3), **wish)
    return Campaign(id="c1", wish=wanted, started_at=NOON, total=hosts, waves=hosts)


def tell(
    campaign: Campaign,
    word: said.Word,
    fleet: Fleet,
    *,
    others: tuple[UnderWay, ...] = (),
    minutes: int = 0,
    health_limit: timedelta | None = None,
) -> Decision:
    view = View(
        fleet,
        lambda start, stop: [
            f"h{number + 1}" for number in range(start, min(stop, campaign.total))
        ],
        others,
        health_limit=health_limit,
    )
    return decide(campaign, word, view, NOON + minutes * MINUTE)


def look(
    campaign: Campaign, fleet: Fleet, *, others: tuple[UnderWay, ...] = (), minutes: int = 0
) -> Campaign:
    return tell(campaign, said.Look(), fleet, others=others, minutes=minutes).campaign


def announced(campaign: Campaign, fleet: Fleet) -> Campaign:
    """All that has its turn is announced, by way of the real machine."""
    for one in campaign.under_way:
        if one.phase is Phase.ORDERED:
            campaign = tell(campaign, fleet.maintained(one.host, campaign), fleet).campaign
    return campaign


def begun(fleet: Fleet, **wish: object) -> Campaign:
    return announced(look(campaign_of(len(fleet.hosts), **wish), fleet), fleet)


def turns(campaign: Campaign) -> list[str]:
    return [one.host for one in campaign.under_way]


def test_hosts_of_one_update_domain_have_their_turn_together() -> None:
    assert turns(look(campaign_of(), Fleet(web(0, 0, 0)))) == ["h1", "h2", "h3"]


def test_no_more_hosts_than_max_hosts_have_their_turn() -> None:
    assert turns(look(campaign_of(max_hosts=2), Fleet(web(0, 0, 0)))) == ["h1", "h2"]


def test_a_host_of_another_update_domain_waits_and_is_passed_by_one_that_fits() -> None:
    """Who does not fit keeps its place: it is the first to be looked at next time."""
    after = look(campaign_of(), Fleet(web(0, 1, 0)))

    assert turns(after) == ["h1", "h3"]
    assert (after.window, after.cursor, after.waiting) == (("h2",), 3, 1)


def test_a_host_with_two_update_domains_of_a_scope_has_its_turn_alone() -> None:
    """The machine holds one of them until the other is over, so one host may have both; two hosts
    may not.
    """
    both = scope_of(
        vm("a", host="h1"),
        vm("b", host="h1", domain=1),
        vm("c", host="h2"),
        max_unavailable=Budget(1),
    )

    assert turns(look(campaign_of(2), Fleet(both))) == ["h1"]


@pytest.mark.parametrize(
    ("policy", "wish", "expected"),
    [
        (None, Budget(1), 1),
        (Budget(1), None, 1),
        (Budget(2), Budget(1), 1),
        (Budget(2), Budget(3), 2),
        (None, Budget(70, True), 2),
    ],
)
def test_the_smaller_budget_of_scope_and_campaign_counts(
    policy: Budget | None, wish: Budget | None, expected: int
) -> None:
    """A percentage is of the scope's VMs, rounded down: 70 % of three are two."""
    after = look(campaign_of(max_unavailable=wish), Fleet(web(0, 0, 0, max_unavailable=policy)))

    assert len(after.under_way) == expected


def test_a_small_percentage_is_one_vm_at_least() -> None:
    """Else nothing could ever be done to a small scope."""
    assert (
        Budget(1, is_percent=True).of(3),
        Budget(25, is_percent=True).of(8),
        Budget(5).of(3),
    ) == (1, 2, 5)


def test_a_vm_that_does_not_run_takes_room() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    down = (*fleet.scopes["web"].vms[:2], replace(fleet.scopes["web"].vms[2], power=Power.STOPPED))
    fleet.scopes["web"] = replace(fleet.scopes["web"], vms=down)

    assert turns(look(campaign_of(), fleet)) == ["h3"], (
        "it is down already: its own host makes nobody else unavailable"
    )


def test_a_vm_under_a_users_restart_takes_room() -> None:
    """Whoever began it: two VMs of the scope would be down."""
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    fleet.submit(restart("web-1"))
    fleet.submit(ask.Approve(event_ids=(fleet.event().id,)))

    assert turns(look(campaign_of(), fleet)) == ["h2"]


def test_what_others_have_scheduled_to_come_before_our_end_takes_room() -> None:
    """An operator's own maintenance in a quarter of an hour would meet ours; one in two hours would
    not.
    """
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    fleet.submit(restart("web-1", not_before=NOON + 120 * MINUTE))
    view = View(fleet, lambda start, stop: ["h1"][start:stop], (), timedelta(minutes=25))

    assert turns(decide(campaign_of(1), said.Look(), view, NOON).campaign) == ["h1"]
    assert turns(decide(campaign_of(1), said.Look(), view, NOON + 100 * MINUTE).campaign) == []


def test_what_another_campaign_has_under_way_takes_room() -> None:
    """Whether its events are known yet or not."""
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))

    assert turns(look(campaign_of(), fleet, others=(UnderWay("h2", NOON),))) == ["h2"]
    assert turns(
        look(
            campaign_of(),
            fleet,
            others=(UnderWay("h2", NOON, Phase.ANNOUNCED, (Told("web", "E", 11),)),),
        )
    ) == ["h2"]


def test_a_scheduled_event_takes_room_as_a_started_one_does() -> None:
    """The machine counts no VMs, so a host is announced only if its impact cannot be one too many."""
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    campaign = begun(fleet)

    assert turns(look(campaign, fleet)) == ["h1"]


def test_the_next_host_has_its_turn_as_soon_as_the_last_event_is_over() -> None:
    """An approval made it early; nobody waits for the rest of a wave."""
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    campaign = begun(fleet)
    fleet.submit(ask.Approve(event_ids=(fleet.event().id,)), minutes=1)
    fleet.scopes["web"] = run_impact(fleet.scopes["web"], NOON + 2 * MINUTE)
    after = look(campaign, fleet, minutes=2)

    assert (turns(after), after.done, after.spent) == (["h2"], 1, timedelta(minutes=2))


def failed(campaign: Campaign, fleet: Fleet) -> Campaign:
    """The first event fails."""
    event = fleet.event()
    ended = (*fleet.scopes["web"].ended, Ended(event.id, EndReason.FAILED, NOON))
    fleet.scopes["web"] = replace(
        fleet.scopes["web"], events=fleet.scopes["web"].events[1:], ended=ended
    )
    return look(campaign, fleet, minutes=20)


def test_a_failed_impact_pauses_and_what_is_announced_goes_on() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(2)))
    campaign = begun(fleet)
    event = fleet.event()
    after = failed(campaign, fleet)

    assert (after.state, after.is_braked, after.failed) == (State.PAUSED, True, 1)
    assert after.why == f"h1: event {event.id} of web failed"
    assert turns(after) == ["h2"], "no new host, and the other one is not let go"
    assert after.troubles == (Trouble("h1", f"event {event.id} of web failed", is_failed=True),)


def test_without_the_brake_a_failure_is_counted_and_the_next_host_has_its_turn() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    after = failed(begun(fleet, pause_on_failure=False), fleet)

    assert (after.state, after.failed, turns(after)) == (State.RUNNING, 1, ["h2"])


def test_resumed_after_a_failure_it_goes_on_with_the_next_host() -> None:
    """Resuming itself gives no turn: so the history tells the person's word and the campaign's
    deeds apart.
    """
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    resumed = tell(failed(begun(fleet), fleet), said.Resume(), fleet)

    assert (resumed.campaign.state, resumed.campaign.why, turns(resumed.campaign)) == (
        State.RUNNING,
        "",
        [],
    )
    assert turns(look(resumed.campaign, fleet)) == ["h2"]


def test_an_event_that_somebody_canceled_is_a_host_skipped() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    campaign = begun(fleet)
    event = fleet.event()
    fleet.submit(ask.Cancel(event_id=event.id))
    after = look(campaign, fleet)

    assert (after.state, after.skipped, turns(after)) == (State.RUNNING, 1, ["h2"])
    assert after.troubles == (
        Trouble("h1", f"event {event.id} of web was canceled", is_failed=False),
    )


def test_a_host_that_is_gone_is_skipped_with_the_reason() -> None:
    after = look(campaign_of(), Fleet(web(0, 0, 0), hosts=("h1", "h3")))

    assert (turns(after), after.skipped) == (["h1", "h3"], 1)
    assert after.troubles == (Trouble("h2", "there is no such host any more", is_failed=False),)


def test_a_host_that_has_grown_too_large_waits_for_the_others_and_has_its_turn_if_it_fits_by_then() -> (
    None
):
    """A campaign that moves VMs may itself have made it so; until the others are done there is time
    to move them on.
    """
    crowded = scope_of(
        vm("a", host="h1"), vm("b", host="h1"), vm("c", host="h2"), max_unavailable=Budget(1)
    )
    fleet = Fleet(crowded)
    taken = look(campaign_of(2), fleet)
    assert (turns(taken), taken.window, taken.skipped) == (["h2"], ("h1",), 0)

    fleet.scopes["web"] = scope_of(
        vm("a", host="h1"), vm("b", host="h3"), vm("c", host="h2"), max_unavailable=Budget(1)
    )
    after = tell(taken, said.Announced("h2"), fleet).campaign
    assert (turns(after), after.done, after.skipped) == (["h1"], 1, 0)


def test_hosts_too_large_do_not_keep_those_behind_them_from_their_turn() -> None:
    """The first few wait, half a window of them; the window's other half is for the others."""
    vms = [
        vm(f"{letter}{number}", host=f"h{number}") for number in range(1, 101) for letter in "ab"
    ]
    fleet = Fleet(
        scope_of(*vms, max_unavailable=Budget(1)),
        hosts=tuple(f"h{number}" for number in range(1, 102)),
    )
    campaign = campaign_of(101)
    for _ in range(5):
        campaign = look(campaign, fleet)

    assert (turns(campaign), len(campaign.window), campaign.skipped) == (["h101"], 32, 68)
    ended = tell(campaign, said.Announced("h101"), fleet).campaign
    assert (ended.state, ended.done, ended.skipped) == (State.DONE, 1, 100)


def test_a_host_that_is_too_large_in_the_end_is_skipped_with_the_reason() -> None:
    fleet = Fleet(scope_of(vm("a", host="h1"), vm("b", host="h1"), max_unavailable=Budget(1)))
    after = look(campaign_of(1), fleet)

    assert (after.state, after.skipped) == (State.DONE, 1)
    assert (
        after.troubles[0].why
        == "h1 alone takes 2 VMs of web down at once; max_unavailable there is 1"
    )


def test_what_could_not_be_announced_is_a_host_skipped() -> None:
    fleet = Fleet(web(0))
    taken = look(campaign_of(1), fleet)
    after = tell(
        taken, said.Announced("h1", (), "web-0 has a Reboot pending already"), fleet
    ).campaign

    assert (after.state, after.troubles) == (
        State.DONE,
        (Trouble("h1", "web-0 has a Reboot pending already", is_failed=False),),
    )


def test_a_host_without_vms_is_done_at_once() -> None:
    fleet = Fleet(web(0), hosts=("h1", "h2"))
    taken = look(campaign_of(2), fleet)

    assert turns(taken) == ["h1", "h2"]
    assert tell(taken, said.Announced("h2"), fleet).campaign.done == 1


def test_an_event_that_is_not_known_yet_is_waited_for_and_takes_room() -> None:
    """A server may read of an announcement before it has read of the scope; to believe it over
    would be two hosts at once.
    """
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    campaign = replace(
        campaign_of(),
        cursor=1,
        under_way=(UnderWay("h1", NOON, Phase.ANNOUNCED, (Told("web", "E", 11),)),),
    )

    assert look(campaign, fleet) == campaign
    fleet.revision = 11
    assert look(campaign, fleet).done == 1, "known and forgotten: it is over since long"


def test_a_scope_that_is_gone_is_waited_for_until_that_is_certain() -> None:
    fleet = Fleet()
    campaign = replace(
        campaign_of(1),
        cursor=1,
        under_way=(UnderWay("h1", NOON, Phase.ANNOUNCED, (Told("web", "E", 11),)),),
    )

    assert look(campaign, fleet) == campaign
    fleet.revision = 11
    assert look(campaign, fleet).troubles[0].why == "event E of web was canceled"


def checking(fleet: Fleet, **wish: object) -> Campaign:
    campaign = begun(fleet, **wish)
    fleet.submit(ask.Approve(event_ids=(fleet.event().id,)))
    fleet.scopes["web"] = run_impact(fleet.scopes["web"])
    return tell_checked(campaign, said.Look(), fleet).campaign


tell_checked = partial(tell, health_limit=MINUTE)
"""On a server that has a health command."""


def test_a_host_is_done_when_the_health_command_says_yes_and_takes_room_until_then() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    campaign = checking(fleet)
    claimed = tell_checked(campaign, said.Claimed("h1", "w1"), fleet).campaign
    done = tell_checked(claimed, said.Checked("h1", "w1"), fleet).campaign

    assert (campaign.under_way[0].phase, turns(campaign)) == (Phase.CHECKING, ["h1"])
    assert (done.done, turns(done)) == (1, ["h2"])


def test_a_no_of_the_health_command_pauses_even_where_failures_do_not() -> None:
    fleet = Fleet(web(0, 0, 0, max_unavailable=Budget(1)))
    campaign = checking(fleet, pause_on_failure=False)
    claimed = tell_checked(campaign, said.Claimed("h1", "w1"), fleet).campaign
    after = tell_checked(claimed, said.Checked("h1", "w1", "exited with 1"), fleet).campaign

    assert (after.state, after.is_braked, after.failed) == (State.PAUSED, True, 1)
    assert after.why == "h1: the health command says no: exited with 1"


def test_one_asks_for_a_hosts_health_and_another_only_when_its_time_is_up() -> None:
    """A server that died with the question is not waited for."""
    fleet = Fleet(web(0), hosts=("h1",))
    first = tell_checked(checking(fleet), said.Claimed("h1", "w1"), fleet)
    second = tell_checked(first.campaign, said.Claimed("h1", "w2"), fleet)
    later = tell_checked(first.campaign, said.Claimed("h1", "w2"), fleet, minutes=2)

    assert (first.campaign.under_way[0].checker, first.orders) == ("w1", ())
    assert second.campaign == first.campaign
    assert later.campaign.under_way[0].checker == "w2"
    assert (
        tell_checked(later.campaign, said.Checked("h1", "w1"), fleet, minutes=2).campaign
        == later.campaign
    ), "who lost it says nothing"


def test_a_server_without_a_health_command_does_not_wait_for_one() -> None:
    """The option was removed while a host waited for it; who is asking by now is still waited for."""
    fleet = Fleet(web(0), hosts=("h1",))
    claimed = tell_checked(checking(fleet), said.Claimed("h1", "w1"), fleet).campaign

    assert look(checking(Fleet(web(0), hosts=("h1",))), fleet).state is State.DONE
    assert look(claimed, fleet, minutes=1) == claimed
    assert look(claimed, fleet, minutes=2).state is State.DONE


def test_a_cancel_takes_back_what_is_scheduled_and_waits_for_what_has_started() -> None:
    fleet = Fleet(web(0, 0, 0))
    campaign = begun(fleet, max_hosts=2)
    first, second = fleet.scopes["web"].events
    fleet.submit(ask.Approve(event_ids=(first.id,)))
    canceled = tell(campaign, said.Cancel(), fleet)

    assert canceled.campaign.state is State.CANCELED
    assert canceled.orders == (said.Withdraw("web", second.id),)
    fleet.submit(ask.Cancel(event_id=second.id))
    waiting = look(canceled.campaign, fleet)
    assert (turns(waiting), waiting.is_over) == (["h1"], False)
    fleet.scopes["web"] = run_impact(fleet.scopes["web"])
    end = look(waiting, fleet)
    assert (end.is_over, end.done, end.skipped, end.waiting) == (True, 1, 2, 0)


def test_a_canceled_campaign_learns_its_events_before_it_takes_them_back() -> None:
    """Whether another server has announced the host already nobody knows; asking again makes it
    certain.
    """
    fleet = Fleet(web(0))
    campaign = look(campaign_of(1), fleet)
    canceled = tell(campaign, said.Cancel(), fleet)

    assert canceled.orders == (said.Announce("h1", operation_id(campaign, "h1")),)
    told = tell(canceled.campaign, fleet.maintained("h1", campaign), fleet)
    assert told.orders == (said.Withdraw("web", fleet.event().id),)


@pytest.mark.parametrize(
    ("word", "state"),
    [(said.Pause(), State.PAUSED), (said.Resume(), State.RUNNING), (said.Cancel(), State.CANCELED)],
)
def test_said_twice_is_said_once(word: said.Word, state: State) -> None:
    fleet = Fleet(web(0, 0, 0))
    once = tell(campaign_of(), word, fleet).campaign

    assert once.state is state
    assert tell(once, word, fleet).campaign == once
    assert tell(once, word, fleet).changes == ()


@pytest.mark.parametrize("word", [said.Pause(), said.Resume(), said.Cancel()])
def test_what_is_over_is_not_begun_again(word: said.Word) -> None:
    over = replace(campaign_of(), state=State.DONE, ended_at=NOON)

    with pytest.raises(
        CampaignOver, match="campaign c1 is done; expected one that is running or paused"
    ):
        tell(over, word, Fleet())


def test_who_canceled_may_say_so_again_but_nothing_else() -> None:
    over = replace(campaign_of(), state=State.CANCELED, ended_at=NOON)

    assert tell(over, said.Cancel(), Fleet()).campaign == over
    with pytest.raises(CampaignOver):
        tell(over, said.Resume(), Fleet())


def test_paused_it_gives_no_turn() -> None:
    fleet = Fleet(web(0, 0, 0))
    paused = tell(campaign_of(), said.Pause(), fleet).campaign

    assert look(paused, fleet) == paused


def test_orders_are_read_off_the_campaign_so_that_none_is_lost_with_a_server() -> None:
    """Recorded but not announced: whoever looks next is given the same order, with the same id."""
    fleet = Fleet(web(0, 0, 0))
    taken = tell(campaign_of(max_hosts=1), said.Look(), fleet)
    again = tell(taken.campaign, said.Look(), fleet)

    assert (
        taken.orders == again.orders == (said.Announce("h1", operation_id(taken.campaign, "h1")),)
    )
    assert (taken.is_taking, again.is_taking) == (True, False)


def test_an_operation_has_one_id_for_ever_and_none_of_another_campaign() -> None:
    """Also where a store was begun anew and counts from one again: guests remember ids."""
    one = operation_id(campaign_of(), "h1")

    assert UUID(one).version == 5
    assert one == operation_id(replace(campaign_of(), state=State.PAUSED), "h1")
    assert (
        len(
            {
                one,
                operation_id(campaign_of(), "h2"),
                operation_id(replace(campaign_of(), started_at=NOON + SECOND), "h1"),
            }
        )
        == 3
    )


def test_every_change_is_told_for_the_history() -> None:
    fleet = Fleet(web(0))
    taken = tell(campaign_of(1), said.Look(), fleet)
    done = tell(taken.campaign, said.Announced("h1"), fleet)

    assert [(one.detail, one.host) for one in taken.changes] == [("c1 turns to h1", "h1")]
    assert [one.detail for one in done.changes] == [
        "c1 done with h1",
        "c1 ended: 1 hosts done, 0 skipped, 0 failed",
    ]


def test_only_the_last_troubles_are_kept_and_all_are_counted() -> None:
    """The record is written at every step, so it must stay small; the history has them all."""
    fleet = Fleet(hosts=())
    campaign = campaign_of(500)
    for _ in range(20):
        campaign = look(campaign, fleet)

    assert (campaign.skipped, len(campaign.troubles), campaign.state) == (
        500,
        TROUBLES_MAX,
        State.DONE,
    )


def steps_of(hosts: int) -> int:
    """How many scopes are looked at in the dearest step of a campaign over so many hosts, each with
    a scope of its own.
    """
    scopes = [
        replace(scope_of(vm(f"v{number}", host=f"h{number}")), name=f"s{number}")
        for number in range(1, hosts + 1)
    ]
    fleet = Fleet(*scopes, hosts=tuple(f"h{number}" for number in range(1, hosts + 1)))
    campaign, dearest = campaign_of(hosts, max_hosts=2), 0
    for _ in range(20):
        before = fleet.looks
        campaign = look(campaign, fleet)
        for one in campaign.under_way:
            campaign = tell(campaign, said.Announced(one.host), fleet).campaign
        dearest = max(dearest, fleet.looks - before)
    return dearest


def test_a_step_costs_as_much_as_hosts_are_under_way_and_not_as_the_fleet_is_large() -> None:
    assert steps_of(50) == steps_of(1000) <= 20


def test_the_record_of_a_campaign_does_not_grow_with_its_hosts() -> None:
    fleet = Fleet(hosts=tuple(f"h{number}" for number in range(1, 1001)))
    after = look(campaign_of(1000, max_hosts=2), fleet)

    assert len(after.window) + len(after.under_way) <= 64


def test_the_estimate_is_of_notice_and_duration_until_hosts_have_shown_how_long_they_take() -> None:
    """Three waves of 15 and 10 minutes; then, with one done in five minutes, two of five."""
    campaign = campaign_of(max_hosts=1)

    assert estimate(campaign, NOON, STANDARD) == NOON + 75 * MINUTE
    one_done = replace(campaign, cursor=1, done=1, spent=5 * MINUTE)
    assert estimate(one_done, NOON + 5 * MINUTE, STANDARD) == NOON + 15 * MINUTE
    assert estimate(replace(campaign, state=State.PAUSED), NOON, STANDARD) is None


@pytest.mark.parametrize(("said_seconds", "minutes"), [(None, 25), (-1, 25), (60, 25), (3600, 75)])
def test_an_impact_that_is_said_to_take_longer_than_usual_is_reckoned_with(
    said_seconds: int | None, minutes: int
) -> None:
    """So far ahead others' events are looked for, and so far away is the end."""
    campaign = campaign_of(1, duration_seconds=said_seconds)

    assert host_seconds(campaign.wish, STANDARD) == minutes * MINUTE
    assert estimate(campaign, NOON, STANDARD) == NOON + minutes * MINUTE


def test_why_the_next_host_has_to_wait_can_be_told() -> None:
    fleet = Fleet(web(0, 1, 0))
    fleet.submit(restart("web-1"))
    fleet.submit(ask.Approve(event_ids=(fleet.event().id,)))
    view = View(fleet, lambda start, stop: ["h1", "h2", "h3"][start:stop])

    assert (
        str(hindrance_of_next(campaign_of(), view, NOON))
        == "another update domain of web is under way"
    )
    assert hindrance_of_next(replace(campaign_of(), state=State.PAUSED), view, NOON) is None
