"""`forewarn conform`: check any endpoint against the Scheduled Events protocol."""

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
from forewarn.conformance.check import Check, Failed
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.raw_http import SessionClock
from forewarn.conformance.run import Result, Verdict, run
from forewarn.conformance.session import Session, parse_endpoint
from forewarn.errors import AlreadyPending, Error, Invalid, UnknownVm

Url = Annotated[
    str | None, typer.Argument(metavar="URL", help="The endpoint, such as http://169.254.169.254")
]
Names = Annotated[
    list[str] | None,
    typer.Option("--as", metavar="VM", help="Call as this VM, by /as/VM/; may be repeated."),
]
ControlUrl = Annotated[
    str | None,
    typer.Option(
        "--control",
        metavar="URL",
        help="Forewarn's control API: the checks create events and cancel them.",
    ),
]
Approve = Annotated[
    bool,
    typer.Option(
        "--approve",
        help="Also send approvals. Without --control they approve existing events!",
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Also write the results as JUnit XML."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Only this check; may be repeated."),
]
List = Annotated[bool, typer.Option("--list", help="List the checks and exit.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Treat a failed `should` like a failed `must`.")
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
    """Check an endpoint against the Scheduled Events protocol.

    It only reads, unless --control or --approve is given.
    """
    checks = _select(only or [])
    if is_list:
        return _show_list(checks, as_json=as_json)
    if url is None:
        raise Usage("conform needs the URL of an endpoint, such as http://169.254.169.254")
    try:
        endpoint = parse_endpoint(url)
    except Invalid as error:
        raise Usage(error.message) from error
    session = Session(
        endpoint,
        names=tuple(names or ()),
        control=_connect(context, control) if control else None,
        may_approve=approve,
        clock=SessionClock(time.monotonic, time.sleep),
    )
    results = list(_run(session, checks))
    if junit is not None:
        _write(junit, report.as_junit(url, results, is_strict=strict))
    _show(url, results, as_json=as_json)
    is_failed = any(
        result.is_must_failed or (strict and result.verdict is Verdict.FAILED) for result in results
    )
    if is_failed:
        raise typer.Exit(Exit.REFUSED)
    return None


def _select(only: list[str]) -> list[Check]:
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise Usage(f"unknown check {unknown[0]!r}; see --list")
    return [check for name, check in CHECKS.items() if not only or name in only]


def _connect(context: typer.Context, control: str) -> Client:
    file = (context.find_object(Asked) or Asked()).file
    return Client(resolved(ClientConfig, file, {"control_url": control}).config)


def _run(session: Session, checks: list[Check]) -> Iterator[Result]:
    """The results, with progress on a terminal."""
    _show_progress("waiting for the first response, which may take two minutes")
    try:
        _begin(session, checks)
        for number, result in enumerate(run(session, checks), start=1):
            _show_progress(f"{number} of {len(checks)}: {result.check.name}")
            yield result
    finally:
        _show_progress("")


def _begin(session: Session, checks: list[Check]) -> None:
    try:
        session.reach()
        session.preflight(checks)
    except (UnknownVm, AlreadyPending) as error:
        raise Usage(error.message) from error
    except Failed:  # no name of the VM: the checks report that
        return


def _show_progress(text: str) -> None:
    """On a line that the next call overwrites."""
    if sys.stderr.isatty():
        typer.echo(f"\r\033[K{text}", err=True, nl=False)


def _show(url: str, results: list[Result], *, as_json: bool) -> None:
    if as_json:
        show_json(report.as_json(url, results))
        return
    rows = report.rows(results)
    show_list({"checks": rows, "total": len(rows)}, "checks", report.COLUMNS, as_json=False)
    typer.echo(report.summary(results))


def _show_list(checks: list[Check], *, as_json: bool) -> None:
    rows = report.list_checks(checks)
    show_list({"checks": rows, "total": len(rows)}, "checks", report.LIST_COLUMNS, as_json=as_json)


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise Error(f"cannot write {os.fspath(file)}: {error.strerror or error}") from error
