"""Run the `console` blocks of a documentation page in one shell and compare the output.

A line that begins with `$ ` is a command, continued by lines that begin with `> `. The other lines
are its expected output: `…` matches anything, `(exit code N)` an exit code. The shell has its own
network namespace, so that pages can use real ports, and its own home with the checkout in
`~/forewarn`.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
STEP_SECONDS_MAX = 60
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Step(NamedTuple):
    """A command and its expected output."""

    command: str
    expected: str


def parse_steps(page: Path, section: str = "") -> list[Step]:
    """The commands of a page, or of one of its `## ` sections."""
    text = page.read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    steps: list[Step] = []
    for block in _BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:], ""))
            elif line == ">" or line.startswith("> "):
                steps[-1] = steps[-1]._replace(command=f"{steps[-1].command}\n{line[2:]}")
            else:
                steps[-1] = steps[-1]._replace(expected=steps[-1].expected + line + "\n")
    return steps


def matches(expected: str, printed: str) -> bool:
    """A `…` alone on a line matches any number of lines."""
    pattern = re.escape(expected.rstrip()).replace("…", r"[\s\S]*?")
    return re.fullmatch(pattern, printed.rstrip()) is not None


def run_page(page: Path, folder: Path, section: str = "") -> int:
    """Run all commands and return their number. Fails at the first unexpected output."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    environment = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("FOREWARN_", "PYTEST_"))
    }
    environment["HOME"] = str(folder)
    (folder / "forewarn").symlink_to(ROOT)
    privilege = [] if os.geteuid() == 0 else ["--map-root-user"]
    shell = subprocess.Popen(
        ["unshare", "--net", *privilege, "sh", "-c", "ip link set lo up && exec bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
    )
    steps = parse_steps(page, section)
    try:
        for number, step in enumerate(steps):
            code, printed = run_command(shell, step.command, f"done-{number}")
            printed += f"(exit code {code})\n" if code else ""
            assert matches(step.expected, printed), (
                f"{page.name}: $ {step.command}\n--- printed\n{printed}"
                f"--- expected\n{step.expected}"
            )
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
    return len(steps)


def run_command(shell: subprocess.Popen[str], command: str, mark: str) -> tuple[int, str]:
    """Run a command in a shell that stays; returns its exit code and its output."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"{command}\necho {mark} $?\n")
    shell.stdin.flush()
    previous = signal.signal(signal.SIGALRM, _time_out)
    signal.alarm(STEP_SECONDS_MAX)
    printed = ""
    try:
        for line in shell.stdout:
            before, is_end, code = line.partition(f"{mark} ")
            printed += before
            if is_end:
                return int(code), printed
        raise AssertionError(f"the shell ended at: {command}\n{printed}")
    except TimeoutError as error:
        raise AssertionError(
            f"still running after {STEP_SECONDS_MAX} s: {command}\n{printed}"
        ) from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _time_out(*_: object) -> None:
    raise TimeoutError
