"""The examples in other languages, run as their READMEs say: each in a copy, with processes and a
temporary folder of its own.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.cli_service import ROOT, environment

EXAMPLES = ROOT / "examples"
RUN = ("csharp", "go", "node", "shell")
READ = ("powershell",)  # Debian has no PowerShell
ELSEWHERE = ("python",)  # run by the tests of the pytest plugin
HANDLERS = {
    "csharp": ("csharp/Handler.cs",),
    "go": ("go/handler.go",),
    "node": ("node", "node/handler.mjs"),
    "powershell": ("powershell/handler.ps1",),
    "python": (sys.executable, "python/handler.py"),
    "shell": ("sh", "shell/handler.sh"),
}
"""Each handler, after the program that runs it where it needs not be built."""
SECONDS_MAX = 120
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Bug(NamedTuple):
    """A change that breaks a handler, and what its test then prints."""

    name: str
    file: str
    right: str
    wrong: str
    complaint: str


MISTAKES = (
    Bug(
        "never approves",
        "shell/handler.sh",
        '        approve "$id"',
        '        : "$id"',
        "timed out",
    ),
    Bug(
        "approves for others",
        "shell/handler.sh",
        "select(.Resources | index($name)) | ",
        "",
        "another VM's event was approved",
    ),
    Bug(
        "never approves", "node/handler.mjs", "await this.approve(event)", "void event", "not ok 1"
    ),
    Bug(
        "approves for others",
        "node/handler.mjs",
        "event.Resources.includes(this.name)",
        "true",
        "not ok 2",
    ),
    Bug(
        "takes an error for an all-clear",
        "node/handler.mjs",
        "(error) {",
        "(error) { await this.resumeWork();",
        "not ok 3",
    ),
    Bug(
        "approves for others",
        "go/handler.go",
        "name == h.Name",
        'name != ""',
        "FAIL: TestEventsOfAnotherVm",
    ),
    Bug("never approves", "csharp/Handler.cs", '== "Scheduled"', '== "Never"', "FAILED TestReboot"),
)


@pytest.mark.system
@pytest.mark.parametrize("example", RUN)
def test_example_passes_as_its_readme_says(example: str, tmp_path: Path) -> None:
    folder = copied(example, tmp_path)

    code, output = run(folder)

    assert code == 0, output
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file} {mistake.name}")
def test_example_with_a_bug_fails(mistake: Bug, tmp_path: Path) -> None:
    """A test that cannot fail would teach nothing."""
    example, file = mistake.file.split("/")
    folder = copied(example, tmp_path)
    text = (folder / file).read_text()
    assert text.count(mistake.right) == 1
    (folder / file).write_text(text.replace(mistake.right, mistake.wrong))

    code, output = run(folder)

    assert code != 0, output
    assert mistake.complaint in output, output
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("example", HANDLERS)
def test_handler_reads_forewarn_endpoint(example: str) -> None:
    assert "FOREWARN_ENDPOINT" in (EXAMPLES / HANDLERS[example][-1]).read_text()


@pytest.mark.parametrize(
    "example",
    [
        "python",
        pytest.param("node", marks=pytest.mark.system),
        pytest.param("shell", marks=pytest.mark.system),
    ],
)  # the others would have to be built first
def test_handler_uses_the_endpoint_of_a_lab_run(example: str, tmp_path: Path) -> None:
    """Where it has no variable of its own that says otherwise."""
    *program, file = HANDLERS[example]
    assert "FOREWARN_ENDPOINT" in (EXAMPLES / file).read_text()  # or it would ask the real one
    with socket.create_server(("127.0.0.1", 0)) as endpoint:
        endpoint.settimeout(30)
        url = f"http://127.0.0.1:{endpoint.getsockname()[1]}"
        variables = environment(FOREWARN_ENDPOINT=url, PORT="0", HEALTHY=str(tmp_path / "healthy"))
        variables.pop("ENDPOINT", None)
        process = subprocess.Popen(
            [*program, EXAMPLES / file],
            env=variables,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            connection, _ = endpoint.accept()
            with connection:
                request = connection.recv(1024)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    assert request.startswith(b"GET /metadata/instance/compute/name?")


def test_every_example_is_listed() -> None:
    folders = sorted(
        entry.name
        for entry in EXAMPLES.iterdir()
        if entry.is_dir() and not entry.name.startswith((".", "_"))
    )
    assert folders == sorted([*RUN, *READ, *ELSEWHERE])
    listed = (EXAMPLES / "README.md").read_text()
    for folder in folders:
        assert f"({folder}/README.md)" in listed
    for folder in READ:
        assert "only been read" in " ".join((EXAMPLES / folder / "README.md").read_text().split())


def copied(example: str, tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    return Path(shutil.copytree(EXAMPLES / example, tmp_path / example))


def run(folder: Path) -> tuple[int, str]:
    """Type the commands of its README, but for those that install something; the exit code, and all
    that was printed.
    """
    (block,) = _BLOCK.findall((folder / "README.md").read_text())
    typed = [
        line
        for line in block.splitlines()
        if not line.startswith(("pip install ", "sudo apt-get install "))
    ]
    assert typed
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["sh", "-ec", "\n".join(typed)],
        cwd=folder,
        env=environment(PATH=path, TMPDIR=str(folder.parent / "temporary"), GOPROXY="off"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS_MAX)
        wait_for_the_end(process.pid)
    finally:
        for pid in living(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, output


def wait_for_the_end(group: int) -> None:
    """A killed process may need some time to end."""
    until = time.monotonic() + 5
    while left := living(group):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.05)


def living(group: int) -> list[int]:
    """Return the processes of a group, without zombies."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = file.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(of) == group and state != "Z":
            found.append(int(file.parent.name))
    return found
