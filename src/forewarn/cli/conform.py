"""`forewarn conform`: is this endpoint one that clients of Scheduled Events can live with?"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from forewarn.cli.api import Asked, Client
from forewarn.cli.config import resolved
from forewarn.cli.exit_codes import Exit, Usage
from forewarn.cli.output import show_json, show_list
from forewarn.config import ClientConfig
from forewarn.conformance import report
from forewarn.conformance.check import CHECKS, Check, Failed
from forewarn.conformance.raw_http import Endpoint, Time
from forewarn.conformance.run import Result, Verdict, run
from forewarn.conformance.session import Stage
from forewarn.errors import AlreadyPending, Error, Invalid, UnknownVm

Url = Annotated[
    str | None, typer.Argument(metavar="URL", help="The endpoint, such as http://169.254.169.254")
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--as", metavar="VM", help="Speak for this VM, by /as/VM/; several times for several VMs."
    ),
]
ControlUrl = Annotated[
    str | None,
    typer.Option(
        "--control",
        metavar="URL",
        help="Forewarn's control API: events are made for the checks, and taken back.",
    ),
]
Approve = Annotated[
    bool,
    typer.Option(
        "--approve",
        help="Send approvals too. Without --control they approve the events that are there!",
    ),
]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write the results as JUnit XML too.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Only this check; several times for several."),
]
List = Annotated[bool, typer.Option("--list", help="List the checks and run none.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Let a failed `should` count like a `must`.")
]


def conform(
    context: typer.Context,
    url: Url = None,
    *,
    names: Names = None,
    control: ControlUrl = None,
    approve: Approve = False,
    only: Only = None,
    as_json: AsJson = False,
    junit: Junit = None,
    is_list: List = False,
    strict: Strict = False,
) -> None:
    """Check an endpoint against the rules of the wire.

    It only reads, unless --control or --approve says more.
    """
    checks = _chosen(only or [])
    if is_list:
        return _show_list(checks, as_json=as_json)
    if url is None:
        raise Usage("conform needs the URL of an endpoint, such as http://169.254.169.254")
    try:
        endpoint = Endpoint.parse(url)
    except Invalid as problem:
        raise Usage(problem.message) from problem
    stage = Stage(
        endpoint,
        names=tuple(names or ()),
        control=_connect(context, control) if control else None,
        may_approve=approve,
        time=Time(time.monotonic, time.sleep),
    )
    results = list(_run(stage, checks))
    if junit is not None:
        _write(junit, report.as_junit(url, results, is_strict=strict))
    _show(url, results, as_json=as_json)
    is_failed = any(
        one.is_must_failed or (strict and one.verdict is Verdict.FAILED) for one in results
    )
    if is_failed:
        raise typer.Exit(Exit.REFUSED)
    return None


def _chosen(only: list[str]) -> list[Check]:
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise Usage(f"there is no check {unknown[0]!r}; --list names them")
    return [check for name, check in CHECKS.items() if not only or name in only]


def _connect(context: typer.Context, control: str) -> Client:
    file = (context.find_object(Asked) or Asked()).file
    return Client(resolved(ClientConfig, file, {"control_url": control}).config)


def _run(stage: Stage, checks: list[Check]) -> Iterator[Result]:
    """The results; on a terminal, with a word on how far it is."""
    _tell("waiting for the first answer, which may take two minutes")
    try:
        _begin(stage, checks)
        for number, result in enumerate(run(stage, checks), start=1):
            _tell(f"{number} of {len(checks)}: {result.check.name}")
            yield result
    finally:
        _tell("")


def _begin(stage: Stage, checks: list[Check]) -> None:
    try:
        stage.reach()
        stage.survey(checks)
    except (UnknownVm, AlreadyPending) as problem:
        raise Usage(problem.message) from problem
    except Failed:  # the endpoint does not tell the VM's name: the checks will say so
        return


def _tell(progress: str) -> None:
    """On a line of its own that the next one overwrites."""
    if sys.stderr.isatty():
        typer.echo(f"\r\033[K{progress}", err=True, nl=False)


def _show(url: str, results: list[Result], *, as_json: bool) -> None:
    if as_json:
        show_json(report.as_json(url, results))
        return
    found = report.rows(results)
    show_list({"checks": found, "total": len(found)}, "checks", report.COLUMNS, as_json=False)
    typer.echo(report.summary(results))


def _show_list(checks: list[Check], *, as_json: bool) -> None:
    found = report.listed(checks)
    show_list(
        {"checks": found, "total": len(found)}, "checks", report.LIST_COLUMNS, as_json=as_json
    )


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise Error(f"{os.fspath(file)} cannot be written: {error.strerror or error}") from error
