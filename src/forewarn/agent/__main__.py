"""`python -m forewarn.agent`, the zipapp, and behind `forewarn agent`: run, status, check.

Exit codes as in docs/cli.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from forewarn import __version__
from forewarn.agent import daemon, settings
from forewarn.agent.config_reader import suggest
from forewarn.agent.participant_socket import request_status
from forewarn.agent.status import to_text
from forewarn.client import EndpointError
from forewarn.error_report import FAILED, run_command
from forewarn.errors import Error, Invalid, Unavailable

CONFIG = Path("/etc/forewarn-agent.toml")
SOCKET = Path("/run/forewarn-agent/socket")

USAGE, UNREACHABLE = 2, 4


def main(arguments: Sequence[str] | None = None, *, program: str = "forewarn-agent") -> int:
    """Run a command and return its exit code. An expected error is one line on standard error."""
    options = make_parser(program).parse_args(arguments)
    return run_command(program, lambda: COMMANDS[options.command](options), exit_of)


def exit_of(error: Error) -> int:
    if isinstance(error, Invalid):
        return USAGE
    return UNREACHABLE if isinstance(error, Unavailable | EndpointError) else FAILED


class AgentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line. A mistyped command gets a suggestion."""
        if typed := re.match(r"argument COMMAND: invalid choice: '(.*)' \(", message):
            message = f"no such command '{typed[1]}'; {suggest(typed[1], COMMANDS)}"
        separator = " Try" if message.endswith("?") else "; try"
        self.exit(USAGE, f"{self.prog}: {message}{separator} '{self.prog} --help'\n")


def make_parser(program: str) -> AgentParser:
    parser = AgentParser(
        prog=program,
        description="Prepares this VM for scheduled events, approves, and recovers.",
        epilog=f"Example: {program} run --config agent.toml --dry-run",
    )
    parser.add_argument("--version", action="version", version=f"forewarn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run", help="run the agent until SIGTERM or Ctrl-C; SIGHUP reloads the file"
    )
    check = commands.add_parser("check", help="check the file and list its rules")
    status = commands.add_parser("status", help="what the agent on this machine is doing")
    help_ = "the configuration file (default: %(default)s)"
    for command in (run, check):
        command.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help=help_)
    help_ = "overrides the endpoint in the file"
    run.add_argument("--endpoint", default="", metavar="URL", help=help_)
    help_ = "log what would be done; do and approve nothing"
    run.add_argument("--dry-run", action="store_true", help=help_)
    run.add_argument("--once", action="store_true", help="poll once, do what is due, and exit")
    help_ = "the agent's socket (default: %(default)s)"
    status.add_argument("--socket", type=Path, default=SOCKET, metavar="PATH", help=help_)
    status.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(options: argparse.Namespace) -> None:
    daemon.run(daemon.Options(options.config, options.endpoint, options.dry_run, options.once))


def _status(options: argparse.Namespace) -> None:
    status = request_status(options.socket)
    print(json.dumps(status) if options.json else "\n".join(to_text(status)))


def _check(options: argparse.Namespace) -> None:
    rules = settings.load(options.config).rules
    for rule in rules:
        approve = "never (hold)" if rule.hold else rule.approve
        print(f"{rule.name}: {', '.join(rule.types) or 'all types'}, approve {approve}")
        for target in rule.left_changed:
            print(f"{rule.name}: warning: no recover step undoes {target}")
    print(f"{options.config} is valid: {len(rules)} rule(s)")


COMMANDS = {"run": _run, "status": _status, "check": _check}


if __name__ == "__main__":
    sys.exit(main())
