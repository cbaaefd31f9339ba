"""What a Windows machine lacks, taken away: the guest, conformance and the test API still work.

asyncio of Unix needs AF_UNIX itself, so that one comes back after the imports.
"""

import subprocess
import sys
from pathlib import Path

GUARD = (Path(__file__).parents[1] / "azure_guard.py").read_text()
WITHOUT = """
import importlib, os, pkgutil, signal, socket, sys
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop"):
    sys.modules[name] = None
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT", "SIGCHLD"):
    delattr(signal, name)
for name in ("fork", "setsid", "killpg", "getuid", "geteuid", "getgid", "chown", "pidfd_open"):
    delattr(os, name)
for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"):
    delattr(socket, name)
unix = socket.AF_UNIX
del socket.AF_UNIX
"""
IMPORT = """
names = []
for package in map(importlib.import_module, PACKAGES):
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    names += [package.__name__, *(each.name for each in found)]
for name in names:
    importlib.import_module(name)
socket.AF_UNIX = unix
"""
LAB = """
from forewarn.client import Client
from forewarn.testing import Lab
with Lab() as lab:
    event = lab.vm("web-0").reboot()
    with lab.intercept("web-0"), Client() as client:
        client.approve(*(each.id for each in client.document().events))
    print(event.status, event.approved_by)
"""
AGENT = """
from pathlib import Path
from forewarn.agent.__main__ import main
from forewarn.testing import Lab
folder = Path(sys.argv[1])
config = folder / "agent.toml"
rule = "[[rule]]\\nname = 'all'\\napprove = 'when-prepared'\\n"
config.write_text(f"journal = '{folder}/journal'\\n{rule}")
with Lab() as lab:
    event = lab.vm("web-0").reboot()
    url = lab.vm("web-0").url
    sys.platform = "win32"
    code = main(["run", "--config", str(config), "--endpoint", url, "--once"])
    print(code, event.status, event.approved_by)
"""


def run(program: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", GUARD + program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_guest_conformance_and_test_api_import_on_windows() -> None:
    packages = '"forewarn.client", "forewarn.agent", "forewarn.conformance", "forewarn.testing"'
    program = f"PACKAGES = ({packages}, 'forewarn.lab')" + WITHOUT + IMPORT + "print(len(names))"
    code, output, errors = run(program)
    assert (code, errors) == (0, "")
    assert int(output) > 80


def test_lab_and_client_work_without_what_windows_lacks() -> None:
    program = "PACKAGES = ()" + WITHOUT + IMPORT + LAB
    assert run(program) == (0, "Started web-0\n", "")


def test_agent_works_without_what_windows_lacks(tmp_path: Path) -> None:
    code, output, errors = run("PACKAGES = ()" + WITHOUT + IMPORT + AGENT, str(tmp_path))
    assert (code, output) == (0, "0 Started web-0\n"), errors
    assert (tmp_path / "journal").exists()
