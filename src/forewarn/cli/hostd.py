"""`forewarn hostd`: flags, variables and the config file become the daemon's configuration.

Without typer, which would be a third of the daemon's memory.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from forewarn.cli.config_file import describe_expected, format_value, read_keys
from forewarn.cli.event_loop import run_until_stopped
from forewarn.cli.exit_codes import Exit, Usage, needs_extra
from forewarn.config import options
from forewarn.errors import Invalid
from forewarn.hostd.settings import HostdConfig
from forewarn.log import log_to_stderr

DEFAULT_FILE = Path("/etc/forewarn/hostd.toml")


class HostdParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message}; try '{self.prog} --help'")


def run_hostd(arguments: Sequence[str]) -> int:
    """Run the daemon until SIGTERM or Ctrl-C."""
    try:
        config = read_hostd_config(vars(make_parser().parse_args(arguments)), os.environ)
        with needs_extra("hostd", "hostd"):
            from forewarn.hostd.daemon import run

        with log_to_stderr(config.log_format, config.log_level, logger=""):
            run_until_stopped(
                lambda: run(
                    config, lambda status: print(f"forewarn hostd is ready: {status}", flush=True)
                )
            )
    except Invalid as error:
        # The systemd unit does not restart after this exit code: an operator has to fix the config.
        raise Usage(error.message) from error
    return Exit.DONE


def print_ready(status: str) -> None:
    print(f"forewarn hostd is ready: {status}", flush=True)


def make_parser() -> HostdParser:
    parser = HostdParser(
        prog="forewarn hostd",
        description="Run the daemon of a hypervisor host: it relays its guests' requests to the"
        " servers, carries out the impacts of this host, and reports its VMs.",
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


def read_hostd_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> HostdConfig:
    """The config: flags before variables before the file. Invalid names the source of a value."""
    file = flags["config"] or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    keys = read_keys(file, HostdConfig) if file else {}
    values = {}
    for each in options(HostdConfig):
        variable = environ.get(each.variable)
        if flags[each.name] is not None:
            values[each.name] = each.parse(flags[each.name], each.flag)
        elif variable:
            given = variable.split(",") if each.is_repeatable else variable
            values[each.name] = each.parse(given, each.variable)
        elif each.name in keys:
            values[each.name] = each.parse(keys[each.name], f"{each.name} in {file}")
    config = HostdConfig(**values)
    config.check()
    return config
