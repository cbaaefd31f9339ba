"""What must always hold of a scope, whoever does what. The property tests and the simulation both check against this list."""

from datetime import datetime

from forewarn.core import command as ask
from forewarn.core.event import Cause, Event, Source, Status
from forewarn.core.fleet import Approval, AutoApprove, Power, Scope
from forewarn.core.machine import domains_under_impact, is_held, is_ready
from forewarn.wire.document import body
from forewarn.wire.versions import VERSIONS


class Broken(AssertionError):
    """A rule that does not hold."""


def must(holds: object, rule: str, *facts: object) -> None:
    if not holds:
        raise Broken(f"{rule}: {facts}")


def pages(scope: Scope) -> tuple[bytes, ...]:
    return tuple(body(scope, version) for version in VERSIONS)


def without_incarnation(page: bytes) -> bytes:
    return page.split(b",", 1)[1]


def check_step(before: Scope, after: Scope, now: datetime) -> None:
    """The rules about one step from one committed scope to the next."""
    _check_starts(before, after, now)
    old = {event.id: event for event in before.events}
    for event in after.events:
        if event.id in old:
            was = old[event.id]
            must(not (was.status is Status.STARTED and event.status is Status.SCHEDULED), "statuses only move on", was, event)
            must(was.not_before == event.not_before, "NotBefore never moves", was, event)
            must(set(event.resources) <= set(was.resources), "Resources only shrink", was, event)
            must(set(was.approvals) <= set(event.approvals), "no approval is taken back", was, event)
            must(was.is_approved <= event.is_approved, "consent stands", was, event)
            must(not event.is_approved or was.is_approved or has_consent(after, event), "consent is as the policy asks", event)
        else:
            must(event.id not in {ended.id for ended in before.ended}, "what ended stays ended", event)
    has_changed = [without_incarnation(page) for page in pages(before)] != [without_incarnation(page) for page in pages(after)]
    must(
        after.incarnation == before.incarnation + has_changed,
        "the incarnation counts visible changes and nothing else",
        before.incarnation,
        after.incarnation,
        has_changed,
    )
    if before.incarnation == after.incarnation:
        must(pages(before) == pages(after), "same incarnation, same bytes")


def _check_starts(before: Scope, after: Scope, now: datetime) -> None:
    old = {event.id: event for event in before.events}
    for event in after.events:
        was = old.get(event.id)
        if event.status is not Status.STARTED or (was is not None and was.status is Status.STARTED):
            continue
        had_consent = was is not None and was.is_approved
        may = event.cause is Cause.FAILED or event.not_before <= now or had_consent or has_consent(after, event)
        must(may, "nothing starts before NotBefore without consent", event, now)


def has_consent(scope: Scope, event: Event) -> bool:
    """Written apart from the machine on purpose: the policy's words, one by one."""
    policy = scope.policy
    if "operator" in event.approvals or "policy" in event.approvals:
        return True
    running = [vm.name for vm in scope.vms if vm.power is Power.RUNNING]
    if not running:
        return AutoApprove.ALL_INSTANCES_DOWN in policy.auto_approve or bool(event.approvals)
    agreed = [name for name in running if name in event.approvals]
    return {
        Approval.ANY: bool(event.approvals),
        Approval.QUORUM: len(agreed) > len(running) / 2,
        Approval.ALL: len(agreed) == len(running),
    }[policy.approval]


def check_state(scope: Scope, now: datetime) -> None:
    """The rules about a scope as it stands."""
    must(scope.incarnation >= 1, "the incarnation is never 0")
    domains = {vm.name: vm.update_domain for vm in scope.vms}
    for event in scope.events:
        must(event.resources, "an event concerns somebody", event)
        must(set(event.resources) <= domains.keys(), "Resources are members", event, domains)
        must(len({domains[name] for name in event.resources}) == 1, "one update domain per event", event, domains)
        must(event.id == event.id.upper(), "ids are upper case", event)
        must(event.not_before.microsecond == 0 or event.cause is Cause.FAILED, "NotBefore is a whole second", event)
        impacts = [impact for impact in scope.impacts if impact.event_id == event.id]
        wanted = set(event.resources) if event.status is Status.STARTED else set()
        must({impact.vm for impact in impacts} == wanted, "an impact for each resource of what is Started", event, impacts)
        is_open = any(not impact.is_over for impact in impacts)
        must(event.status is Status.SCHEDULED or is_open, "an event ends with its last impact", event)
    left = [event for event in scope.events if is_ready(scope, event, now) and not is_held(event, domains_under_impact(scope))]
    must(not left, "nothing is left that is due and may start", left)
    must(len({event.id for event in scope.events}) == len(scope.events), "ids are unique")
    must(len(scope.ended) <= 100, "memory of what ended is limited")


def check_domains(before: Scope, after: Scope) -> None:
    """A platform event (failed hardware aside) starts only where no other update domain is under impact."""
    old = {event.id for event in before.events if event.status is Status.STARTED}
    started = [event for event in after.events if event.status is Status.STARTED and event.id not in old]
    for event in started:
        if event.source is Source.PLATFORM and event.cause is not Cause.FAILED:
            others = [
                other
                for other in after.events
                if other.status is Status.STARTED
                and other.update_domain != event.update_domain
                # a user's own operation may start in the very same step, after it
                and not (other.source is Source.USER and other.id not in old)
            ]
            must(not others, "one update domain per platform impact", event, others)


def keeps_members_events(before: Scope, command: ask.Command, after: Scope) -> None:
    """A change of members loses no event of a VM that stays where and as it was."""
    if not isinstance(command, ask.Enrol):
        return
    old = {vm.name: (vm.host, vm.power) for vm in before.vms}
    stayed = {vm.name for vm in after.vms if old.get(vm.name) == (vm.host, vm.power)}
    left = {event.id for event in after.events}
    for event in before.events:
        must(event.id in left or not stayed.intersection(event.resources), "who stays keeps its events", event, stayed)
