"""`forewarn serve` and `forewarn demo`.

The server's parts are imported when needed: the rest of the CLI does without.
"""

import shutil
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forewarn.cli.exit_codes import Usage, needs_server_parts
from forewarn.cli.watch import SHOWN, sentence
from forewarn.config import Address, ClientConfig, Config, Resolved
from forewarn.errors import Invalid

if TYPE_CHECKING:
    from forewarn.engine.entry import Note
    from forewarn.server import Addresses

POLL = "/metadata/scheduledevents?api-version=2020-07-01"


def serve(found: Resolved[Config]) -> None:
    """Run the service until it is told to stop (SIGTERM or Ctrl-C)."""

    def ready(at: "Addresses") -> None:
        scheme = "https" if found.config.control_certificate_file else "http"
        typer.echo(
            f"forewarn is ready: metadata http://{at.metadata}, control {scheme}://{at.control}"
        )

    _run("serve", found.config, ready, lambda note: None)


def demo(found: Resolved[Config]) -> None:
    """Run a small fleet at a readable pace, and say what to try. Takes the flags of `serve`."""
    _run(
        "demo",
        found.config,
        lambda at: typer.echo(invitation(at.metadata, at.control, found.config.rate)),
        tell,
    )


def invitation(metadata: Address, control: Address, rate: float) -> str:
    """What is running, and three lines that work when pasted into another terminal in the same
    folder.
    """
    poll = f"curl -s -H Metadata:true 'http://{metadata}{POLL}'"
    where = (
        ""
        if f"http://{control}" == ClientConfig.control_url
        else f"FOREWARN_CONTROL=http://{control} "
    )
    return f"""forewarn is ready: metadata http://{metadata}, control http://{control}
A 15-minute notice takes {900 / rate:g} seconds here. In another terminal, from this folder:

1. Be a VM and ask what awaits you (this machine is web-0):
   {poll}
2. Be an operator and restart it, then poll again:
   {where}{program()} vm restart web-0
3. Be the VM and say go ahead:
   {poll} | sed 's/.*\\("EventId":"[^"]*"\\).*/{{"StartRequests":[{{\\1}}]}}/' | {poll} -d @-

What happens is told here; Ctrl-C ends it.
"""


def tell(note: "Note") -> None:
    """A line for a change, as it happens."""
    change = note.change
    if change.what in SHOWN:
        at, event = f"{note.at:%H:%M:%S}", change.event_id
        typer.echo(
            sentence(
                at=at,
                scope=note.scope,
                what=change.what,
                vm=change.vm,
                detail=change.detail,
                event=event,
            )
        )


def program() -> str:
    """This command as a person would type it here."""
    typed = Path(sys.argv[0])
    if shutil.which(typed.name) == str(typed.absolute()):
        return typed.name
    here = typed.absolute()
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


def _run(
    command: str,
    config: Config,
    on_ready: "Callable[[Addresses], None]",
    on_change: "Callable[[Note], None]",
) -> None:
    with needs_server_parts(command):
        from forewarn.server import serve as run

        try:
            run_until_stopped(lambda: run(config, on_ready, on_change))
        # a person has to mend it: the systemd unit does not restart after this exit code
        except Invalid as problem:
            raise Usage(problem.message) from problem


def run_until_stopped(work: "Callable[[], Coroutine[Any, Any, None]]") -> None:
    """Run it in a fast event loop until it ends, or until SIGTERM or Ctrl-C cancels it."""
    import asyncio

    import uvloop

    async def until_stopped() -> None:
        task = asyncio.ensure_future(work())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stopped())
