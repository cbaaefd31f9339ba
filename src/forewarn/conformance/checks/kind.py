"""The types of events: what becomes which, and which version shows it."""

from forewarn.conformance.check import Level, Need, check, holds, same
from forewarn.conformance.document import Entry
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import PREEMPT_SINCE, TERMINATE_SINCE, VERSIONS

MUST, SHOULD = Level.MUST, Level.SHOULD


def made(stage: Stage, what: str) -> Entry:
    event_id = stage.make(what)
    found = stage.until_shown(event_id).find(event_id)
    assert found is not None
    return found


def is_of(event: Entry, type_: str, source: str) -> None:
    same("type and source to be", (event["EventType"], event["EventSource"]), (type_, source))


def shown_in(stage: Stage, event: Entry) -> list[str]:
    """The versions that show an event."""
    return [
        version
        for version in VERSIONS
        if stage.document(version).find(event["EventId"]) is not None
    ]


def is_shown_since(since: str, told: list[str]) -> None:
    wanted = [version for version in VERSIONS if version >= since]
    holds(set(wanted) <= set(told), f"it in {wanted}", told)


def is_hidden_before(since: str, told: list[str]) -> None:
    holds(min(told, default="") >= since, f"it in no version before {since}", told)


@check(MUST, "PROTOCOL 6.6", Need.CONTROL)
def restart_is_a_reboot_by_a_user(stage: Stage) -> None:
    """Clients approve at once what a user asked for, and drain before what the platform does."""
    is_of(made(stage, "restart"), "Reboot", "User")


@check(MUST, "PROTOCOL 6.6", Need.CONTROL)
def redeploy_is_a_redeploy_by_a_user(stage: Stage) -> None:
    """A redeploy loses the local disk: clients must be able to tell it from a restart."""
    is_of(made(stage, "redeploy"), "Redeploy", "User")


@check(MUST, "PROTOCOL 1.1 and 2.2", Need.CONTROL)
def freeze_is_by_the_platform(stage: Stage) -> None:
    """Clusters raise their time-outs for a pause that the host makes."""
    is_of(made(stage, "freeze"), "Freeze", "Platform")


@check(MUST, "PROTOCOL 2.2: DurationInSeconds 9 for host maintenance", Need.CONTROL)
def freeze_says_how_long(stage: Stage) -> None:
    """A cluster that knows the pause takes nine seconds need not fail over."""
    same("DurationInSeconds", made(stage, "freeze")["DurationInSeconds"], 9)


@check(MUST, "PROTOCOL 1.1 and 6.2", Need.CONTROL)
def eviction_is_a_preempt_by_the_platform(stage: Stage) -> None:
    """Spot workloads save their state within seconds, and only for this type."""
    is_of(made(stage, "evict"), "Preempt", "Platform")


@check(MUST, "PROTOCOL 1.1 and 6.4", Need.CONTROL)
def deletion_is_a_terminate(stage: Stage) -> None:
    """Scale sets drain an instance for good on this type, and for a while on the others."""
    same("EventType", made(stage, "delete")["EventType"], "Terminate")


@check(MUST, "PROTOCOL 1.1: event types", Need.CONTROL)
def reboot_is_shown_in_every_version(stage: Stage) -> None:
    """The type is as old as the protocol."""
    same("the versions that show it to be", shown_in(stage, made(stage, "restart")), list(VERSIONS))


@check(MUST, "PROTOCOL 1.1: event types", Need.CONTROL)
def redeploy_is_shown_in_every_version(stage: Stage) -> None:
    """The type is as old as the protocol."""
    same(
        "the versions that show it to be", shown_in(stage, made(stage, "redeploy")), list(VERSIONS)
    )


@check(MUST, "PROTOCOL 1.1: event types", Need.CONTROL)
def freeze_is_shown_in_every_version(stage: Stage) -> None:
    """The type is as old as the protocol."""
    same("the versions that show it to be", shown_in(stage, made(stage, "freeze")), list(VERSIONS))


@check(MUST, "PROTOCOL 1.1: Preempt since 2017-11-01", Need.CONTROL)
def preempt_is_shown_from_2017_11_01_on(stage: Stage) -> None:
    """Spot VMs learn of their eviction in no other way."""
    is_shown_since(PREEMPT_SINCE, shown_in(stage, made(stage, "evict")))


@check(SHOULD, "PROTOCOL 1.1: hide Preempt before 2017-11-01", Need.CONTROL)
def preempt_is_hidden_before_2017_11_01(stage: Stage) -> None:
    """A client of that time has never heard of the type."""
    is_hidden_before(PREEMPT_SINCE, shown_in(stage, made(stage, "evict")))


@check(MUST, "PROTOCOL 1.1: Terminate since 2019-01-01 (TERM)", Need.CONTROL)
def terminate_is_shown_from_2019_01_01_on(stage: Stage) -> None:
    """Instances of a scale set drain on this."""
    is_shown_since(TERMINATE_SINCE, shown_in(stage, made(stage, "delete")))


@check(MUST, "PROTOCOL 1.1: Terminate needs 2019-01-01 (TERM)", Need.CONTROL)
def terminate_is_hidden_before_2019_01_01(stage: Stage) -> None:
    """The documents promise that it is not returned to older clients."""
    is_hidden_before(TERMINATE_SINCE, shown_in(stage, made(stage, "delete")))
