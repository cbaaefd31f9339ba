"""`forewarn lab run`, `lab scenarios` and `lab schema`: run software against a scenario."""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forewarn.cli.event_loop import run_until_stopped
from forewarn.cli.exit_codes import Exit, Usage, needs_extra
from forewarn.cli.files import check_writable, read_file, write_file
from forewarn.cli.lookup import did_you_mean
from forewarn.cli.options import Json
from forewarn.cli.output import show_json, show_list
from forewarn.cli.terminal import paint, show_status
from forewarn.errors import Error, Invalid, NotFound, Unavailable

if TYPE_CHECKING:
    from forewarn.lab.scenario.schema import Scenario

SCENARIO_BYTES_MAX = 4 * 1024 * 1024


def _list_names() -> list[str]:
    """For shell completion."""
    with suppress(Error), needs_extra("lab run"):
        from forewarn.lab.scenario.schema import list_library

        return list(list_library())
    return []


# fmt: off
Scenarios = Annotated[str, typer.Argument(metavar="FILE|NAME", autocompletion=_list_names,
    help="A scenario file, or the name of one that comes with Forewarn.")]
Command = Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND...]", show_default=False,
    help="The software under test; {endpoint} in it becomes the endpoint of its VM.")]
RunRate = Annotated[float | None, typer.Option(min=0.001, max=100_000,
    help="Use the real clock, with every time divided by this.")]
RunSeed = Annotated[int | None, typer.Option(min=0,
    help="The seed of ids and random choices, instead of the file's.")]
As = Annotated[list[str] | None, typer.Option("--as",
    help="A VM that the command, or other software, plays; may be repeated.")]
AtAzureAddress = Annotated[bool, typer.Option("--at-azure-address",
    help="Run the command where 169.254.169.254:80 is the lab, without other network (Linux).")]
TranscriptFile = Annotated[Path | None, typer.Option(
    help="Write everything that happened to this file, as JSON lines.")]
HtmlFile = Annotated[Path | None, typer.Option(
    help="Write a report with a timeline to this file, to read in a browser.")]
ToTheEnd = Annotated[bool, typer.Option("--to-the-end",
    help="Run to the end, even if every expectation is decided.")]
JunitFile = Annotated[Path | None, typer.Option(help="Write the results to this file, for CI.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every request too.")]
# fmt: on


def run(
    which: Scenarios,
    command: Command = None,
    *,
    rate: RunRate = None,
    seed: RunSeed = None,
    vms: As = None,
    is_at_azure: AtAzureAddress = False,
    transcript: TranscriptFile = None,
    junit: JunitFile = None,
    html: HtmlFile = None,
    to_the_end: ToTheEnd = False,
    as_json: Json = False,
    is_quiet: Quiet = False,
    is_verbose: Verbose = False,
) -> int:
    """Run a scenario: exit code 0 if it passed, 1 if it failed, 2 if the file is wrong.

    Example: forewarn lab run host-reboot --rate 60 --html report.html -- ./handler
    """
    if is_at_azure and not command:
        raise Usage("--at-azure-address needs a command; expected it after --, as in -- ./handler")
    if is_quiet and is_verbose:
        raise Usage("--quiet and --verbose contradict each other; expected one of the two")
    with needs_extra("lab run"):
        from forewarn.lab.scenario.html_report import render_html
        from forewarn.lab.scenario.report import Console, Verbosity, render_json, render_junit
        from forewarn.lab.scenario.run_options import RunOptions
        from forewarn.lab.scenario.runner import run as run_scenario

    scenario = _load_scenario(which)
    _check_files(which, {"--transcript": transcript, "--junit": junit, "--html": html})
    options = RunOptions(
        seed=seed,
        rate=rate,
        external=tuple(vms or ()),
        command=tuple(command or ()),
        is_at_azure=is_at_azure,
        to_the_end=to_the_end,
    )

    def write(line: str) -> None:
        show_status("")
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    verbosity = Verbosity.VERBOSE if is_verbose else Verbosity.NORMAL
    console = Console(write, Verbosity.QUIET if is_quiet else verbosity, paint, show_status)
    # The console prints what happens, so the log is not needed.
    logging.getLogger("forewarn").addHandler(logging.NullHandler())
    name = scenario.file.name
    try:
        result = run_until_stopped(partial(run_scenario, scenario, options, console))
    except (Invalid, NotFound, Unavailable) as error:
        raise Usage(error.message) from error
    finally:
        show_status("")
    if result is None:
        write("interrupted")
        return Exit.INTERRUPTED
    if as_json:
        show_json(render_json(name, result))
    else:
        console.print_result(name, result)
    files: dict[Path | None, Callable[[], bytes]] = {
        transcript: result.transcript.dump,
        junit: partial(render_junit, name, result),
        html: partial(render_html, scenario, result, console),
    }
    for path in filter(None, files):
        write_file(path, files[path]())
    if result.is_interrupted:
        return Exit.INTERRUPTED
    return Exit.DONE if result.is_passed else Exit.REFUSED


def _check_files(which: str, files: Mapping[str, Path | None]) -> None:
    """Each can be written, and none is another one or the scenario itself."""
    options = {Path(which).resolve(): "the scenario"}
    for option, path in files.items():
        if path is None:
            continue
        other = options.setdefault(path.resolve(), option)
        if other != option and not path.is_char_device():
            raise Usage(f"{option}: {path} is also {other}; expected another file")
        check_writable(option, path)


def scenarios(*, as_json: Json = False) -> None:
    """List the scenarios that come with Forewarn. `forewarn lab run NAME` runs one.

    Example: forewarn lab scenarios
    """
    with needs_extra("lab scenarios"):
        from forewarn.lab.scenario.schema import list_library, load_from_library

    files = [load_from_library(name).file for name in list_library()]
    rows = [{"name": file.name, "lasts": file.until, "about": file.about} for file in files]
    response = {"scenarios": rows, "total": len(rows)}
    show_list(response, "scenarios", ("name", "lasts", "about"), as_json=as_json)


def schema() -> None:
    """Print the JSON Schema of a scenario file.

    Example: forewarn lab schema > scenario.schema.json
    """
    with needs_extra("lab schema"):
        from forewarn.lab.scenario.schema import SCHEMA

    show_json(SCHEMA)


def _load_scenario(which: str) -> "Scenario":
    """The file if it exists, else the scenario of the library with that name."""
    from forewarn.lab.scenario.schema import list_library, load_from_library, parse_scenario

    try:
        if not Path(which).exists() and Path(which).suffix == "":
            return load_from_library(which)
        return parse_scenario(read_file(which, "scenario", SCENARIO_BYTES_MAX), which)
    except Error as error:
        near = did_you_mean(which, list_library()) if isinstance(error, NotFound) else ""
        raise Usage(error.message.partition(";")[0] + near if near else error.message) from error
