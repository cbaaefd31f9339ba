"""The members of a scope. A VM that stays keeps its events; one that leaves affects no others."""

from msgspec.structs import replace

from forewarn.core.change import Change, ChangeKind
from forewarn.core.command import Retire, SetMembers, SetPower, UpdateMembers
from forewarn.core.draft import Draft
from forewarn.core.event import is_move
from forewarn.core.fleet import Policy, Power, Scope, ScopeKind, Vm
from forewarn.errors import Invalid, ScopeBusy, VmBusy


def set_members(draft: Draft, command: SetMembers) -> None:
    scope = draft.scope
    before = {vm.name: vm for vm in scope.vms}
    vms = tuple(merge_vm(before.get(vm.name), vm, is_file=command.is_file) for vm in command.vms)
    names = {vm.name for vm in vms}
    if len(names) != len(vms):
        raise Invalid(f"duplicate VM in scope {scope.name}", scope=scope.name)
    if scope.events and scope.kind is not command.kind:
        event_id = scope.events[0].id
        raise ScopeBusy(
            f"{scope.name} cannot become a {command.kind} while {event_id} is pending;"
            " cancel or complete it first",
            scope=scope.name,
            event=event_id,
        )
    for vm in vms:
        refuse_new_domain(scope, before.get(vm.name), vm)
    if (scope.kind, scope.policy, scope.vms) != (command.kind, command.policy, vms):
        draft.scope = replace(draft.scope, is_reported=False)
    change_members(draft, command.kind, command.policy, vms)


def change_members(draft: Draft, kind: ScopeKind, policy: Policy, vms: tuple[Vm, ...]) -> None:
    scope, names = draft.scope, {vm.name for vm in vms}
    before = {vm.name: vm for vm in scope.vms}
    for vm in scope.vms:
        if vm.name not in names:
            draft.leave(vm)
    if before and (scope.kind, scope.policy) != (kind, policy):
        draft.changes.append(Change(ChangeKind.UPDATED))
    draft.set_members(kind, policy, vms)
    for vm in vms:
        compare_vm(draft, before.get(vm.name), vm)


def update_members(draft: Draft, command: UpdateMembers) -> None:
    """A VM under impact stays as it is, because the result says where it is and whether it runs.

    If it was found on another host while its impact waits, it is there; an impact that was to
    move it is done.
    """
    scope, vms = draft.build(), dict(draft.vms)
    under_impact = {impact.vm for impact in scope.impacts if not impact.is_over}
    held = {impact.vm for impact in scope.impacts if impact.is_held}
    busy = held | (under_impact - command.found)
    for host, vm in command.vms:
        old = vms.get(vm.name)
        if vm.name not in busy and (old is None or old.host == host):
            vms[vm.name] = merge_reported(scope, old, vm)
            if runs_on(vm, command.host):
                draft.forget_tries(vm.name)  # it came back, or has moved there
    for name in command.gone:
        if name not in under_impact and name in vms and vms[name].host == command.host:
            del vms[name]
    for name in command.left:
        vms.pop(name, None)
    change_members(draft, command.kind, scope.policy, tuple(vms.values()))
    for impact in scope.impacts:
        is_done = is_move(impact.type, impact.cause) and not impact.is_over
        if is_done and impact.vm in command.found - held:
            draft.finish(impact, command.host, f"found running on {command.host}")
            draft.forget_tries(impact.vm)


def set_power(draft: Draft, command: SetPower) -> None:
    scope = draft.scope
    vms = tuple(
        replace(vm, power=command.power)
        if vm.host == command.host and vm.power is not Power.DEALLOCATED
        else vm
        for vm in scope.vms
    )
    if vms != scope.vms:
        change_members(draft, scope.kind, scope.policy, vms)


def merge_reported(scope: Scope, old: Vm | None, vm: Vm) -> Vm:
    """The VM as its host reports it. One that was deallocated stays that until it runs again.

    Its update domain is fixed while it has an event.
    """
    if old is None:
        return vm
    power = old.power if vm.power is Power.STOPPED and old.power is Power.DEALLOCATED else vm.power
    is_fixed = any(old.name in event.resources for event in scope.events)
    domain = old.update_domain if is_fixed else vm.update_domain
    return replace(vm, power=power, update_domain=domain)


def runs_on(vm: Vm, host: str) -> bool:
    return vm.host == host and vm.power is Power.RUNNING


def compare_vm(draft: Draft, old: Vm | None, vm: Vm) -> None:
    """Record what is new about a member."""
    if old is None:
        draft.changes.append(Change(ChangeKind.JOINED, vm=vm.name, host=vm.host))
    elif old.host != vm.host:
        draft.move(old, vm.host)
    elif old != vm:
        detail = "" if old.power is vm.power else f"{old.power} to {vm.power}"
        draft.changes.append(Change(ChangeKind.UPDATED, vm=vm.name, host=vm.host, detail=detail))


def merge_vm(old: Vm | None, vm: Vm, *, is_file: bool) -> Vm:
    """The VM as defined, with the power and often the host that it has.

    A fleet file may be older than the VM's last move, so it never moves a VM. Without a host in the
    definition, the VM stays where it is, too.
    """
    if old is None:
        return vm
    host = (old.host if is_file else "") or vm.host or old.host
    is_address_taken = old.is_address_taken and vm.address == old.address
    return replace(
        vm,
        power=old.power,
        host=host,
        declared_host=old.declared_host,
        is_address_taken=is_address_taken,
    )


def refuse_new_domain(scope: Scope, old: Vm | None, new: Vm) -> None:
    """The VMs of an event share one update domain, so it is fixed while an event is pending."""
    if old is None or old.update_domain == new.update_domain:
        return
    pending = [event.id for event in scope.events if new.name in event.resources]
    pending += [impact.event_id for impact in scope.impacts if impact.vm == new.name]
    if pending:
        raise VmBusy(
            f"{new.name} cannot change its update domain while {pending[0]} is pending;"
            " cancel or complete it first",
            vm=new.name,
            event=pending[0],
        )


def retire(draft: Draft, command: Retire) -> None:
    for vm in draft.scope.vms:
        draft.leave(vm)
    draft.changes.append(Change(ChangeKind.RETIRED))
    draft.is_gone = True
