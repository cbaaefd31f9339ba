"""`forewarn scope`, `vm`, `host` and `event`: what an operator lists, looks at and acts on."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import typer

from forewarn.cli.api import ControlClient, api_command, complete_names
from forewarn.cli.lookup import find_campaign, find_event
from forewarn.cli.options import Limit
from forewarn.cli.output import show_events, show_list, show_one, show_warnings
from forewarn.cli.times import FUTURE, parse_time

Items = Sequence[Mapping[str, Any]]
EventType = Literal["Freeze", "Reboot", "Redeploy"]
EventCause = Literal["maintenance", "infrastructure", "live-migration"]

# fmt: off
NotBefore = Annotated[str | None, typer.Option(metavar="TIME", help=(
    f"The earliest start, such as {FUTURE}. It can give more notice, not less."))]
Vm = Annotated[str, typer.Argument(metavar="VM", autocompletion=complete_names("vms"))]
Host = Annotated[str, typer.Argument(metavar="HOST", autocompletion=complete_names("hosts"))]
OnHost = Annotated[str | None, typer.Option("--host", autocompletion=complete_names("hosts"),
    help="Only those on this host.")]
InScope = Annotated[str | None, typer.Option("--scope", autocompletion=complete_names("scopes"),
    help="Only those in this scope.")]
Type = Annotated[EventType, typer.Option("--type", case_sensitive=False, metavar="TYPE",
    help="What happens to the VMs: Freeze, Reboot or Redeploy.")]
Cause = Annotated[EventCause | None, typer.Option(case_sensitive=False, metavar="CAUSE",
    help="Why: maintenance, infrastructure or live-migration.")]
Duration = Annotated[int | None, typer.Option(min=-1, max=86_400,
    help="How long VMs are affected, in seconds; -1 if unknown.")]
AllowUnreachable = Annotated[bool, typer.Option("--allow-unreachable", help=(
    "Announce it also where the daemon of a host is away; impacts wait for the daemon."))]
Description = Annotated[str | None, typer.Option(
    help="The text that VMs read, instead of one made from the cause.")]
FailImpacts = Annotated[bool, typer.Option(
    "--fail-impacts", help="Record impacts that wait for it as failed.")]
Fenced = Annotated[bool, typer.Option(
    "--fenced", help="VMs there are off, and stay off: they may be started on other hosts.")]
StillRunning = Annotated[bool, typer.Option(
    "--still-running", help="Only the daemon goes: its VMs stay there, and run or not.")]
EventId = Annotated[str, typer.Argument(metavar="EVENT", autocompletion=complete_names("events"),
    help="The event's id, or the start of it.")]
ApprovingVm = Annotated[str | None, typer.Option(autocompletion=complete_names("vms"),
    help="Approve on behalf of this VM; the scope's policy decides whether that is enough.")]
NewNotBefore = Annotated[str, typer.Option(metavar="TIME",
    help=f"The new earliest start, from now, such as {FUTURE}.")]
# fmt: on
FIND = {"events": find_event, "campaigns": find_campaign}
ALIASES = {"restart": "reboot", "evict": "preempt", "delete": "terminate"}
"""What the wire calls the operations."""


def arrange_events(events: Items) -> Items:
    """By time. A Started event has no NotBefore, as in the document that VMs read."""
    return [
        event if event["status"] == "Scheduled" else {**event, "not_before": None}
        for event in sorted(events, key=lambda event: str(event["not_before"]))
    ]


def mark_waiting(items: Items) -> Items:
    """For a list: the events that do not start at their NotBefore. `show` has the reason."""

    def mark(event: Mapping[str, Any]) -> str:
        is_unreadable = event.get("unreadable_since") is not None
        return " (unreadable)" if is_unreadable else " (waiting)" if event.get("waits_for") else ""

    return [{**event, "status": event["status"] + mark(event)} for event in arrange_events(items)]


def name_problems(items: Items) -> Items:
    """The codes of what is wrong; `show` has the messages."""
    return [{**item, "problems": [each["code"] for each in item["problems"]]} for item in items]


def explain_problems(items: Items) -> Items:
    """Each has commas of its own."""
    return [
        {**item, "problems": "; ".join(each["message"] for each in item["problems"])}
        for item in items
    ]


def explain_problems_of_hosts(items: Items) -> Items:
    """For a list. Each with its code, unless that is the state of the host."""
    return [
        {
            **item,
            "problems": "; ".join(
                each["message"]
                if each["code"] == item["state"]
                else f"{each['code']}: {each['message']}"
                for each in item["problems"]
            ),
        }
        for item in items
    ]


def explain_host(items: Items) -> Items:
    """The same for the reasons of unmovable VMs."""
    return [
        {**item, "unmovable": "; ".join(f"{vm['vm']}: {vm['why']}" for vm in item["unmovable"])}
        for item in explain_problems(items)
    ]


ARRANGE_LIST = {
    "events": mark_waiting,
    "vms": name_problems,
    "hosts": explain_problems_of_hosts,
}
ARRANGE_ONE = {"events": arrange_events, "vms": explain_problems, "hosts": explain_host}


def resource(name: str, help_: str, columns: Sequence[str], example: str) -> typer.Typer:
    """The commands of a resource, starting with `list` and `show`.

    The columns are in the order of their importance.
    """
    app = typer.Typer(help=help_, no_args_is_help=True)
    kind, noun = f"{name}s", name.replace("vm", "VM")
    arrange, arrange_one = ARRANGE_LIST.get(kind, list), ARRANGE_ONE.get(kind, list)

    help_ = f"List all {noun}s, one per line.\n\nExample: forewarn {name} list --json"

    def show_all(response: Any) -> None:
        show_list({**response, kind: arrange(response[kind])}, kind, columns)

    def list_all(client: ControlClient, *, limit: Limit = 1000) -> Any:
        return client.list(kind, limit)

    def list_some(
        client: ControlClient, *, host: OnHost = None, scope: InScope = None, limit: Limit = 1000
    ) -> Any:
        return client.list(kind, limit, {"host": host, "scope": scope})

    has_filters = kind in ("vms", "events")
    api_command(app, show_all, name="list", help_=help_)(list_some if has_filters else list_all)

    argument = typer.Argument(metavar=name.upper(), autocompletion=complete_names(kind))
    help_ = f"Show one {noun} in full.\n\nExample: forewarn {name} show {example}"

    @api_command(app, lambda item: show_one(arrange_one([item])[0]), help_=help_)
    def show(client: ControlClient, which: Annotated[str, argument]) -> Any:
        return client.get(kind, FIND[kind](client, which) if kind in FIND else which)

    return app


scope = resource(
    "scope",
    "Scopes, the groups of VMs that share one document: list, show.",
    ("name", "kind", "is_enabled", "seen_at", "events", "vms", "incarnation"),
    "web",
)
vm = resource(
    "vm",
    "VMs: list, show, restart, redeploy, evict, delete.",
    ("name", "power", "problems", "scope", "host", "seen_at", "events", "update_domain", "address"),
    "web-0",
)
host = resource(
    "host",
    "Hosts: list, show, maintain, degrade, fail, forget.",
    ("name", "state", "problems", "events", "vms", "scopes"),
    "host-a",
)
event = resource(
    "event",
    "Events that VMs see: list, show, approve, cancel, extend, complete.",
    ("id", "type", "status", "not_before", "resources", "scope", "source", "cause"),
    "1B2C3D4E",
)


def _show_host_operation(response: Any) -> None:
    show_events(response, "no event: the fleet has no VMs on the host, or they are deallocated")
    show_warnings(response)


def _add_vm_operation(verb: str, help_: str, example: str) -> None:
    help_ = f"{help_}\n\nExample: forewarn vm {verb} {example}"

    def operate(client: ControlClient, vm: Vm, *, not_before: NotBefore = None) -> Any:
        time = parse_time("--not-before", not_before, client.now)
        return client.post("vms", vm, verb, body={"not_before": time})

    show = partial(show_events, done=f"{verb.removesuffix('e')}ed")
    for name in (verb, ALIASES.get(verb, verb)):
        api_command(vm, show, name=name, help_=help_)(operate)
        vm.registered_commands[-1].hidden = name != verb


_add_vm_operation("restart", "Restart a VM on its host, after notice.", "web-0 --not-before +1h")
_add_vm_operation("redeploy", "Move a VM to another host, after notice.", "web-0")
_add_vm_operation("evict", "Evict a spot VM, after notice.", "workers_0")
_add_vm_operation("delete", "Delete a VM, after notice. It is removed from the fleet.", "workers_0")


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
    allow_unreachable: AllowUnreachable = False,
) -> Any:
    """Schedule maintenance for every VM on a host: one event per scope and update domain.

    Example: forewarn host maintain host-a --type Reboot --not-before +2h
    """
    body = {
        "type": event_type,
        "cause": cause,
        "duration_seconds": duration_seconds,
        "not_before": parse_time("--not-before", not_before, client.now),
        "description": description,
        "allow_unreachable": allow_unreachable or None,
    }
    return client.post("hosts", host, "maintain", body=body)


@api_command(host, _show_host_operation)
def degrade(client: ControlClient, host: Host, *, not_before: NotBefore = None) -> Any:
    """Announce to every VM on a host that its hardware is expected to fail.

    Example: forewarn host degrade host-a
    """
    not_before = parse_time("--not-before", not_before, client.now)
    return client.post("hosts", host, "degrade", body={"not_before": not_before})


@api_command(host, _show_host_operation)
def fail(client: ControlClient, host: Host) -> Any:
    """Report that the hardware has failed: every VM on the host moves now, without notice.

    Example: forewarn host fail host-a
    """
    return client.post("hosts", host, "fail")


@api_command(host, lambda response: print(f"the daemon of {response['host']} is forgotten"))
def forget(
    client: ControlClient,
    host: Host,
    *,
    fenced: Fenced = False,
    still_running: StillRunning = False,
    fail_impacts: FailImpacts = False,
) -> Any:
    """Remove the daemon of a host that does not come back. Its VMs stay in the fleet.

    Say whether the VMs there are off or may still run. A host that was forgotten can be forgotten
    again with the other option.

    Example: forewarn host forget host-a --fenced
    """
    chosen = {"fenced": fenced, "still_running": still_running, "fail_impacts": fail_impacts}
    query = {name: "true" for name, is_set in chosen.items() if is_set}
    return client.delete("hosts", host, "daemon", query=query or None)


@api_command(event, show_events)
def approve(client: ControlClient, event: EventId, *, vm: ApprovingVm = None) -> Any:
    """Let a Scheduled event start before its NotBefore.

    Example: forewarn event approve 1B2C3D4E --vm web-0
    """
    return client.post("events", find_event(client, event), "approve", body={"vm": vm})


@api_command(event, lambda response: show_events(response, result="canceled"))
def cancel(client: ControlClient, event: EventId) -> Any:
    """Cancel a Scheduled event.

    Example: forewarn event cancel 1B2C3D4E
    """
    return client.post("events", find_event(client, event), "cancel")


@api_command(event, show_events)
def extend(client: ControlClient, event: EventId, *, not_before: NewNotBefore) -> Any:
    """Postpone a Scheduled event: more notice, never less.

    Example: forewarn event extend 1B2C3D4E --not-before +1h
    """
    body = {"not_before": parse_time("--not-before", not_before, client.now)}
    return client.post("events", find_event(client, event), "extend", body=body)


@api_command(event, lambda response: show_events(response, result="completed"))
def complete(client: ControlClient, event: EventId) -> Any:
    """Report that a Started event is finished.

    Example: forewarn event complete 1B2C3D4E
    """
    return client.post("events", find_event(client, event), "complete")
