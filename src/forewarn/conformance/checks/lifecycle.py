"""An event's life: announced, Started, gone; or taken back."""

from forewarn.conformance.check import Level, Need, check, holds, same
from forewarn.conformance.document import Document, Entry
from forewarn.conformance.session import Stage

MUST, SHOULD = Level.MUST, Level.SHOULD
QUIET_SECONDS = 0.2
LATER = ("EventStatus", "NotBefore")
"""What changes when an event starts."""


def found(document: Document, event_id: str) -> Entry:
    event = document.find(event_id)
    holds(event is not None, f"the event {event_id}", document)
    return event or Entry()


@check(MUST, "PROTOCOL 6.3", Need.CONTROL)
def event_is_announced_as_scheduled(stage: Stage) -> None:
    """Clients prepare while it is Scheduled; what begins as Started leaves them no time."""
    event_id = stage.make("restart")
    same("EventStatus", found(stage.until_shown(event_id), event_id)["EventStatus"], "Scheduled")


@check(MUST, "PROTOCOL 2.6: bumps when an event is added", Need.CONTROL)
def number_grows_by_1_when_an_event_is_announced(stage: Stage) -> None:
    """The number is all that many clients look at."""
    before = stage.document()
    same("DocumentIncarnation", stage.until_shown(stage.make("restart")).number, before.number + 1)


@check(MUST, "PROTOCOL 6.3: cancel", Need.CONTROL)
def event_that_is_taken_back_is_gone(stage: Stage) -> None:
    """Clients take back their preparations when the event has left the document."""
    event_id = stage.make("restart")
    stage.until_shown(event_id)
    stage.control.post("events", event_id, "cancel")
    stage.until_gone(event_id)


@check(MUST, "PROTOCOL 2.6: bumps when an event is removed", Need.CONTROL)
def number_grows_by_1_when_an_event_is_taken_back(stage: Stage) -> None:
    """The document reads as before the announcement, and must not look as if nothing had happened."""
    event_id = stage.make("restart")
    before = stage.until_shown(event_id)
    stage.control.post("events", event_id, "cancel")
    same("DocumentIncarnation", stage.until_gone(event_id).number, before.number + 1)


@check(MUST, "PROTOCOL 4: nothing starts earlier unless approved", Need.CONTROL)
def event_does_not_start_by_itself(stage: Stage) -> None:
    """Not approving means that it starts when NotBefore passes, and no sooner."""
    event_id = stage.make("restart")
    stage.until_shown(event_id)
    stage.time.sleep(QUIET_SECONDS)
    same(
        "EventStatus, long before its time,",
        found(stage.document(), event_id)["EventStatus"],
        "Scheduled",
    )


@check(MUST, "PROTOCOL 6.7: the mock's one event at a time is wrong", Need.CONTROL)
def events_overlap(stage: Stage) -> None:
    """A VM may have a restart and a redeploy ahead of it, and must see both."""
    first, second = stage.make("restart"), stage.make("redeploy")
    document = stage.until_shown(second)
    holds(document.find(first) is not None, f"{first} beside {second}", document)


@check(MUST, "PROTOCOL 6.3", Need.CONTROL, Need.APPROVE)
def event_starts_under_the_same_id(stage: Stage) -> None:
    """Clients that approved an id wait for that id to start and to go."""
    story = stage.story
    wanted = found(story.scheduled, story.event_id)["EventId"]
    same("EventId", found(story.started, story.event_id)["EventId"], wanted)


@check(MUST, "PROTOCOL 2.3: empty once Started", Need.CONTROL, Need.APPROVE)
def not_before_is_empty_once_started(stage: Stage) -> None:
    """Clients read an empty NotBefore as `now`; an old time would be one more reason to wait."""
    same("NotBefore", found(stage.story.started, stage.story.event_id)["NotBefore"], "")


@check(SHOULD, "PROTOCOL 2.3: before 2019-08-01 the same", Need.CONTROL, Need.APPROVE)
def not_before_is_empty_once_started_in_old_versions(stage: Stage) -> None:
    """The member stays a string, so that the samples of that time do not crash."""
    same("NotBefore", found(stage.story.started_old, stage.story.event_id)["NotBefore"], "")


@check(SHOULD, "PROTOCOL 6.3", Need.CONTROL, Need.APPROVE)
def event_keeps_its_other_members_once_started(stage: Stage) -> None:
    """What is about to happen, and to whom, was promised when it was announced."""
    story = stage.story
    before, after = found(story.scheduled, story.event_id), found(story.started, story.event_id)
    wanted = {name: value for name, value in before.items() if name not in LATER}
    same(
        "the other members to be",
        {name: value for name, value in after.items() if name not in LATER},
        wanted,
    )


@check(MUST, "PROTOCOL 6.3: incarnation +1", Need.CONTROL, Need.APPROVE)
def number_grows_by_1_when_an_event_starts(stage: Stage) -> None:
    """A client that waits for the start looks at the number."""
    same("DocumentIncarnation", stage.story.started.number, stage.story.scheduled.number + 1)


@check(MUST, "PROTOCOL 6.3: removal is the recovery signal", Need.CONTROL, Need.APPROVE)
def event_that_is_over_is_gone(stage: Stage) -> None:
    """Clients take up their work again when the event has left; there is no Completed."""
    same(
        "the events to be those from before,",
        list(stage.story.gone.events),
        list(stage.story.before.events),
    )


@check(MUST, "PROTOCOL 6.3: incarnation +1", Need.CONTROL, Need.APPROVE)
def number_grows_by_1_when_an_event_is_over(stage: Stage) -> None:
    """A client that waits for the end looks at the number."""
    same("DocumentIncarnation", stage.story.gone.number, stage.story.started.number + 1)
