"""`forewarn vm`: the VMs, and what a user or the platform does to one of them."""

from typing import Annotated

import typer

from forewarn.cli.api import connect
from forewarn.cli.output import Json, show_events
from forewarn.cli.resource import NotBefore, noun

COLUMNS = ("name", "scope", "host", "update_domain", "power", "address", "events")

app = noun("vm", "VMs: list, show, restart, redeploy, evict, delete.", COLUMNS)


def _operation(verb: str, sentence: str) -> None:
    @app.command(verb, help=sentence)
    def operate(
        context: typer.Context,
        vm: Annotated[str, typer.Argument(metavar="VM")],
        *,
        not_before: NotBefore = None,
        as_json: Json = False,
    ) -> None:
        answer = connect(context).post("vms", vm, verb, said={"not_before": not_before})
        show_events(
            answer,
            f"{verb} of {vm} is being done at once, without notice: nobody polls, or none is wanted",
            as_json=as_json,
        )


_operation("restart", "Restart a VM on its host, after notice.")
_operation("redeploy", "Move a VM to another host, after notice.")
_operation("evict", "Take the place of a spot VM back, after notice.")
_operation("delete", "Delete a VM, after notice; it leaves the fleet.")
