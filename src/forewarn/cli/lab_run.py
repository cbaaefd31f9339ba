"""`forewarn lab run`, `forewarn lab scenarios` and `forewarn lab schema`: scenarios, run and told."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forewarn.cli.exit_codes import Exit, Usage, needs_server_parts
from forewarn.cli.output import Json, show_json, show_list
from forewarn.cli.serve import run_until_stopped
from forewarn.errors import Error, Invalid, NotFound

if TYPE_CHECKING:
    from forewarn.lab.scenario.runner import Result
    from forewarn.lab.scenario.schema import Scenario

FILE_BYTES_MAX = 4 * 1024 * 1024

Which = Annotated[
    str,
    typer.Argument(
        metavar="FILE|NAME", help="A scenario file, or the name of one that comes with Forewarn."
    ),
]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- COMMAND...]",
        help="The software under test; {endpoint} in it is where its VM asks.",
        show_default=False,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Run on the real clock, with every time so many times shorter.", min=0.001, max=100_000
    ),
]
Real = Annotated[
    bool,
    typer.Option(
        "--real", help="Run on the real clock, every time as it is told: the same as --rate 1."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Ids, phases and choices come from it; else the file's own.", min=0),
]
As = Annotated[
    list[str] | None,
    typer.Option(
        "--as", help="A VM that the command, or other software, plays; may be given again."
    ),
]
TranscriptFile = Annotated[
    Path | None, typer.Option(help="Write all that happened to this file, as JSON lines.")
]
JunitFile = Annotated[
    Path | None, typer.Option(help="Write the verdict to this file, for CI systems.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Tell the verdict only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Tell of every request too, with its answer.")
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
    """Run a scenario and tell whether all went as expected: exit code 0 if it did, 1 if not, 2 if
    the file is wrong.
    """
    if is_real and rate is not None:
        raise Usage(f"--real is --rate 1, and --rate is {rate:g}; expected one of the two")
    with needs_server_parts("lab run"):
        from forewarn.lab.scenario import report
        from forewarn.lab.scenario.runner import Wish
        from forewarn.lab.scenario.runner import run as play

    scenario = load(which)
    for option, path in (("--transcript", transcript), ("--junit", junit)):
        if path is not None:
            try_to_write(option, path)
    wish = Wish(
        seed=seed,
        rate=1.0 if is_real else rate,
        outside=tuple(vms or ()),
        command=tuple(command or ()),
    )
    loudness = (
        report.Loudness.QUIET
        if is_quiet
        else report.Loudness.VERBOSE
        if is_verbose
        else report.Loudness.NORMAL
    )
    progress = report.Progress(typer.echo, loudness)
    logging.getLogger("forewarn").addHandler(
        logging.NullHandler()
    )  # what happens is told here, and better
    results: list[Result] = []

    async def work() -> None:
        try:
            results.append(await play(scenario, wish, progress))
        except (Invalid, NotFound) as problem:
            raise Usage(problem.message) from problem

    run_until_stopped(work)
    if not results:
        return Exit.INTERRUPTED
    result = results[0]
    progress.verdicts(scenario, result.verdicts)
    if transcript is not None:
        write(transcript, result.transcript.dump())
    if junit is not None:
        write(junit, report.junit(scenario, result.verdicts, result.transcript))
    return Exit.DONE if result.is_passed else Exit.REFUSED


def scenarios(*, as_json: Json = False) -> None:
    """The scenarios that come with Forewarn; `forewarn lab run NAME` runs one."""
    with needs_server_parts("lab scenarios"):
        from forewarn.lab.scenario.schema import library, shipped

    found = [shipped(name).file for name in library()]
    rows = [{"name": file.name, "lasts": file.until, "about": file.about} for file in found]
    show_list(
        {"scenarios": rows, "total": len(rows)},
        "scenarios",
        ("name", "lasts", "about"),
        as_json=as_json,
    )


def schema() -> None:
    """The JSON Schema of a scenario file."""
    with needs_server_parts("lab schema"):
        from forewarn.lab.scenario.schema import SCHEMA

    show_json(SCHEMA)


def load(which: str) -> "Scenario":
    """The file if there is one, else the library's scenario of that name.

    What is wrong with it is a wrong command line.
    """
    from forewarn.lab.scenario.schema import parse, shipped

    path = Path(which)
    try:
        if not path.exists() and path.suffix == "":
            return shipped(which)
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise Usage(f"{which}: expected at most {FILE_BYTES_MAX} bytes")
        return parse(text, which)
    except Error as problem:
        raise Usage(problem.message) from problem
    except OSError as error:
        raise Usage(
            f"the scenario file {which} cannot be read: {error.strerror or error}"
        ) from error


def try_to_write(option: str, path: Path) -> None:
    """Whether a file can be written is worth knowing before the run.

    What is there stays; a pipe would take it for the end.
    """
    is_there = path.exists()
    if path.is_fifo():
        return
    try:
        path.open("ab").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise Usage(f"{option} {path} cannot be written: {error.strerror or error}") from error


def write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as error:
        raise Error(
            f"{path} cannot be written: {error.strerror or error}", file=str(path)
        ) from error
