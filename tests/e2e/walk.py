"""Walks through a documentation page as a reader would: every command of its `console` blocks,
typed in one shell.

A line that begins with `$ ` is typed, together with those after it that begin with `> `; the rest
is what the page promises to show, where `…` stands for anything, and `(exit code N)` for that. The
shell has a network of its own, so that the page can name real ports, and a home of its own with the
checkout in `~/forewarn`.
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
    """A command and what the page says that it shows."""

    typed: str
    shown: str


def steps(page: Path, section: str = "") -> list[Step]:
    """What is typed in a page, or in one of its `## ` sections."""
    text = page.read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found: list[Step] = []
    for block in _BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], ""))
            elif line.startswith("> "):
                found[-1] = found[-1]._replace(typed=f"{found[-1].typed}\n{line[2:]}")
            else:
                found[-1] = found[-1]._replace(shown=found[-1].shown + line + "\n")
    return found


def matches(shown: str, printed: str) -> bool:
    """Whether what was printed is what the page shows.

    A `…` alone on a line stands for any number of lines.
    """
    pattern = re.escape(shown.rstrip()).replace("…", r"[\s\S]*?")
    return re.fullmatch(pattern, printed.rstrip()) is not None


def walk(page: Path, folder: Path, section: str = "") -> int:
    """Type it all;

    AssertionError tells the step that does not do what the page says. How many steps there were.
    """
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
    todo = steps(page, section)
    try:
        for number, step in enumerate(todo):
            code, printed = _type(shell, step.typed, f"done-{number}")
            told = f"{page.name}: $ {step.typed}\n--- printed\n{printed}\n--- the page says\n{step.shown}"
            printed += f"(exit code {code})\n" if code else ""
            assert matches(step.shown, printed), told
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
    return len(todo)


def _type(shell: subprocess.Popen[str], typed: str, mark: str) -> tuple[int, str]:
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"{typed}\necho {mark} $?\n")
    shell.stdin.flush()
    alarm = signal.signal(signal.SIGALRM, _late)
    signal.alarm(STEP_SECONDS_MAX)
    printed = ""
    try:
        for line in shell.stdout:
            before, found, code = line.partition(f"{mark} ")
            printed += before
            if found:
                return int(code), printed
        raise AssertionError(f"the shell ended at: {typed}\n{printed}")
    except TimeoutError as error:
        raise AssertionError(f"no end within {STEP_SECONDS_MAX} s: {typed}\n{printed}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)


def _late(*_: object) -> None:
    raise TimeoutError
