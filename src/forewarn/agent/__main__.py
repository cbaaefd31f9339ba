"""`python -m forewarn.agent`, the zipapp, and behind `forewarn agent`: run, status, check.

Exit codes as in docs/cli.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from forewarn import __version__
from forewarn.agent import participant_socket as applications
from forewarn.agent import settings
from forewarn.agent import status as view
from forewarn.agent.daemon import Orders, live
from forewarn.agent.log import set_up_log
from forewarn.client import EndpointError
from forewarn.errors import Error, Invalid, NotFound, Unavailable

CONFIG = Path("/etc/forewarn-agent.toml")
SOCKET = Path("/run/forewarn-agent/socket")

DONE, REFUSED, USAGE, NOT_FOUND, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXITS: dict[type[Error], int] = {
    Invalid: USAGE,
    NotFound: NOT_FOUND,
    Unavailable: UNREACHABLE,
    EndpointError: UNREACHABLE,
}


def main(arguments: Sequence[str] | None = None, *, program: str = "forewarn-agent") -> int:
    """Do what is asked, and tell how it went. No traceback reaches a person."""
    asked = parser(program).parse_args(arguments)
    try:
        COMMANDS[asked.command](asked)
        sys.stdout.flush()
    except Error as problem:
        return _told(
            program,
            problem.message,
            next((code for kind, code in EXITS.items() if isinstance(problem, kind)), REFUSED),
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python would complain once more at its end
        return REFUSED
    except Exception as bug:  # the last line of defence, around every command
        return _told(program, f"this is a bug in Forewarn: {type(bug).__name__}: {bug}", REFUSED)
    return DONE


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line."""
        self.exit(USAGE, f"{self.prog}: {message}; try '{self.prog} --help'\n")


def parser(program: str) -> Parser:
    top = Parser(
        prog=program, description="Prepares this VM for what is announced, approves, and recovers."
    )
    top.add_argument("--version", action="version", version=f"forewarn {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="watch, and do what the rules say, until SIGTERM or Ctrl-C; SIGHUP reads the file again",
    )
    check = commands.add_parser(
        "check", help="read the file, say what is wrong or what the rules are, and do nothing else"
    )
    for one in (run, check):
        one.add_argument(
            "--config",
            type=Path,
            default=CONFIG,
            metavar="FILE",
            help="the settings (default: %(default)s)",
        )
    run.add_argument("--endpoint", default="", metavar="URL", help="instead of the file's endpoint")
    run.add_argument(
        "--dry-run", action="store_true", help="say what would be done; do and approve nothing"
    )
    run.add_argument("--once", action="store_true", help="look once, do what is due, and end")
    status = commands.add_parser("status", help="what the agent on this machine is doing")
    status.add_argument(
        "--socket",
        type=Path,
        default=SOCKET,
        metavar="PATH",
        help="the agent's socket (default: %(default)s)",
    )
    status.add_argument("--json", action="store_true", help="for programs")
    return top


def _run(asked: argparse.Namespace) -> None:
    with set_up_log():
        live(Orders(asked.config, asked.endpoint, is_dry_run=asked.dry_run, is_once=asked.once))


def _status(asked: argparse.Namespace) -> None:
    said = applications.ask_status(asked.socket)
    print(json.dumps(said) if asked.json else "\n".join(view.lines(said)))


def _check(asked: argparse.Namespace) -> None:
    found = settings.load(asked.config)
    for rule in found.rules:
        print(
            f"{rule.name}: {', '.join(rule.types) or 'all types'}, approve {'never (held)' if rule.hold else rule.approve}"
        )
    print(f"{asked.config} is fine: {len(found.rules)} rule(s)")


COMMANDS = {"run": _run, "status": _status, "check": _check}


def _told(program: str, message: str, code: int) -> int:
    """One line, whatever the message is made of."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
