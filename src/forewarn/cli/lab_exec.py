"""`forewarn lab exec`: run a program beside a running lab, at Azure's address."""

import os
from typing import Annotated

import typer

from forewarn.cli.api import complete_names, connect
from forewarn.cli.exit_codes import needs_extra
from forewarn.cli.lookup import did_you_mean
from forewarn.errors import UnknownVm

# fmt: off
ExecVm = Annotated[str, typer.Option("--vm", help="The VM that the command plays.",
    autocompletion=complete_names("vms"))]
ExecCommand = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False,
    help="The program to run, and its arguments.")]
# fmt: on


def run_at_azure_address(context: typer.Context, command: ExecCommand, *, vm: ExecVm) -> None:
    """Run a program where 169.254.169.254:80 is a VM's endpoint in a running lab (Linux).

    The exit code is that of the program. It has no other network.

    Example: forewarn lab exec --vm web-0 -- ./handler
    """
    with needs_extra("lab exec"):
        from forewarn.lab.azure_address import URL, wrap
        from forewarn.lab.environment import make_environment
        from forewarn.lab.names import shorten_list

    urls = connect(context).post("listeners")["listeners"]
    if vm not in urls:
        expected = did_you_mean(vm, urls) or f"; expected one of {shorten_list(urls)}"
        raise UnknownVm(f"the lab has no VM {vm!r}{expected}", vm=vm)
    wrapped = wrap(urls[vm], command)
    os.execve(wrapped[0], wrapped, os.environ | make_environment(URL, vm))  # noqa: S606
