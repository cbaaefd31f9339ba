"""An event's members: which there are, in what order, of which type."""

import re
from itertools import pairwise

from forewarn.conformance.check import Level, Need, check, check_each, holds, same
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import FIELDS, NEWEST, OLDEST, TYPES, VERSIONS, fields

MUST, SHOULD = Level.MUST, Level.SHOULD
GUID = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")
ROLE = re.compile(r".+_IN_[0-9]+")
"""A role of a cloud service, which 2017-03-01 tells as it is."""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


@check_each(VERSIONS, MUST, "PROTOCOL 1.1 and 2.1: captured members and order", Need.EVENT)
def event_members_in(stage: Stage, version: str) -> None:
    """Members that a version lacks are really absent, and scripts that cut text rely on the order
    of the captures.
    """
    for event in stage.events(version):
        same(f"the members of an event in {version} to be", list(event), fields(version))


@check(MUST, "PROTOCOL 2.2: EventId", Need.EVENT)
def event_id_is_a_guid(stage: Stage) -> None:
    """Typed clients read it into a GUID."""
    for event in stage.events():
        event_id = event["EventId"]
        holds(
            isinstance(event_id, str) and GUID.fullmatch(event_id) is not None,
            "an EventId that is a GUID",
            event_id,
        )


@check(MUST, "PROTOCOL 2.2: all captures", Need.EVENT)
def event_id_is_upper_case(stage: Stage) -> None:
    """Every capture is in upper case, and clients compare ids as text."""
    for event in stage.events():
        holds(
            str(event["EventId"]) == str(event["EventId"]).upper(),
            "an EventId in upper case",
            event["EventId"],
        )


@check(MUST, "PROTOCOL 2.2: EventId", Need.EVENT)
def event_id_stands_once(stage: Stage) -> None:
    """Clients keep their events by id."""
    ids = [event["EventId"] for event in stage.events()]
    holds(len(ids) == len(set(ids)), "each EventId once", ids)


@check(MUST, "PROTOCOL 2.2: EventId", Need.EVENT)
def event_id_is_the_same_in_every_version(stage: Stage) -> None:
    """Pacemaker's agent reads with 2020-07-01 and approves with 2019-08-01."""
    wanted = [
        event["EventId"]
        for event in stage.events()
        if event["EventType"] not in ("Preempt", "Terminate")
    ]
    for version in VERSIONS:
        told = [event["EventId"] for event in stage.document(version).events]
        holds(set(wanted) <= set(told), f"the ids {wanted} in {version} too", told)


@check(MUST, "PROTOCOL 2.2: EventStatus", Need.EVENT)
def event_status_is_known(stage: Stage) -> None:
    """Clients compare with Scheduled and Started to the letter; no Completed was ever seen."""
    for event in stage.events():
        holds(
            event["EventStatus"] in ("Scheduled", "Started"),
            "Scheduled or Started",
            event["EventStatus"],
        )


@check(MUST, "PROTOCOL 2.2: EventType", Need.EVENT)
def event_type_is_known(stage: Stage) -> None:
    """Most clients compare case-sensitively, and do nothing about a type they do not know."""
    for event in stage.events():
        holds(event["EventType"] in TYPES, f"one of {', '.join(TYPES)}", event["EventType"])


@check(MUST, "PROTOCOL 2.2: ResourceType", Need.EVENT)
def event_resource_type_is_virtual_machine(stage: Stage) -> None:
    """giantswarm's client drops anything else."""
    for event in stage.events():
        same("the ResourceType", event["ResourceType"], "VirtualMachine")


@check(MUST, "PROTOCOL 2.2 and 2.4: Resources", Need.EVENT)
def event_resources_are_names(stage: Stage) -> None:
    """Clients look for their own name in this list; a single string would match parts of names."""
    for event in stage.events():
        names = event["Resources"]
        holds(
            isinstance(names, list) and bool(names) and all(map(_is_text, names)),
            "Resources that are a list of names",
            names,
        )


@check(MUST, "PROTOCOL 2.4: leading underscore in 2017-03-01 (CLOG)", Need.EVENT)
def event_names_begin_with_underscore_in_2017_03_01(stage: Stage) -> None:
    """Clients of the preview drop the first character before they compare."""
    plain = {event["EventId"]: event["Resources"] for event in stage.events()}
    for event in stage.document(OLDEST).events:
        wanted = [
            name if ROLE.fullmatch(name) else f"_{name}" for name in plain.get(event["EventId"], ())
        ]
        same(f"Resources in {OLDEST} to be", event["Resources"], wanted or event["Resources"])


@check(MUST, "PROTOCOL 2.4: no underscore from 2017-08-01 on", Need.EVENT)
def event_names_are_plain_from_2017_08_01_on(stage: Stage) -> None:
    """From this version on the name is the VM's own, and clients compare it as it is."""
    named = [{event["EventId"]: event["Resources"] for event in stage.events()}]
    named += [
        {event["EventId"]: event["Resources"] for event in stage.document(version).events}
        for version in VERSIONS[1:]
    ]
    for earlier, later in pairwise(named):
        shared = earlier.keys() & later.keys()
        same(
            "the same Resources in every version,",
            {one: later[one] for one in shared},
            {one: earlier[one] for one in shared},
        )


@check(MUST, "PROTOCOL 2.4: equals compute.name (TERM)", Need.CONTROL)
def event_names_the_vm_as_instance_does(stage: Stage) -> None:
    """drainsafe compares the raw text of /instance/compute/name with Resources; the hostname is
    another name.
    """
    event_id = stage.make("restart")
    event = stage.until_shown(event_id).find(event_id)
    name = stage.instance("/compute/name", query="format=text").body.decode("latin-1")
    assert event is not None
    same("Resources", event["Resources"], [name])


@check(MUST, "PROTOCOL 2.2: Description since 2019-04-01", Need.EVENT)
def event_description_is_text(stage: Stage) -> None:
    """Clients log and match it; it may be empty, but null breaks typed ones."""
    for version in [version for version in VERSIONS if version >= dict(FIELDS)["Description"]]:
        for event in stage.events(version) if version == NEWEST else stage.document(version).events:
            holds(
                isinstance(event["Description"], str),
                "a Description that is a string",
                event["Description"],
            )


@check(MUST, "PROTOCOL 2.2: EventSource", Need.EVENT)
def event_source_is_known(stage: Stage) -> None:
    """AKS's node-problem-detector approves by itself what a User asked for."""
    for event in stage.events():
        holds(
            event["EventSource"] in ("Platform", "User"), "Platform or User", event["EventSource"]
        )


@check(MUST, "PROTOCOL 2.2: DurationInSeconds", Need.EVENT)
def event_duration_is_an_integer(stage: Stage) -> None:
    """Microsoft's sample takes int() of it: -1 is unknown, 0 is no interruption."""
    for event in stage.events():
        seconds = event["DurationInSeconds"]
        holds(type(seconds) is int and seconds >= -1, "an integer of at least -1", seconds)
