"""Notice is what could be read: when an event could not be read, and what that means for NotBefore.

    created_at                    the notice is complete                NotBefore
        |-------- read --------|  gap  |---- read ----|.....................|

NotBefore is never before the notice is complete, that is, before the event could be read for the
minimum notice of its type in total. It follows from the gaps alone, so each gap is made up once,
in whichever order and however often it is noted. An event that was announced long before has its
notice anyway, and keeps its NotBefore.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.core.command import NoteUnread
from forewarn.core.draft import Draft
from forewarn.core.event import Event, Gap, Status
from forewarn.core.timing import Timing, round_up_to_second
from forewarn.duration import format_duration

GAPS_MAX = 16
"""How many gaps an event remembers. Of more, those after its notice go first; then the oldest are
added up, and what is noted later about the time until then is ignored. It is minutes ago: whoever
knows of a gap notes it within seconds.
"""
RECENT_MAX = 32
SHORT_GAPS_FOR = timedelta(minutes=2)
AHEAD_MAX = timedelta(minutes=1)
"""A gap that ends later than this was recorded by a server whose clock was ahead."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def note_unread(draft: Draft, command: NoteUnread) -> None:
    """Unlike `Extend`, this covers every type, and an event does not become timed by it."""
    for event_id, gaps, since in command.events:
        event = draft.events.get(event_id)
        if event is None or event.status is not Status.SCHEDULED:
            continue
        noted = with_gaps(event, gaps, since, draft.timing)
        if noted != event:
            draft.put_event(noted)
        if noted.not_before != event.not_before:
            unread = format_duration(round_up(unread_duration(noted)))
            detail = f"to {noted.not_before:{TIME_FORMAT}}: it could not be read for {unread}"
            draft.record(ChangeKind.EXTENDED, noted, detail=detail)
        elif (noted.unreadable_since is None) != (event.unreadable_since is None):
            draft.record(ChangeKind.UPDATED, noted, detail=describe_reading(noted))


def describe_reading(event: Event) -> str:
    """Whether its VMs can read the event, for the history."""
    if event.unreadable_since is None:
        return "its VMs can read it again"
    since = f"{event.unreadable_since:{TIME_FORMAT}}"
    return f"its VMs have not been able to read it since {since}, so its notice does not pass"


def with_gaps(event: Event, gaps: Sequence[Gap], since: datetime | None, timing: Timing) -> Event:
    """The event with these gaps, too, and with the NotBefore that follows.

    One that has had its notice stays as it is. A short gap does not count, unless the event waited
    for its end, or it extends a gap that counts.
    """
    if event.has_had_notice:
        return event
    gap_min = timing.gap_min_of(event.type)
    counting = [gap.since for gap in event.gaps]
    if event.unreadable_since is not None and since is None:
        counting.append(event.unreadable_since)
    counted = [
        gap
        for gap in merge((*event.gaps, *gaps), after=event.unread_until or event.created_at)
        if gap.until - gap.since >= gap_min
        or any(gap.since <= time < gap.until for time in counting)
    ]
    not_before = max(event.not_before, round_up_to_second(complete_at(event, counted)))
    noted = replace(event, not_before=not_before, unreadable_since=since)
    return with_limited_gaps(noted, counted)


def complete_at(event: Event, gaps: Iterable[Gap]) -> datetime:
    """When the event could be read for its minimum notice, given all gaps, in order."""
    complete = event.created_at + event.notice + event.unread_total
    for gap in gaps:
        if gap.since >= complete:
            break
        complete += gap.until - gap.since
    return complete


def merge(gaps: Iterable[Gap], *, after: datetime) -> list[Gap]:
    """The gaps after a time, in order, without overlaps."""
    merged = list[Gap]()
    for gap in sorted(Gap(max(since, after), until) for since, until in gaps if until > after):
        if merged and gap.since <= merged[-1].until:
            merged[-1] = Gap(merged[-1].since, max(merged[-1].until, gap.until))
        else:
            merged.append(gap)
    return merged


def with_limited_gaps(event: Event, gaps: list[Gap]) -> Event:
    """The event with these gaps, in order, of which it keeps at most GAPS_MAX."""
    complete, since = complete_at(event, gaps), event.unreadable_since
    total, until = event.unread_total, event.unread_until
    while len(gaps) > GAPS_MAX:  # ends: each round removes one
        if gaps[-1].since >= complete:
            gaps = gaps[:-1]
        elif since is None or gaps[0].until <= since:
            total += gaps[0].until - gaps[0].since
            until = gaps[0].until
            gaps = gaps[1:]
        else:  # all of them are in the gap that has not ended
            gaps = [*gaps[:-2], Gap(gaps[-2].since, gaps[-1].until)]
    return replace(event, gaps=tuple(gaps), unread_total=total, unread_until=until)


def keep_recent(gaps: Sequence[Gap], now: datetime, timing: Timing) -> tuple[Gap, ...]:
    """The gaps that some event may not have stored yet. That takes seconds.

    Short ones concern only a Preempt, and are kept for SHORT_GAPS_FOR. The time of later gaps does
    not count: maybe no server was running then that could have stored anything.
    """
    known = drop_future(gaps, now)
    kept = [
        gap
        for gap in known
        if gap.until - gap.since >= timing.gap_min
        or now - gap.until - total(merge(known, after=gap.until)) < SHORT_GAPS_FOR
    ]
    return tuple(kept[-RECENT_MAX:])


def drop_future(gaps: Iterable[Gap], now: datetime) -> list[Gap]:
    """The gaps without those of a wrong clock: they would delay every event until they end."""
    return [gap for gap in gaps if gap.until <= now + AHEAD_MAX]


def unread_duration(event: Event) -> timedelta:
    """For how long its VMs could not read the event, without a gap that has not ended."""
    return event.unread_total + total(event.gaps)


def total(gaps: Iterable[Gap]) -> timedelta:
    return sum((until - since for since, until in gaps), timedelta(0))


def round_up(duration: timedelta) -> timedelta:
    """To a whole second."""
    second = timedelta(seconds=1)
    return -(-duration // second) * second
