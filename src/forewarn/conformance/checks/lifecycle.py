"""The life of an event, and which VMs see it."""

from forewarn.conformance.check import MUST, SHOULD, Need, check, expect, expect_equal, rule
from forewarn.conformance.expectation import PolledDocument, gives
from forewarn.conformance.raw_http import Request, instance_text
from forewarn.conformance.session import Session

QUIET_SECONDS = 0.2
UNKNOWN_VM = Request(vm="no-such-vm-as-this")
LIFE = (Need.CONTROL, Need.APPROVE)


@rule(SHOULD, "PROTOCOL 10: 403 for a client that is not a VM", gives(403, UNKNOWN_VM), Need.NAME)
def scope_unknown_vm_is_403() -> None:
    """A machine outside the fleet must learn that it is unknown, not that there are no events."""


@check(MUST, "PROTOCOL 2.4 and 8.1", Need.NAME)
def scope_member_reads_its_own_name(session: Session) -> None:
    """Clients learn from the instance tree whether an event is about themselves."""
    for vm in session.names:
        name = session.send(instance_text("/compute/name", vm)).body
        expect_equal("its own name as text to be", name, vm.encode())


@check(MUST, "PROTOCOL 6.5", Need.PEER)
def scope_shares_one_document(session: Session) -> None:
    """A leader approves for the others, so all must see the same events and incarnation."""
    ours = session.until_shown(session.create()).response.body
    theirs = session.document(vm=session.peer).response.body
    expect_equal("a second VM of the scope to read", theirs, ours)


@check(MUST, "PROTOCOL 6.5", Need.STRANGER)
def scope_does_not_see_others(session: Session) -> None:
    """A VM must not see the events of another scope."""
    event_id = session.create_shown()["EventId"]
    theirs = session.document(vm=session.stranger)
    expect(theirs.find(event_id) is None, f"no event {event_id} in another scope", theirs)


@check(MUST, "PROTOCOL 2.6: a counter per scope", Need.STRANGER)
def scope_has_its_own_incarnation(session: Session) -> None:
    """An incarnation that grows without a change makes every client of the fleet work."""
    with session.expect_unchanged(vm=session.stranger):
        session.create_shown()


@check(MUST, "PROTOCOL 6.3", Need.CONTROL)
def event_is_announced_as_scheduled(session: Session) -> None:
    """Clients prepare while it is Scheduled; an event that begins as Started leaves no time."""
    expect_equal("EventStatus", session.create_shown()["EventStatus"], "Scheduled")


@check(MUST, "PROTOCOL 2.6: bumps when an event is added", Need.CONTROL)
def incarnation_grows_by_1_when_an_event_is_added(session: Session) -> None:
    """Many clients look at nothing but the incarnation."""
    _expect_next(session.document(), session.until_shown(session.create()))


@check(MUST, "PROTOCOL 6.3: cancel", Need.CONTROL)
def event_canceled_is_gone(session: Session) -> None:
    """Clients undo their preparations when the event has left the document."""
    session.cancel(session.create_shown()["EventId"])


@check(MUST, "PROTOCOL 2.6: bumps when an event is removed", Need.CONTROL)
def incarnation_grows_by_1_when_an_event_is_canceled(session: Session) -> None:
    """The events are as before the announcement, but something did change."""
    event_id = session.create()
    _expect_next(session.until_shown(event_id), session.cancel(event_id))


@check(MUST, "PROTOCOL 4: nothing starts earlier unless approved", Need.CONTROL)
def event_does_not_start_by_itself(session: Session) -> None:
    """Without an approval it starts when NotBefore passes, and no sooner."""
    event_id = session.create_shown()["EventId"]
    session.clock.sleep(QUIET_SECONDS)
    status = session.document().event(event_id)["EventStatus"]
    expect_equal("EventStatus, long before NotBefore,", status, "Scheduled")


@check(MUST, "PROTOCOL 6.7: the mock's one event at a time is wrong", Need.CONTROL)
def events_may_overlap(session: Session) -> None:
    """A VM may have a restart and a redeploy ahead of it, and must see both."""
    first = session.create()
    session.until_shown(session.create("redeploy")).event(first)


def _expect_next(before: PolledDocument, after: PolledDocument) -> None:
    expect_equal("DocumentIncarnation", after.incarnation, before.incarnation + 1)


@check(MUST, "PROTOCOL 6.3", *LIFE)
def event_starts_under_the_same_id(session: Session) -> None:
    """Clients that approved an id wait for that id to start and to disappear."""
    documents = (session.history.started, session.history.scheduled)
    expect_equal("EventId", *(session.history.event(each)["EventId"] for each in documents))


@check(MUST, "PROTOCOL 2.3: empty once Started", *LIFE)
def not_before_is_empty_once_started(session: Session) -> None:
    """Clients read an empty NotBefore as `now`; with a date they might keep waiting."""
    expect_equal("NotBefore", session.history.event(session.history.started)["NotBefore"], "")


@check(SHOULD, "PROTOCOL 2.3: before 2019-08-01 the same", *LIFE)
def not_before_is_empty_once_started_in_old_versions(session: Session) -> None:
    """The member stays a string, so that the samples of that time do not crash."""
    expect_equal("NotBefore", session.history.event(session.history.started_old)["NotBefore"], "")


@check(SHOULD, "PROTOCOL 6.3", *LIFE)
def event_keeps_its_other_members_once_started(session: Session) -> None:
    """What will happen, and to which VMs, was promised in the announcement."""
    started = session.history.event(session.history.started)
    changed = {name: started[name] for name in ("EventStatus", "NotBefore")}
    scheduled = session.history.event(session.history.scheduled)
    expect_equal("the event to be", started, scheduled | changed)


@check(MUST, "PROTOCOL 6.3: incarnation +1", *LIFE)
def incarnation_grows_by_1_when_an_event_starts(session: Session) -> None:
    """A client that waits for the start looks at the incarnation."""
    _expect_next(session.history.scheduled, session.history.started)


@check(MUST, "PROTOCOL 6.3: removal is the recovery signal", *LIFE)
def event_ended_is_gone(session: Session) -> None:
    """Clients resume their work when the event is gone; there is no Completed."""
    expect_equal("the events to be", session.history.gone.events, session.history.before.events)


@check(MUST, "PROTOCOL 6.3: incarnation +1", *LIFE)
def incarnation_grows_by_1_when_an_event_ends(session: Session) -> None:
    """A client that waits for the end looks at the incarnation."""
    _expect_next(session.history.started, session.history.gone)
