"""`forewarn scope`, `vm`, `host` and `event`: what an operator lists, looks at and acts on."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forewarn.cli.api import ControlClient, api_command
from forewarn.cli.options import Limit
from forewarn.cli.output import show_events, show_list, show_one

# fmt: off
NotBefore = Annotated[str | None, typer.Option(
    help="The earliest start, such as 2030-01-31T12:00:00Z. It can give more notice, not less.")]
Vm = Annotated[str, typer.Argument(metavar="VM")]
Host = Annotated[str, typer.Argument(metavar="HOST")]
Type = Annotated[str, typer.Option("--type", help="Freeze, Reboot or Redeploy.", metavar="TYPE")]
Cause = Annotated[str | None, typer.Option(help="maintenance, infrastructure or live-migration.")]
Duration = Annotated[int | None, typer.Option(
    help="How long VMs are affected, in seconds; -1 if unknown.")]
Description = Annotated[str | None, typer.Option(
    help="The text that VMs read, instead of one made from the cause.")]
FailImpacts = Annotated[bool, typer.Option(
    "--fail-impacts", help="Record impacts that wait for it as failed.")]
EventId = Annotated[str, typer.Argument(metavar="EVENT", help="The event's id, in any case.")]
ApprovingVm = Annotated[str | None, typer.Option(
    help="Approve on behalf of this VM; the scope's policy decides whether that is enough.")]
NewNotBefore = Annotated[str, typer.Option(
    help="The new earliest start, such as 2030-01-31T12:00:00Z.")]
# fmt: on


def resource(name: str, help_: str, columns: Sequence[str]) -> typer.Typer:
    """The commands of a resource, starting with `list` and `show`."""
    app = typer.Typer(help=help_, no_args_is_help=True)
    kind = f"{name}s"

    @api_command(
        app,
        lambda response: show_list(response, kind, columns),
        name="list",
        help_=f"List all {kind}, one per line.",
    )
    def list_all(client: ControlClient, *, limit: Limit = 1000) -> Any:
        return client.list(kind, limit)

    @api_command(app, show_one, help_=f"Show one {name} in full.")
    def show(
        client: ControlClient, which: Annotated[str, typer.Argument(metavar=name.upper())]
    ) -> Any:
        return client.get(kind, which)

    return app


scope = resource(
    "scope",
    "Scopes, the groups of VMs that share one document: list, show.",
    ("name", "kind", "vms", "events", "incarnation", "is_enabled", "seen_at"),
)
vm = resource(
    "vm",
    "VMs: list, show, restart, redeploy, evict, delete.",
    ("name", "scope", "host", "update_domain", "power", "address", "seen", "events"),
)
host = resource(
    "host",
    "Hosts: list, show, maintain, degrade, fail, forget.",
    ("name", "state", "vms", "scopes", "events"),
)
event = resource(
    "event",
    "Events that VMs see: list, show, approve, cancel, extend, complete.",
    ("id", "type", "status", "scope", "resources", "not_before", "source", "cause"),
)


def _show_vm_operation(response: Any) -> None:
    show_events(
        response, "no event: it runs now, because no VM of the scope polls or no notice is needed"
    )


def _show_host_operation(response: Any) -> None:
    show_events(response, "no event: the host has no VM that is affected")


def _add_vm_operation(verb: str, help_: str) -> None:
    @api_command(vm, _show_vm_operation, name=verb, help_=help_)
    def operate(client: ControlClient, vm: Vm, *, not_before: NotBefore = None) -> Any:
        return client.post("vms", vm, verb, body={"not_before": not_before})


_add_vm_operation("restart", "Restart a VM on its host, after notice.")
_add_vm_operation("redeploy", "Move a VM to another host, after notice.")
_add_vm_operation("evict", "Evict a spot VM, after notice.")
_add_vm_operation("delete", "Delete a VM, after notice. It is removed from the fleet.")


@api_command(host, _show_host_operation)
def maintain(
    client: ControlClient,
    host: Host,
    *,
    event_type: Type,
    cause: Cause = None,
    duration_seconds: Duration = None,
    not_before: NotBefore = None,
    description: Description = None,
) -> Any:
    """Schedule maintenance for every VM on a host: one event per scope and update domain."""
    body = {
        "type": event_type,
        "cause": cause,
        "duration_seconds": duration_seconds,
        "not_before": not_before,
        "description": description,
    }
    return client.post("hosts", host, "maintain", body=body)


@api_command(host, _show_host_operation)
def degrade(client: ControlClient, host: Host, *, not_before: NotBefore = None) -> Any:
    """Announce to every VM on a host that its hardware is expected to fail."""
    return client.post("hosts", host, "degrade", body={"not_before": not_before})


@api_command(host, _show_host_operation)
def fail(client: ControlClient, host: Host) -> Any:
    """Report that the hardware has failed: every VM on the host moves now, without notice."""
    return client.post("hosts", host, "fail")


@api_command(host, lambda response: print(f"the daemon of {response['host']} is forgotten"))
def forget(client: ControlClient, host: Host, *, fail_impacts: FailImpacts = False) -> Any:
    """Remove the daemon of a host that is gone for good. Its VMs stay in the fleet."""
    query = {"fail_impacts": "true"} if fail_impacts else None
    return client.delete("hosts", host, "daemon", query=query)


@api_command(event, show_events)
def approve(client: ControlClient, event: EventId, *, vm: ApprovingVm = None) -> Any:
    """Let a Scheduled event start before its NotBefore."""
    return client.post("events", event, "approve", body={"vm": vm})


@api_command(event, lambda response: show_events(response, result="canceled"))
def cancel(client: ControlClient, event: EventId) -> Any:
    """Cancel a Scheduled event."""
    return client.post("events", event, "cancel")


@api_command(event, show_events)
def extend(client: ControlClient, event: EventId, *, not_before: NewNotBefore) -> Any:
    """Postpone a Scheduled event: more notice, never less."""
    return client.post("events", event, "extend", body={"not_before": not_before})


@api_command(event, lambda response: show_events(response, result="completed"))
def complete(client: ControlClient, event: EventId) -> Any:
    """Report that a Started event is finished."""
    return client.post("events", event, "complete")
