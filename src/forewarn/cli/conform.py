"""`forewarn conform`: check any endpoint against the Scheduled Events protocol.

Runs on a bare `pip install forewarn`: argparse, and no import of typer.
"""

import argparse
import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forewarn.cli.exit_codes import Exit, Parser, Usage
from forewarn.cli.files import check_writable, write_file
from forewarn.cli.output import show_json, show_list
from forewarn.cli.terminal import paint, show_status
from forewarn.conformance import report
from forewarn.conformance.calls import parse_endpoint
from forewarn.conformance.check import Check, Failed
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.raw_http import SessionClock
from forewarn.conformance.run import Result, run
from forewarn.conformance.session import Control, Session
from forewarn.errors import AlreadyPending, Error, Invalid, UnknownVm

PROGRAM = "forewarn conform"


def connect_without_cli(url: str) -> Control:
    raise Error("--control needs pip install 'forewarn[cli]'")


def run_conform(
    arguments: Sequence[str], connect: Callable[[str], Control] = connect_without_cli
) -> int:
    """Run the checks; exit code 1 if one that must pass fails."""
    options = parse_arguments(arguments)
    checks = _select(options.only)
    if options.list:
        _refuse_with_list(options)
        listed = {"checks": report.list_checks(checks), "total": len(checks)}
        show_list(listed, "checks", report.LIST_COLUMNS, as_json=options.json)
        return Exit.DONE
    if options.url is None:
        raise Usage(f"{PROGRAM} needs the URL of an endpoint, such as http://169.254.169.254")
    try:
        endpoint = parse_endpoint(options.url)
    except Invalid as error:
        raise Usage(error.message) from error
    if options.junit is not None:
        check_writable("--junit", options.junit)
    session = Session(
        endpoint=endpoint,
        names=tuple(options.vms),
        control_api=connect(options.control) if options.control else None,
        may_approve=options.approve,
        clock=SessionClock(time.monotonic, time.sleep),
    )
    results = list(_run(session, checks))
    if options.junit is not None:
        write_file(options.junit, report.as_junit(options.url, results, is_strict=options.strict))
    if options.json:
        show_json(report.as_json(options.url, results, only_failures=options.failures))
    else:
        shown = {"only_failures": options.failures, "is_verbose": options.verbose}
        print(*report.lines(results, paint, **shown), report.summary(results), sep="\n")
    is_failed = any(result.fails_run(is_strict=options.strict) for result in results)
    return Exit.REFUSED if is_failed else Exit.DONE


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog=PROGRAM,
        description="Check an endpoint against the Scheduled Events protocol. It only reads,"
        " unless --control or --approve is given.",
        epilog=f"Example: {PROGRAM} http://127.0.0.1:8080 --control http://127.0.0.1:8081",
    )
    add = parser.add_argument
    # fmt: off
    add("url", metavar="URL", nargs="?", help="the endpoint, such as http://169.254.169.254")
    add("--as", metavar="VM", dest="vms", action="append", default=[],
        help="act as this VM, by /as/VM/; may be repeated")
    add("--control", metavar="URL",
        help="Forewarn's control API: events are created for the checks and canceled afterwards")
    add("--approve", action="store_true",
        help="send approvals; without --control this approves real events")
    add("--only", metavar="NAME", action="append", default=[],
        help="run this check, or those that match a pattern such as 'approval-*'; may be repeated")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--failures", action="store_true", help="print failures only")
    amount.add_argument("--verbose", "-v", action="store_true", help="print every check")
    add("--json", action="store_true", help="print JSON, for programs")
    add("--junit", metavar="FILE", type=Path, help="write the results as JUnit XML too")
    add("--list", action="store_true", help="list the checks and run none")
    add("--strict", action="store_true", help="a failed `should` counts like a failed `must`")
    # fmt: on
    return parser.parse_args(arguments)


def _refuse_with_list(options: argparse.Namespace) -> None:
    for name in ("vms", "control", "approve", "failures", "verbose", "junit", "strict"):
        if getattr(options, name):
            raise Usage(f"--list runs no check; leave out --{'as' if name == 'vms' else name}")


def _select(only: list[str]) -> list[Check]:
    chosen = set(() if only else CHECKS)
    for pattern in only:
        matches = fnmatch.filter(CHECKS, pattern)
        if not matches:
            raise Usage(f"--only: no check is named {pattern!r}; --list shows them all")
        chosen.update(matches)
    return [check for check in CHECKS.values() if check.name in chosen]


def _run(session: Session, checks: list[Check]) -> Iterator[Result]:
    """The results. On a terminal it shows the progress."""
    show_status("waiting for the first response, which may take two minutes")
    try:
        _start(session, checks)
        for number, result in enumerate(run(session, checks), start=1):
            show_status(f"{number} of {len(checks)}: {result.check.name}")
            yield result
    finally:
        show_status("")


def _start(session: Session, checks: list[Check]) -> None:
    try:
        session.reach()
        session.preflight(checks)
    except (UnknownVm, AlreadyPending) as error:
        raise Usage(error.message) from error
    except Failed:  # the endpoint does not return the VM's name: a check reports that
        return
