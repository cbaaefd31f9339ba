"""Events: their members, dates and types."""

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any

from forewarn.conformance.check import MUST, SHOULD, Body, Need, check, expect, expect_equal, rule
from forewarn.conformance.raw_http import JsonObject, instance_text, is_list_of
from forewarn.conformance.session import Session
from forewarn.conformance.spec import HTTP_DATE, NEWEST, OLDEST, TYPES, VERSIONS, fields

GUID = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")
ROLE = re.compile(r".+_IN_[0-9]+")
"""A role of a cloud service, which has no underscore in 2017-03-01."""


def expect_member(
    events: Iterable[JsonObject], name: str, is_valid: Callable[[Any], object], expected: str
) -> None:
    for event in events:
        expect(is_valid(event[name]), f"{name} to be {expected}", event[name])


def every(name: str, is_valid: Callable[[Any], object], expected: str) -> Body:
    """A member of every event."""
    return lambda session: expect_member(session.events(), name, is_valid, expected)


def one_of(name: str, *values: str) -> Body:
    return every(name, values.__contains__, f"one of {', '.join(values)}")


def is_string(value: object) -> bool:
    return isinstance(value, str)


def is_names(value: Any) -> bool:
    return is_list_of(str, value) and all(value) and value != []


def is_duration(value: object) -> bool:
    return type(value) is int and value >= -1


def is_http_date(value: object) -> bool:
    return isinstance(value, str) and HTTP_DATE.fullmatch(value) is not None


@check(MUST, "PROTOCOL 1.1 and 2.1: captured members and order", Need.EVENT, each=VERSIONS)
def event_members_in(version: str, session: Session) -> None:
    """A version really lacks later members, and scripts rely on the order of the captures."""
    for event in session.events(version):
        expect_equal(f"the members in {version} to be", list(event), fields(version))


@rule(MUST, "PROTOCOL 2.2: EventId", every("EventId", GUID.fullmatch, "a GUID"), Need.EVENT)
def event_id_is_a_guid() -> None:
    """Typed clients decode it into a GUID."""


@check(MUST, "PROTOCOL 2.2: all captures", Need.EVENT)
def event_id_is_upper_case(session: Session) -> None:
    """Every capture is in upper case, and clients compare ids as text."""
    expect_member(session.events(), "EventId", lambda id: id == id.upper(), "in upper case")


@check(MUST, "PROTOCOL 2.2: EventId", Need.EVENT)
def event_id_is_unique(session: Session) -> None:
    """Clients store events by id."""
    ids = [event["EventId"] for event in session.events()]
    expect(len(ids) == len(set(ids)), "each EventId once", ids)


@check(MUST, "PROTOCOL 2.2: EventId", Need.EVENT)
def event_id_is_the_same_in_every_version(session: Session) -> None:
    """Pacemaker's agent reads with 2020-07-01 and approves with 2019-08-01."""
    wanted = {each["EventId"] for each in session.events() if each["EventType"] in TYPES[:3]}
    for version in VERSIONS:
        ids = {event["EventId"] for event in session.document(version).events}
        expect(wanted <= ids, f"the ids {sorted(wanted)} in {version} too", ids)


@rule(MUST, "PROTOCOL 2.2: EventStatus", one_of("EventStatus", "Scheduled", "Started"), Need.EVENT)
def event_status_is_known() -> None:
    """Clients compare with exactly Scheduled and Started; no Completed was ever seen."""


@rule(MUST, "PROTOCOL 2.2: EventType", one_of("EventType", *TYPES), Need.EVENT)
def event_type_is_known() -> None:
    """Most clients compare case-sensitively, and ignore a type they do not know."""


@rule(MUST, "PROTOCOL 2.2: ResourceType", one_of("ResourceType", "VirtualMachine"), Need.EVENT)
def event_resource_type_is_virtual_machine() -> None:
    """giantswarm's client drops anything else."""


NAMES = every("Resources", is_names, "a list of names")


@rule(MUST, "PROTOCOL 2.2 and 2.4: Resources", NAMES, Need.EVENT)
def event_resources_are_names() -> None:
    """Clients look for their own name in this list; a plain string would match parts of names."""


@check(MUST, "PROTOCOL 2.4: leading underscore in 2017-03-01 (CLOG)", Need.EVENT)
def event_names_begin_with_underscore_in_2017_03_01(session: Session) -> None:
    """Clients of the preview drop the first character before they compare."""
    plain = _resources(session.events())
    for event_id, names in _resources(session.document(OLDEST).events).items():
        known = plain.get(event_id, ())
        wanted = [name if ROLE.fullmatch(name) else f"_{name}" for name in known]
        expect_equal(f"Resources in {OLDEST} to be", names, wanted or names)


@check(MUST, "PROTOCOL 2.4: no underscore from 2017-08-01 on", Need.EVENT)
def event_names_are_plain_from_2017_08_01_on(session: Session) -> None:
    """From this version on it is the VM's own name, and clients compare it unchanged."""
    newest = _resources(session.events())
    for version in VERSIONS[1:]:
        for event_id, names in _resources(session.document(version).events).items():
            wanted = newest.get(event_id, names)
            expect_equal("the same Resources in every version,", names, wanted)


def _resources(events: Iterable[JsonObject]) -> dict[str, Any]:
    return {event["EventId"]: event["Resources"] for event in events}


@check(MUST, "PROTOCOL 2.4: equals compute.name (TERM)", Need.CONTROL)
def event_resources_match_the_instance_name(session: Session) -> None:
    """drainsafe compares the raw text of /instance/compute/name with Resources, not a hostname."""
    resources = session.create_shown()["Resources"]
    name = session.send(instance_text("/compute/name")).body.decode("latin-1")
    expect_equal("Resources", resources, [name])


@check(MUST, "PROTOCOL 2.2: Description since 2019-04-01", Need.EVENT)
def event_description_is_text(session: Session) -> None:
    """Clients log and match it; it may be empty, but null breaks typed ones."""
    expect_member(session.events(), "Description", is_string, "a string")
    for version in VERSIONS[VERSIONS.index("2019-04-01") :]:
        expect_member(session.document(version).events, "Description", is_string, "a string")


@rule(MUST, "PROTOCOL 2.2: EventSource", one_of("EventSource", "Platform", "User"), Need.EVENT)
def event_source_is_known() -> None:
    """The AKS node problem detector approves by itself what a User requested."""


DURATION = every("DurationInSeconds", is_duration, "an integer of at least -1")


@rule(MUST, "PROTOCOL 2.2: DurationInSeconds", DURATION, Need.EVENT)
def event_duration_is_an_integer() -> None:
    """Microsoft's sample calls int() on it: -1 means unknown, 0 no interruption."""


def _scheduled(session: Session, version: str = NEWEST) -> list[JsonObject]:
    return [event for event in session.events(version) if event["EventStatus"] == "Scheduled"]


@rule(MUST, "PROTOCOL 2.3: always a string", every("NotBefore", is_string, "a string"), Need.EVENT)
def not_before_is_text() -> None:
    """Microsoft's samples call string methods on it, so null crashes them."""


@check(MUST, "PROTOCOL 2.3: RFC 1123 in every capture", Need.EVENT, each=VERSIONS)
def not_before_is_rfc_1123_in(version: str, session: Session) -> None:
    """giantswarm's and dask's clients parse nothing else; ISO 8601 was only in articles."""
    expected = "a date as 'Thu, 22 Jul 2021 04:50:17 GMT'"
    expect_member(_scheduled(session, version), "NotBefore", is_http_date, expected)


@check(SHOULD, "PROTOCOL 2.3: weekdays", Need.EVENT)
def not_before_has_the_right_weekday(session: Session) -> None:
    """Some date parsers compare the weekday with the date, and fail."""
    for event in _scheduled(session):
        expect(is_http_date(event["NotBefore"]), "an RFC 1123 date", event["NotBefore"])
        date = parsedate_to_datetime(event["NotBefore"]).astimezone(UTC)
        expect_equal("NotBefore", event["NotBefore"], format_datetime(date, usegmt=True))


@check(MUST, "PROTOCOL 4: nothing starts earlier unless approved", Need.CONTROL)
def not_before_matches_the_control_api(session: Session) -> None:
    """It is the earliest start: a guest that sees a wrong one stops its work too early or late."""
    event = session.create_shown()
    not_before = session.control.get("events", event["EventId"])["not_before"]
    wanted = datetime.fromisoformat(not_before).astimezone(UTC)
    expect_equal("NotBefore", event["NotBefore"], format_datetime(wanted, usegmt=True))


@check(MUST, "PROTOCOL 6.4 and 2.2: same number, same content", Need.CONTROL)
def not_before_does_not_move(session: Session) -> None:
    """A date that moves with every poll is never reached."""
    event = session.create_shown()
    for _ in range(3):
        later = session.document().event(event["EventId"])
        expect_equal("NotBefore", later["NotBefore"], event["NotBefore"])


def makes(operation: str, event_type: str, source: str) -> Body:
    """An event of this type and source."""

    def run(session: Session) -> None:
        event = session.create_shown(operation)
        actual = (event["EventType"], event["EventSource"])
        expect_equal("type and source to be", actual, (event_type, source))

    return run


@rule(MUST, "PROTOCOL 6.6", makes("restart", "Reboot", "User"), Need.CONTROL)
def restart_is_a_reboot_by_a_user() -> None:
    """Clients approve what a user requested immediately, and drain before platform events."""


@rule(MUST, "PROTOCOL 6.6", makes("redeploy", "Redeploy", "User"), Need.CONTROL)
def redeploy_is_a_redeploy_by_a_user() -> None:
    """A redeploy loses the local disk: clients must be able to tell it from a restart."""


@rule(MUST, "PROTOCOL 1.1 and 2.2", makes("freeze", "Freeze", "Platform"), Need.CONTROL)
def freeze_is_by_the_platform() -> None:
    """Clusters raise their timeouts for a pause of the host."""


@check(MUST, "PROTOCOL 2.2: DurationInSeconds 9 for host maintenance", Need.CONTROL)
def freeze_has_a_duration(session: Session) -> None:
    """A cluster that knows the pause takes nine seconds need not fail over."""
    duration = session.create_shown("freeze")["DurationInSeconds"]
    expect_equal("DurationInSeconds", duration, 9)


@rule(MUST, "PROTOCOL 1.1 and 6.2", makes("evict", "Preempt", "Platform"), Need.CONTROL)
def eviction_is_a_preempt_by_the_platform() -> None:
    """Spot workloads save their state within seconds, and only for this type."""


@check(MUST, "PROTOCOL 1.1 and 6.4", Need.CONTROL)
def deletion_is_a_terminate(session: Session) -> None:
    """Scale sets drain an instance for good on this type, and temporarily on the others."""
    expect_equal("EventType", session.create_shown("delete")["EventType"], "Terminate")


def _versions_with(session: Session, operation: str) -> list[str]:
    """The versions that show the event of an operation."""
    event_id = session.create_shown(operation)["EventId"]
    return [version for version in VERSIONS if session.document(version).find(event_id)]


def _expect_shown(session: Session, operation: str, since: str) -> None:
    shown = _versions_with(session, operation)
    wanted = [version for version in VERSIONS if version >= since]
    expect(set(wanted) <= set(shown), f"the event in {wanted}", shown)


def _expect_hidden(session: Session, operation: str, before: str) -> None:
    shown = _versions_with(session, operation)
    expect(min(shown, default="") >= before, f"it in no version before {before}", shown)


@check(MUST, "PROTOCOL 1.1: event types", Need.CONTROL, each=("restart", "redeploy", "freeze"))
def every_version_shows_a(operation: str, session: Session) -> None:
    """The type is as old as the protocol."""
    _expect_shown(session, operation, since=OLDEST)


@check(MUST, "PROTOCOL 1.1: Preempt since 2017-11-01", Need.CONTROL)
def preempt_is_shown_from_2017_11_01_on(session: Session) -> None:
    """Spot VMs have no other way to learn of their eviction."""
    _expect_shown(session, "evict", since="2017-11-01")


@check(SHOULD, "PROTOCOL 1.1: hide Preempt before 2017-11-01", Need.CONTROL)
def preempt_is_hidden_before_2017_11_01(session: Session) -> None:
    """Older clients do not know the type."""
    _expect_hidden(session, "evict", before="2017-11-01")


@check(MUST, "PROTOCOL 1.1: Terminate since 2019-01-01 (TERM)", Need.CONTROL)
def terminate_is_shown_from_2019_01_01_on(session: Session) -> None:
    """Instances of a scale set drain on this."""
    _expect_shown(session, "delete", since="2019-01-01")


@check(MUST, "PROTOCOL 1.1: Terminate needs 2019-01-01 (TERM)", Need.CONTROL)
def terminate_is_hidden_before_2019_01_01(session: Session) -> None:
    """Microsoft's article promises that older clients do not get it."""
    _expect_hidden(session, "delete", before="2019-01-01")
