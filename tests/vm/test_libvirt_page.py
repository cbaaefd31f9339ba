"""docs/libvirt.md: the commands of its walkthroughs work as printed, with a real guest.

A prompt with the name of a host says where a command runs; without a name, it is host-a.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.console_blocks import ROOT, matches, run_command
from tests.vm.guest import Guest, start_network
from tests.vm.guest_image import GuestImage
from tests.vm.real_libvirt import RealHost, real_hosts

PAGE = ROOT / "docs/libvirt.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"(host-[ab])?\$ (.*)")
DEFAULT_NETWORK = Path("/usr/share/libvirt/networks/default.xml")


class Step(NamedTuple):
    """A command, where it runs, and its expected output."""

    host: str
    command: str
    expected: str = ""


def parse_steps(section: str) -> list[Step]:
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    steps: list[Step] = []
    for line in "".join(BLOCK.findall(text)).splitlines():
        if prompt := PROMPT.fullmatch(line):
            steps.append(Step(prompt[1] or "host-a", prompt[2]))
        elif line.startswith("> "):
            steps[-1] = steps[-1]._replace(command=f"{steps[-1].command}\n{line[2:]}")
        else:
            steps[-1] = steps[-1]._replace(expected=f"{steps[-1].expected}{line}\n")
    return steps


class Shells:
    """A shell on each host, as an operator has it. The token for host-b gets there by itself."""

    def __init__(self, hosts: dict[str, RealHost], folder: Path, stack: ExitStack) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FOREWARN_", "PYTEST_"))
        }
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment |= {"HOME": str(folder), "COLUMNS": "200", "DEBIAN_FRONTEND": "noninteractive"}
        self._shells = {}
        for name, host in hosts.items():
            (folder / name).mkdir()
            self._shells[name] = subprocess.Popen(
                host.inside("sh", "-c", f"cd {folder / name} && exec bash"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                start_new_session=True,
            )
            stack.callback(self._end, self._shells[name])
        (folder / "host-b/host-b.token").symlink_to(folder / "host-a/host-b.token")

    def _end(self, shell: subprocess.Popen[str]) -> None:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()

    def run(self, step: Step) -> None:
        code, printed = run_command(self._shells[step.host], step.command, "that-was-it")
        printed += f"(exit code {code})\n" if code else ""
        assert matches(step.expected, printed), (
            f"{step.host}$ {step.command}\n--- printed\n{printed}--- expected\n{step.expected}"
        )


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: the path of a socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fw-page-") as name:
        yield Path(name)


def test_walkthroughs_work_as_printed(folder: Path, image: GuestImage) -> None:
    one, several = parse_steps("One host"), parse_steps("Several hosts")
    assert (len(one), len(several)) == (18, 18)
    guest = Guest(image, folder, "web-0", address="192.168.122.10", metadata="")
    with ExitStack() as stack:
        hosts = stack.enter_context(real_hosts("host-a", "host-b"))
        stack.enter_context(guest.with_disk())
        for host in hosts.values():  # as Debian's package defines it
            host.connection.networkDefineXML(DEFAULT_NETWORK.read_text())
        shells = Shells(hosts, folder, stack)
        for step in one:
            shells.run(step)
            if step.command == "virsh net-autostart default":  # the reader's own VM
                hosts["host-a"].run_domain(guest.xml)
        assert guest.boots == 2
        for step in several:
            if "vm redeploy" in step.command:
                guest.migrate_quickly(hosts["host-a"])
            shells.run(step)
        assert guest.boots == 2


def test_option_121_leads_to_the_relay_without_a_router(folder: Path, image: GuestImage) -> None:
    (option,) = re.findall(r"^(dhcp-option=121,.*)$", PAGE.read_text(), re.MULTILINE)
    guest = Guest(image, folder, "web-0", address="192.168.122.10", metadata="")
    with real_hosts("host-a") as hosts, guest.with_disk():
        start_network(hosts["host-a"], [guest], dnsmasq=option)
        hosts["host-a"].run_domain(guest.xml)
        guest.wait_until_up(hosts["host-a"])
        routes = guest.run(hosts["host-a"], "ip -4 route")
    assert "169.254.169.254 dev eth0" in routes
    assert "default via 192.168.122.1 dev eth0" in routes
