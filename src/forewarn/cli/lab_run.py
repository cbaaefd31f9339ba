"""`forewarn lab run`, `forewarn lab scenarios` and `forewarn lab schema`."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forewarn.cli.exit_codes import Exit, Usage, needs_server_parts
from forewarn.cli.output import Json, show_json, show_list
from forewarn.cli.serve import run_until_stopped
from forewarn.errors import Error, Invalid, NotFound

if TYPE_CHECKING:
    from forewarn.lab.scenario.runner import RunResult
    from forewarn.lab.scenario.schema import Scenario

FILE_BYTES_MAX = 4 * 1024 * 1024

Which = Annotated[
    str, typer.Argument(metavar="FILE|NAME", help="A scenario file, or a name from the library.")
]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- COMMAND...]",
        help="The software under test. {endpoint} in it becomes the URL of its VM.",
        show_default=False,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Use the real clock, with every duration this many times shorter.",
        min=0.001,
        max=100_000,
    ),
]
Real = Annotated[
    bool, typer.Option("--real", help="Use the real clock with unchanged durations: --rate 1.")
]
Seed = Annotated[
    int | None,
    typer.Option(help="The seed of ids, poll times and choices. Default: the file's.", min=0),
]
As = Annotated[
    list[str] | None,
    typer.Option("--as", help="A VM that the command or other software plays. Repeatable."),
]
TranscriptFile = Annotated[
    Path | None, typer.Option(help="Write the transcript to this file, as JSON lines.")
]
JunitFile = Annotated[Path | None, typer.Option(help="Write the verdicts to this file, as JUnit.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the verdicts.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print every request with its response too.")
]


def run(
    which: Which,
    command: Command = None,
    *,
    rate: Rate = None,
    is_real: Real = False,
    seed: Seed = None,
    vms: As = None,
    transcript: TranscriptFile = None,
    junit: JunitFile = None,
    is_quiet: Quiet = False,
    is_verbose: Verbose = False,
) -> int:
    """Run a scenario. Exit code 0: all expectations hold; 1: one does not; 2: invalid file."""
    if is_real and rate is not None:
        raise Usage(f"--real is --rate 1, but --rate is {rate:g}; expected one of them")
    with needs_server_parts("lab run"):
        from forewarn.lab.scenario.report import Console, Verbosity, render_junit
        from forewarn.lab.scenario.runner import RunOptions
        from forewarn.lab.scenario.runner import run as run_scenario

    scenario = load(which)
    for option, path in (("--transcript", transcript), ("--junit", junit)):
        if path is not None:
            check_writable(option, path)
    options = RunOptions(
        seed=seed,
        rate=1.0 if is_real else rate,
        external=tuple(vms or ()),
        command=tuple(command or ()),
    )
    verbosity = Verbosity.VERBOSE if is_verbose else Verbosity.NORMAL
    console = Console(typer.echo, Verbosity.QUIET if is_quiet else verbosity)
    # Keeps the service's log off stderr: the console shows what happens.
    logging.getLogger("forewarn").addHandler(logging.NullHandler())
    results: list[RunResult] = []

    async def work() -> None:
        try:
            results.append(await run_scenario(scenario, options, console))
        except (Invalid, NotFound) as error:
            raise Usage(error.message) from error

    run_until_stopped(work)
    if not results:
        return Exit.INTERRUPTED
    result, name = results[0], scenario.file.name
    console.print_verdicts(name, result.verdicts)
    if transcript is not None:
        write(transcript, result.transcript.dump())
    if junit is not None:
        write(junit, render_junit(name, result.verdicts, result.transcript))
    return Exit.DONE if result.is_passed else Exit.REFUSED


def scenarios(*, as_json: Json = False) -> None:
    """List the scenarios that come with Forewarn; `forewarn lab run NAME` runs one."""
    with needs_server_parts("lab scenarios"):
        from forewarn.lab.scenario.schema import list_library, load_from_library

    columns = ("name", "lasts", "about")
    files = [load_from_library(name).file for name in list_library()]
    rows = [dict(zip(columns, (file.name, file.until, file.about), strict=True)) for file in files]
    show_list({"scenarios": rows, "total": len(rows)}, "scenarios", columns, as_json=as_json)


def schema() -> None:
    """Print the JSON Schema of a scenario file."""
    with needs_server_parts("lab schema"):
        from forewarn.lab.scenario.schema import SCHEMA

    show_json(SCHEMA)


def load(which: str) -> "Scenario":
    """Load a file, or else a scenario from the library. Errors are usage errors."""
    from forewarn.lab.scenario.schema import load_from_library, parse_scenario

    path = Path(which)
    try:
        if not path.exists() and path.suffix == "":
            return load_from_library(which)
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise Usage(f"{which}: expected at most {FILE_BYTES_MAX} bytes")
        return parse_scenario(text, which)
    except Error as error:
        raise Usage(error.message) from error
    except OSError as error:
        raise Usage(f"scenario file {which} cannot be read: {error.strerror or error}") from error


def check_writable(option: str, path: Path) -> None:
    """Fail before the run, not after it. Keeps what is there; a pipe cannot be tried."""
    if path.is_fifo():
        return
    exists = path.exists()
    try:
        path.open("ab").close()
        if not exists:
            path.unlink()
    except OSError as error:
        raise Usage(f"{option} {path} cannot be written: {error.strerror or error}") from error


def write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise Error(
            f"{path} cannot be written: {error.strerror or error}", file=str(path)
        ) from error
