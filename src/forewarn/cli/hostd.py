"""`forewarn hostd`: flags, variables and the config file become the daemon's configuration.

Without typer, which would be a third of the daemon's memory.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from forewarn.cli.config_file import describe_expected, format_value, read_keys, resolve
from forewarn.cli.event_loop import run_service
from forewarn.cli.exit_codes import Exit, Parser, needs_extra
from forewarn.config import options
from forewarn.hostd.settings import HostdConfig

DEFAULT_FILE = Path("/etc/forewarn/hostd.toml")


def run_hostd(arguments: Sequence[str]) -> int:
    """Run the daemon until SIGTERM or Ctrl-C."""
    config = read_hostd_config(arguments, os.environ)
    with needs_extra("hostd"):
        from forewarn.hostd.daemon import run

    def print_ready(status: str) -> None:
        print(f"forewarn hostd is ready: {status}", flush=True)

    run_service(config, lambda: run(config, print_ready))
    return Exit.DONE


def make_parser() -> Parser:
    parser = Parser(
        prog="forewarn hostd",
        description="Run the daemon of a hypervisor host: it relays its guests' requests to the"
        " servers, carries out the impacts of this host, and reports its VMs.",
        epilog="Example: forewarn hostd --host host-a --server http://10.0.0.1:8081 --token-file t",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, help=f"the config file (default: {DEFAULT_FILE})")
    for each in options(HostdConfig):
        default = format_value(each.default)
        shown = f" Default: {default}." if default else ""
        parser.add_argument(
            each.flag,
            metavar="VALUE",
            action="append" if each.is_repeatable else "store",
            help=f"{each.help} {describe_expected(each)}{shown}".replace("%", "%%"),
        )
    return parser


def read_hostd_config(arguments: Sequence[str], environ: Mapping[str, str]) -> HostdConfig:
    given = vars(make_parser().parse_args(arguments))
    flags = {each.name: (each.flag, given[each.name]) for each in options(HostdConfig)}
    file = given["config"] or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    keys = read_keys(file, HostdConfig) if file else {}
    return resolve(HostdConfig, flags, environ, keys).config
