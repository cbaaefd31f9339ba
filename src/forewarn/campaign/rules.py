"""The rules of a campaign: `decide(campaign, word, view, now) -> Decision`. Pure, and committed by
revision like a scope.

A host's way through a campaign:

    waiting ──there is room──> ordered ──its events exist──> announced ──they ended──> (checking)
    ──> done
       │ gone; in the end, too large │ refused                  │ canceled                  │ says
       no
       └────> skipped                └────> skipped             └─> skipped; failed         └─>
       failed

There is room when fewer than `max_hosts` are under way and every scope on the host has one update
domain at most, and no more VMs than its budget, that are down or announced by any campaign. A
Scheduled event takes its share as a Started one does: the machine would hold another update domain
by itself, but it counts no VMs. A host that has become too large for a budget, such as by VMs moved
there from others, waits until all others are done: until then somebody may make it smaller.

Any server may decide; the revision settles who was first. What must be done afterwards (`orders`)
is read off the campaign itself and may be done twice: so a server that dies between the record and
the order loses nothing and doubles nothing.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from forewarn.campaign import model as said
from forewarn.campaign.budget import NOBODY, Hindrance, Ledger, Standing
from forewarn.campaign.forecast import window_of
from forewarn.campaign.model import (
    CHECK_MAX,
    CHECK_SPARE,
    TROUBLES_MAX,
    Campaign,
    Phase,
    State,
    Told,
    Trouble,
    UnderWay,
    operation_id,
)
from forewarn.core.change import Change, ChangeKind
from forewarn.core.event import EndReason, Status
from forewarn.errors import CampaignOver


class Lookout(Protocol):
    """The fleet, as far as somebody asks: a scope at a glance, the scopes that have VMs on a host
    (None: no such host).
    """

    @property
    def revision(self) -> int: ...

    def standing(self, scope: str) -> Standing | None: ...

    def on_host(self, host: str) -> Sequence[Standing] | None: ...


class View(NamedTuple):
    """What a decision rests on: the fleet, the campaign's hosts in order, what other campaigns have
    under way, how far to look ahead for others' events, and how long the server's health command
    may take (None: it has none).
    """

    fleet: Lookout
    hosts: Callable[[int, int], Sequence[str]]
    others: Sequence[UnderWay] = ()
    horizon: timedelta = timedelta(0)
    health_limit: timedelta | None = None


class Decision(NamedTuple):
    campaign: Campaign
    changes: tuple[Change, ...]
    orders: tuple[said.Order, ...]
    is_taking: bool
    """A host has its turn: nobody else may have given one meanwhile."""


def decide(campaign: Campaign, word: said.Word, view: View, now: datetime) -> Decision:
    """What a word makes of a campaign. Asking for what is so already changes nothing; CampaignOver
    if it cannot be any more.

    A person's words change only what they say, so that the history tells who did what; the next
    look does the rest.
    """
    draft = Draft(campaign, view, now)
    RULES[type(word)](draft, word)
    if not isinstance(word, said.Pause | said.Resume | said.Cancel):
        settle(draft)
    before = {one.host for one in campaign.under_way}
    is_taking = any(one.host not in before for one in draft.campaign.under_way)
    return Decision(
        draft.campaign, tuple(draft.changes), orders(draft.campaign, view.fleet, now), is_taking
    )


def orders(campaign: Campaign, fleet: Lookout, now: datetime) -> tuple[said.Order, ...]:
    """What must be done now, by anybody."""
    found: list[said.Order] = []
    for one in campaign.under_way:
        if one.phase is Phase.ORDERED:
            found.append(said.Announce(one.host, operation_id(campaign, one.host)))
        elif one.phase is Phase.CHECKING and is_unclaimed(one, now):
            found.append(said.Check(one.host))
        elif campaign.state is State.CANCELED:
            found += [
                said.Withdraw(told.scope, told.event_id)
                for told in one.events
                if is_scheduled(fleet, told)
            ]
    return tuple(found)


class Draft:
    """The campaign as it will be, and what became true on the way."""

    def __init__(self, campaign: Campaign, view: View, now: datetime) -> None:
        self.campaign = campaign
        self.view = view
        self.now = now
        self.changes: list[Change] = []

    def tell(self, text: str, host: str = "") -> None:
        self.changes.append(
            Change(what=ChangeKind.CAMPAIGN, detail=f"{self.campaign.id} {text}", host=host)
        )

    def put(self, **members: Any) -> None:
        self.campaign = replace(self.campaign, **members)

    def under_way(self, host: str, phase: Phase) -> UnderWay | None:
        return next(
            (one for one in self.campaign.under_way if one.host == host and one.phase is phase),
            None,
        )

    def put_host(self, changed: UnderWay) -> None:
        self.put(
            under_way=tuple(
                changed if one.host == changed.host else one for one in self.campaign.under_way
            )
        )

    def leave(self, host: str) -> None:
        self.put(under_way=tuple(one for one in self.campaign.under_way if one.host != host))

    def skip(self, host: str, why: str) -> None:
        self._trouble(Trouble(host, why, is_failed=False))
        self.put(skipped=self.campaign.skipped + 1)

    def fail(self, host: str, why: str, *, is_brake: bool) -> None:
        self._trouble(Trouble(host, why, is_failed=True))
        self.put(failed=self.campaign.failed + 1)
        if is_brake and self.campaign.state is State.RUNNING:
            self.put(state=State.PAUSED, why=f"{host}: {why}", is_braked=True)
            self.tell(f"paused: {host}: {why}", host)

    def _trouble(self, trouble: Trouble) -> None:
        self.leave(trouble.host)
        self.put(troubles=(*self.campaign.troubles, trouble)[-TROUBLES_MAX:])
        self.tell(
            f"{'failed' if trouble.is_failed else 'skipped'} {trouble.host}: {trouble.why}",
            trouble.host,
        )


# --- a rule for each word


def pause(draft: Draft, word: said.Pause) -> None:
    refuse_if_ending(draft.campaign)
    if draft.campaign.state is State.RUNNING:
        draft.put(state=State.PAUSED, why="an operator paused it", is_braked=False)
        draft.tell("paused")


def resume(draft: Draft, word: said.Resume) -> None:
    refuse_if_ending(draft.campaign)
    if draft.campaign.state is State.PAUSED:
        draft.put(state=State.RUNNING, why="", is_braked=False)
        draft.tell("resumed")


def cancel(draft: Draft, word: said.Cancel) -> None:
    if draft.campaign.state is State.CANCELED:
        return
    refuse_if_ending(draft.campaign)
    draft.put(state=State.CANCELED, why="", is_braked=False)
    draft.tell("canceled")


def refuse_if_ending(campaign: Campaign) -> None:
    if campaign.state in (State.CANCELED, State.DONE):
        raise CampaignOver(
            f"campaign {campaign.id} is {campaign.state}; expected one that is running or paused",
            campaign=campaign.id,
            state=campaign.state,
        )


def announced(draft: Draft, word: said.Announced) -> None:
    one = draft.under_way(word.host, Phase.ORDERED)
    if one is not None:
        draft.put_host(
            replace(one, phase=Phase.ANNOUNCED, events=word.events, trouble=word.trouble)
        )


def claimed(draft: Draft, word: said.Claimed) -> None:
    """One asks for a host's health at a time; who does not answer in time has lost its turn."""
    one, limit = draft.under_way(word.host, Phase.CHECKING), draft.view.health_limit
    if one is not None and limit is not None and is_unclaimed(one, draft.now):
        draft.put_host(
            replace(one, checker=word.worker, checked_until=draft.now + limit + CHECK_SPARE)
        )


def checked(draft: Draft, word: said.Checked) -> None:
    one = draft.under_way(word.host, Phase.CHECKING)
    if one is None or one.checker != word.worker:
        return
    if word.problem:
        draft.fail(word.host, f"the health command says no: {word.problem}", is_brake=True)
    else:
        be_done(draft, one)


RULES: dict[type[said.Word], Callable[[Draft, Any], None]] = {
    said.Look: lambda draft, word: None,  # settling is all there is to do
    said.Pause: pause,
    said.Resume: resume,
    said.Cancel: cancel,
    said.Announced: announced,
    said.Claimed: claimed,
    said.Checked: checked,
}


# --- what follows by itself


def settle(draft: Draft) -> None:
    """Let go of the hosts whose events are over, give others their turn, and end with the last one."""
    if draft.campaign.is_over:
        return
    for one in draft.campaign.under_way:
        if one.phase is Phase.ANNOUNCED and not any(
            is_awaited(draft.view.fleet, told) for told in one.events
        ):
            let_go(draft, one)
        elif (
            one.phase is Phase.CHECKING
            and draft.view.health_limit is None
            and is_unclaimed(one, draft.now)
        ):
            be_done(draft, one)  # the health command was taken out of the configuration meanwhile
    if (
        draft.campaign.state is State.RUNNING
        and len(draft.campaign.under_way) < draft.campaign.wish.max_hosts
    ):
        give_turns(draft)
    if not draft.campaign.under_way and (
        draft.campaign.state is State.CANCELED or not draft.campaign.waiting
    ):
        end(draft)


def let_go(draft: Draft, one: UnderWay) -> None:
    """All events of the host are over: it failed, it was kept from it, or it is done."""
    ended = [
        (how_ended(draft.view.fleet, told), f"event {told.event_id} of {told.scope}")
        for told in one.events
    ]
    failed = [event for how, event in ended if how is EndReason.FAILED]
    kept_from = (
        [one.trouble]
        if one.trouble
        else [f"{event} was canceled" for how, event in ended if how is EndReason.CANCELED]
    )
    if failed:
        draft.fail(one.host, f"{failed[0]} failed", is_brake=draft.campaign.wish.pause_on_failure)
    elif kept_from:
        draft.skip(one.host, kept_from[0])
    elif draft.view.health_limit is not None and draft.campaign.state is not State.CANCELED:
        draft.put_host(replace(one, phase=Phase.CHECKING))
    else:
        be_done(draft, one)


def is_unclaimed(one: UnderWay, now: datetime) -> bool:
    """Whether no server is asking for the host's health, or the one that did has not answered in
    time.

    A claim that lasts longer than any can was made by a server whose clock was wrong, and is not
    waited for.
    """
    return one.checked_until is None or not now < one.checked_until <= now + CHECK_MAX


def be_done(draft: Draft, one: UnderWay) -> None:
    draft.leave(one.host)
    draft.put(done=draft.campaign.done + 1, spent=draft.campaign.spent + (draft.now - one.taken_at))
    draft.tell(f"done with {one.host}", one.host)


def give_turns(draft: Draft) -> None:
    """The next few hosts in their order, as many as there is room for.

    Who does not fit keeps its place.
    """
    campaign, fleet = draft.campaign, draft.view.fleet
    ledger = taken_now(draft)
    window = window_of(campaign.wish.max_hosts)
    fresh = draft.view.hosts(campaign.cursor, campaign.cursor + window - len(campaign.window))
    room = campaign.wish.max_hosts - len(campaign.under_way)
    left: list[str] = []
    too_large: list[Hindrance] = []
    for host in (*campaign.window, *fresh):
        if room == 0:
            left.append(host)
            continue
        scopes = fleet.on_host(host)
        hindrance = None if scopes is None else ledger.hindrance(host, scopes)
        if scopes is None:
            draft.skip(host, "there is no such host any more")
        elif hindrance is not None:
            left.append(host)
            too_large += [hindrance] if hindrance.is_for_good else []
        else:
            ledger.take_host(host, scopes)
            draft.put(under_way=(*draft.campaign.under_way, UnderWay(host, draft.now)))
            draft.tell(f"turns to {host}", host)
            room -= 1
    is_last = (
        not draft.campaign.under_way
        and len(left) == len(too_large)
        and campaign.cursor + len(fresh) == campaign.total
    )
    for hindrance in too_large[
        0 if is_last else window // 2 :
    ]:  # the rest of the window is for those that can go on
        left.remove(hindrance.host)
        draft.skip(hindrance.host, str(hindrance))
    if len(left) < len(campaign.window) + len(fresh):
        draft.put(window=tuple(left), cursor=campaign.cursor + len(fresh))


def hindrance_of_next(campaign: Campaign, view: View, now: datetime) -> Hindrance | None:
    """Why the first host that waits has to, if it is for want of room in a scope.

    For people to read.
    """
    first = next(iter((*campaign.window, *view.hosts(campaign.cursor, campaign.cursor + 1))), "")
    scopes = view.fleet.on_host(first) if first else None
    if (
        scopes is None
        or campaign.state is not State.RUNNING
        or len(campaign.under_way) >= campaign.wish.max_hosts
    ):
        return None
    return taken_now(Draft(campaign, view, now)).hindrance(first, scopes)


def taken_now(draft: Draft) -> Ledger:
    """What the hosts under way take, of this campaign and of others.

    A host whose events are not known takes all its VMs.
    """
    fleet = draft.view.fleet
    ledger = Ledger(draft.campaign.wish.max_unavailable, draft.now + draft.view.horizon)
    for one in (*draft.campaign.under_way, *draft.view.others):
        if one.phase is not Phase.ANNOUNCED:
            ledger.take_host(one.host, fleet.on_host(one.host) or ())
            continue
        for told in one.events:
            scope = fleet.standing(told.scope)
            event = None if scope is None else scope.events.get(told.event_id)
            if event is not None:
                ledger.take(told.scope, {event.update_domain: event.resources})
            elif scope is not None and scope.revision < told.revision:  # we do not know it yet
                ledger.take(told.scope, scope.residents.get(one.host, NOBODY))
    return ledger


def end(draft: Draft) -> None:
    campaign = draft.campaign
    if campaign.state is State.CANCELED:
        draft.put(skipped=campaign.skipped + campaign.waiting)
    else:
        draft.put(state=State.DONE, why="", is_braked=False)
    draft.put(cursor=campaign.total, window=(), ended_at=draft.now)
    told = draft.campaign
    draft.tell(f"ended: {told.done} hosts done, {told.skipped} skipped, {told.failed} failed")


# --- what became of an event


def is_scheduled(fleet: Lookout, told: Told) -> bool:
    scope = fleet.standing(told.scope)
    event = None if scope is None else scope.events.get(told.event_id)
    return event is not None and event.status is Status.SCHEDULED


def is_awaited(fleet: Lookout, told: Told) -> bool:
    """Whether an event is not over yet, or may not be: we might not have heard of it at all."""
    scope = fleet.standing(told.scope)
    if scope is None:
        return fleet.revision < told.revision
    return told.event_id in scope.events or (
        told.event_id not in scope.ended and scope.revision < told.revision
    )


def how_ended(fleet: Lookout, told: Told) -> EndReason:
    """How an event ended that is over.

    With its scope gone there was nobody to do it to; one that is forgotten by now is done.
    """
    scope = fleet.standing(told.scope)
    return (
        EndReason.CANCELED if scope is None else scope.ended.get(told.event_id, EndReason.COMPLETED)
    )
