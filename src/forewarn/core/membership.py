"""Membership: who is in a scope.

A VM that stays keeps its events; one that leaves takes nobody else's with it.
"""

from msgspec.structs import replace

from forewarn.core import command as ask
from forewarn.core.change import ChangeKind
from forewarn.core.draft import Draft
from forewarn.core.fleet import Scope, Vm
from forewarn.errors import (
    Invalid,
    ScopeBusy,
    VmBusy,
)


def enrol(draft: Draft, command: ask.SetMembers) -> None:
    before = {vm.name: vm for vm in draft.scope.vms}
    vms = tuple(_placed(before.get(vm.name), vm, is_file=command.is_file) for vm in command.vms)
    after = {vm.name for vm in vms}
    if len(after) != len(vms):
        raise Invalid(f"a VM stands twice in {draft.scope.name}", scope=draft.scope.name)
    if draft.scope.events and draft.scope.kind is not command.kind:
        raise ScopeBusy(
            f"{draft.scope.name} cannot become a {command.kind} while {draft.scope.events[0].id} is pending;"
            " cancel or complete it first",
            scope=draft.scope.name,
            event=draft.scope.events[0].id,
        )
    for vm in vms:
        refuse_new_domain(draft.scope, before.get(vm.name), vm)
    for name, vm in before.items():
        if name not in after:
            draft.leave(vm)
    if before and (draft.scope.kind, draft.scope.policy) != (command.kind, command.policy):
        draft.tell(ChangeKind.AMENDED)
    draft.scope = replace(draft.scope, kind=command.kind, policy=command.policy, vms=vms)
    for vm in vms:
        welcome(draft, before.get(vm.name), vm)


def welcome(draft: Draft, old: Vm | None, vm: Vm) -> None:
    """Tell what is new about a member, and let go of what no longer concerns it."""
    if old is None:
        draft.tell(ChangeKind.JOINED, vm=vm.name)
    elif old.host != vm.host:
        draft.move(old, vm.host)
    elif old != replace(vm, declared_host=old.declared_host):
        draft.tell(ChangeKind.AMENDED, vm=vm.name)


def _placed(old: Vm | None, vm: Vm, *, is_file: bool) -> Vm:
    """The member as defined, with what the definition does not decide: whether the VM runs and,
    often, where.

    A fleet file may be older than the VM's last move, so its host counts only if the file did not
    name the same one before. A definition without a host leaves the VM where it is.
    """
    if old is None:
        return replace(vm, declared_host=vm.host if is_file else "")
    keeps_host = not vm.host or (is_file and vm.host == old.declared_host)
    return replace(
        vm,
        power=old.power,
        host=old.host if keeps_host else vm.host,
        declared_host=vm.host if is_file else old.declared_host,
    )


def retire(draft: Draft, command: ask.Retire) -> None:
    for vm in draft.scope.vms:
        draft.leave(vm)
    draft.tell(ChangeKind.RETIRED)
    draft.is_gone = True


def refuse_new_domain(scope: Scope, old: Vm | None, new: Vm) -> None:
    """An event's VMs are of one update domain; so a VM keeps its domain while something is pending
    for it.
    """
    if old is None or old.update_domain == new.update_domain:
        return
    pending = [event.id for event in scope.events if new.name in event.resources]
    pending += [impact.event_id for impact in scope.impacts if impact.vm == new.name]
    if pending:
        raise VmBusy(
            f"{new.name} cannot change its update domain while {pending[0]} is pending; cancel or complete it first",
            vm=new.name,
            event=pending[0],
        )
