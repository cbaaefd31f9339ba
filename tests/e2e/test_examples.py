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


class Mistake(NamedTuple):
    """A handler that is wrong in one place, and what its test says of it."""

    name: str
    file: str
    right: str
    wrong: str
    complaint: str


MISTAKES = (
    Mistake(
        "never approves",
        "shell/handler.sh",
        '        approve "$id"',
        '        : "$id"',
        "waited in vain",
    ),
    Mistake(
        "approves for others",
        "shell/handler.sh",
        "select(.Resources | index($name)) | ",
        "",
        "another VM's event was approved",
    ),
    Mistake(
        "never approves", "node/handler.mjs", "await this.approve(event)", "void event", "not ok 1"
    ),
    Mistake(
        "approves for others",
        "node/handler.mjs",
        "event.Resources.includes(this.name)",
        "true",
        "not ok 2",
    ),
    Mistake(
        "takes an error for an all-clear",
        "node/handler.mjs",
        "(problem) {",
        "(problem) { await this.goOn();",
        "not ok 3",
    ),
    Mistake(
        "approves for others",
        "go/handler.go",
        "name == h.Name",
        'name != ""',
        "FAIL: TestWhatBefalls",
    ),
    Mistake(
        "never approves", "csharp/Handler.cs", '== "Scheduled"', '== "Never"', "FAILED TestAReboot"
    ),
)


@pytest.mark.system
@pytest.mark.parametrize("example", RUN)
def test_an_example_passes_as_its_readme_says_and_leaves_nothing_behind(
    example: str, tmp_path: Path
) -> None:
    folder = copied(example, tmp_path)

    code, said = run(folder)

    assert code == 0, said
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file} {mistake.name}")
def test_an_example_with_a_mistake_is_found_out(mistake: Mistake, tmp_path: Path) -> None:
    """A test that cannot fail would teach nothing."""
    example, file = mistake.file.split("/")
    folder = copied(example, tmp_path)
    text = (folder / file).read_text()
    assert text.count(mistake.right) == 1
    (folder / file).write_text(text.replace(mistake.right, mistake.wrong))

    code, said = run(folder)

    assert code != 0, said
    assert mistake.complaint in said, said
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("example", HANDLERS)
def test_a_handler_knows_the_variable_that_a_lab_run_sets(example: str) -> None:
    assert "FOREWARN_ENDPOINT" in (EXAMPLES / HANDLERS[example][-1]).read_text()


@pytest.mark.parametrize(
    "example",
    [
        "python",
        pytest.param("node", marks=pytest.mark.system),
        pytest.param("shell", marks=pytest.mark.system),
    ],
)  # the others would have to be built first
def test_a_handler_asks_where_a_lab_run_tells_it_to(example: str, tmp_path: Path) -> None:
    """Where it has no variable of its own that says otherwise."""
    *program, file = HANDLERS[example]
    assert "FOREWARN_ENDPOINT" in (EXAMPLES / file).read_text()  # or it would ask the real one
    with socket.create_server(("127.0.0.1", 0)) as endpoint:
        endpoint.settimeout(30)
        url = f"http://127.0.0.1:{endpoint.getsockname()[1]}"
        told = environment(FOREWARN_ENDPOINT=url, PORT="0", HEALTHY=str(tmp_path / "healthy"))
        told.pop("ENDPOINT", None)
        process = subprocess.Popen(
            [*program, EXAMPLES / file], env=told, start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            connection, _ = endpoint.accept()
            with connection:
                asked = connection.recv(1024)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    assert asked.startswith(b"GET /metadata/instance/compute/name?")


def test_every_example_is_listed_and_those_that_are_not_run_say_so() -> None:
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
        said, _ = process.communicate(timeout=SECONDS_MAX)
        wait_for_the_end(process.pid)
    finally:
        for pid in living(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, said


def wait_for_the_end(group: int) -> None:
    """What was killed may take a moment to end; what was forgotten does not end."""
    until = time.monotonic() + 5
    while left := living(group):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.05)


def living(group: int) -> list[int]:
    """The processes of a group, without those that have ended and whom nobody has asked for yet."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = file.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(of) == group and state != "Z":
            found.append(int(file.parent.name))
    return found
