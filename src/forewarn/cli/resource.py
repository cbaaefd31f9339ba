"""`forewarn scope`, `vm`, `host` and `event`: what an operator lists, looks at and acts on."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from forewarn.cli.api import connect
from forewarn.cli.options import Json, Limit
from forewarn.cli.output import show_events, show_json, show_list, show_one

NotBefore = Annotated[
    str | None,
    typer.Option(
        help="The earliest start, such as 2030-01-31T12:00:00Z. It can give more notice, not less."
    ),
]
Vm = Annotated[str, typer.Argument(metavar="VM")]
Host = Annotated[str, typer.Argument(metavar="HOST")]
Type = Annotated[str, typer.Option("--type", help="Freeze, Reboot or Redeploy.", metavar="TYPE")]
Cause = Annotated[str | None, typer.Option(help="maintenance, infrastructure or live-migration.")]
Duration = Annotated[
    int | None, typer.Option(help="How long VMs are affected, in seconds; -1 if unknown.")
]
Description = Annotated[
    str | None, typer.Option(help="The text that VMs read, instead of one made from the cause.")
]
EventId = Annotated[str, typer.Argument(metavar="EVENT", help="The event's id, in any case.")]
ApprovingVm = Annotated[
    str | None,
    typer.Option(
        help="Approve on behalf of this VM; the scope's policy decides whether that is enough."
    ),
]
NewNotBefore = Annotated[
    str, typer.Option(help="The new earliest start, such as 2030-01-31T12:00:00Z.")
]


def resource(name: str, help_: str, columns: Sequence[str]) -> typer.Typer:
    """The commands of a resource, starting with `list` and `show`."""
    app = typer.Typer(help=help_, no_args_is_help=True)
    kind = f"{name}s"

    @app.command("list", help=f"List all {kind}, one per line.")
    def list_all(context: typer.Context, *, limit: Limit = 1000, as_json: Json = False) -> None:
        response = connect(context).list(kind, limit)
        if as_json:
            show_json(response)
        else:
            show_list(response, kind, columns)

    @app.command("show", help=f"Show one {name} in full.")
    def show(
        context: typer.Context,
        which: Annotated[str, typer.Argument(metavar=name.upper())],
        *,
        as_json: Json = False,
    ) -> None:
        show_one(connect(context).get(kind, which), as_json=as_json)

    return app


scope = resource(
    "scope",
    "Scopes, the groups of VMs that share one document: list, show.",
    ("name", "kind", "vms", "events", "incarnation", "is_enabled", "seen_at"),
)
vm = resource(
    "vm",
    "VMs: list, show, restart, redeploy, evict, delete.",
    ("name", "scope", "host", "update_domain", "power", "address", "events"),
)
host = resource(
    "host", "Hosts: list, show, maintain, degrade, fail.", ("name", "vms", "scopes", "events")
)
event = resource(
    "event",
    "Events that VMs see: list, show, approve, cancel, extend, complete.",
    ("id", "type", "status", "scope", "resources", "not_before", "source", "cause"),
)


def _add_vm_operation(verb: str, help_: str) -> None:
    @vm.command(verb, help=help_)
    def operate(
        context: typer.Context, vm: Vm, *, not_before: NotBefore = None, as_json: Json = False
    ) -> None:
        response = connect(context).post("vms", vm, verb, body={"not_before": not_before})
        show_events(
            response,
            f"{verb} of {vm} runs now, without notice: no VM of the scope polls, or none is wanted",
            as_json=as_json,
        )


_add_vm_operation("restart", "Restart a VM on its host, after notice.")
_add_vm_operation("redeploy", "Move a VM to another host, after notice.")
_add_vm_operation("evict", "Evict a spot VM, after notice.")
_add_vm_operation("delete", "Delete a VM, after notice. It is removed from the fleet.")


@host.command()
def maintain(
    context: typer.Context,
    host: Host,
    *,
    event_type: Type,
    cause: Cause = None,
    duration_seconds: Duration = None,
    not_before: NotBefore = None,
    description: Description = None,
    as_json: Json = False,
) -> None:
    """Schedule maintenance for every VM on a host: one event per scope and update domain."""
    body = {
        "type": event_type,
        "cause": cause,
        "duration_seconds": duration_seconds,
        "not_before": not_before,
        "description": description,
    }
    _act_on_host(context, host, "maintain", body, as_json=as_json)


@host.command()
def degrade(
    context: typer.Context, host: Host, *, not_before: NotBefore = None, as_json: Json = False
) -> None:
    """Announce to every VM on a host that its hardware is expected to fail."""
    _act_on_host(context, host, "degrade", {"not_before": not_before}, as_json=as_json)


@host.command()
def fail(context: typer.Context, host: Host, *, as_json: Json = False) -> None:
    """Report that the hardware has failed: every VM on the host moves now, without notice."""
    _act_on_host(context, host, "fail", {}, as_json=as_json)


def _act_on_host(
    context: typer.Context, host: str, verb: str, body: Mapping[str, object], *, as_json: bool
) -> None:
    response = connect(context).post("hosts", host, verb, body=body)
    show_events(response, f"{verb} of {host} affects no VM: no event was created", as_json=as_json)


@event.command()
def approve(
    context: typer.Context, event: EventId, *, vm: ApprovingVm = None, as_json: Json = False
) -> None:
    """Let a Scheduled event start before its NotBefore."""
    response = connect(context).post("events", event, "approve", body={"vm": vm})
    show_events(response, as_json=as_json)


@event.command()
def cancel(context: typer.Context, event: EventId, *, as_json: Json = False) -> None:
    """Cancel a Scheduled event."""
    response = connect(context).post("events", event, "cancel")
    show_events(response, result="canceled", as_json=as_json)


@event.command()
def extend(
    context: typer.Context, event: EventId, *, not_before: NewNotBefore, as_json: Json = False
) -> None:
    """Postpone a Scheduled event: more notice, never less."""
    response = connect(context).post("events", event, "extend", body={"not_before": not_before})
    show_events(response, as_json=as_json)


@event.command()
def complete(context: typer.Context, event: EventId, *, as_json: Json = False) -> None:
    """Report that a Started event is finished."""
    response = connect(context).post("events", event, "complete")
    show_events(response, result="completed", as_json=as_json)
