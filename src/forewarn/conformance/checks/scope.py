"""Who sees what: the VMs of a scope share one document, and nobody else reads it."""

from forewarn.conformance.check import Level, Need, check, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.session import Stage

MUST, SHOULD = Level.MUST, Level.SHOULD
NOBODY = "no-such-vm-as-this"


def names_itself(stage: Stage, vm: str) -> None:
    same(
        "its own name as text to be",
        stage.instance("/compute/name", query="format=text", vm=vm).body,
        vm.encode(),
    )


@check(SHOULD, "PROTOCOL 10: 403 for a caller that is no VM", Need.NAME)
def scope_of_nobody_is_403(stage: Stage) -> None:
    """A machine that is not of the fleet must learn that it was not recognised, not that all is
    quiet.
    """
    status(stage.get(vm=NOBODY), 403)


@check(MUST, "PROTOCOL 2.4 and 8.1", Need.NAME)
def scope_member_reads_its_own_name(stage: Stage) -> None:
    """Clients find out from the instance tree whether an event is about themselves."""
    for vm in stage.names:
        names_itself(stage, vm)


@check(MUST, "PROTOCOL 6.5", Need.PEER)
def scope_is_told_the_same(stage: Stage) -> None:
    """A leader approves for the others, so all must see the same events under the same number."""
    event_id = stage.make("restart")
    mine, peers = stage.until_shown(event_id), stage.document(vm=stage.find_other(is_peer=True))
    same("a second VM of the scope to read", peers.answer.body, mine.answer.body)


@check(MUST, "PROTOCOL 6.5", Need.STRANGER)
def scope_is_not_told_of_others(stage: Stage) -> None:
    """Another scope's events are none of a VM's business."""
    event_id = stage.make("restart")
    stage.until_shown(event_id)
    theirs = stage.document(vm=stage.find_other(is_peer=False))
    holds(theirs.find(event_id) is None, f"no event {event_id} in another scope's document", theirs)


@check(MUST, "PROTOCOL 2.6: a counter per scope", Need.STRANGER)
def scope_is_not_counted_with_others(stage: Stage) -> None:
    """A number that moves without a change sends every client of the fleet to work."""
    stranger = stage.find_other(is_peer=False)
    before = stage.document(vm=stranger)
    stage.until_shown(stage.make("restart"))
    after = stage.document(vm=stranger)
    holds(
        before.number == after.number or before.events != after.events,
        f"DocumentIncarnation {before.number} again",
        after,
    )
