"""The newcomer's hour: from the built wheel, in an empty virtual environment, beside an application
that pins another uvicorn, to an unmodified handler under test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 300
GUARD = (ROOT / "tests" / "azure_guard.py").read_text()

APPLICATION = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "shop"
version = "1.0"
dependencies = ["uvicorn==0.34.3"]

[tool.setuptools]
py-modules = ["shop"]
"""
HANDLER = '''\
"""As written for Azure: the address is built in, and nothing can be configured."""

import json
import urllib.request

URL = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"


def call(body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL, data=data, headers={"Metadata": "true"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read() or b"null")


def handle(drain):
    for event in call()["Events"]:
        if event["EventStatus"] == "Scheduled":
            drain()
            call({"StartRequests": [{"EventId": event["EventId"]}]})
'''
SUITE = """\
import pytest
import shop


@pytest.mark.scheduled_events(intercept="web-0")
def test_the_shop_drains_before_a_reboot(scheduled_events):
    event, drained = scheduled_events.vm("web-0").reboot(), []
    shop.handle(lambda: drained.append(event.status))
    assert (drained, event.status, event.approved_by) == (["Scheduled"], "Started", "web-0")
"""


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Run as a user would: no variables of this test run."""
    ours = ("PYTHON", "PYTEST", "VIRTUAL_ENV", "FOREWARN")
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because the build writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    files = run("git", "ls-files", "--", "src", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT)
    for name in files.split():
        if (ROOT / name).exists():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "-w", folder, folder / "copy", cwd=folder)
    return next(folder.glob("*.whl"))


def make_environment(folder: Path) -> Path:
    """An empty virtual environment; returns its folder of programs."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv" / "bin"


@pytest.mark.system
def test_unmodified_handler_is_under_test_beside_another_uvicorn(
    wheel: Path, tmp_path: Path
) -> None:
    files = {"pyproject.toml": APPLICATION, "shop.py": HANDLER, "test_shop.py": SUITE}
    for name, text in {**files, "conftest.py": GUARD}.items():
        (tmp_path / name).write_text(text)
    programs = make_environment(tmp_path)

    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--editable", ".", f"forewarn[lab] @ {wheel.as_uri()}", "pytest", cwd=tmp_path)
    output = run(programs / "pytest", "-q", cwd=tmp_path)

    assert "1 passed" in output
    installed = run(programs / "pip", "list", "--format=freeze", cwd=tmp_path)
    assert "uvicorn==0.34.3\n" in installed
    assert "uvloop" not in installed
    assert "prometheus" not in installed
    passed = run(programs / "forewarn", "lab", "run", "host-reboot", "--quiet", cwd=tmp_path)
    assert "host-reboot passed" in passed


@pytest.mark.system
def test_bare_install_has_no_dependency_and_works(wheel: Path, tmp_path: Path) -> None:
    """The guest in a VM: the agent, the client and conformance."""
    programs = make_environment(tmp_path)
    python = programs / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel, cwd=tmp_path)

    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    names = {line.partition("==")[0] for line in installed.splitlines() if "==" in line}
    assert names <= {"forewarn", "pip", "setuptools"}
    for command in (
        (python, "-m", "forewarn.agent", "--version"),
        (programs / "forewarn", "--version"),
        (programs / "forewarn", "conform", "--list"),
        (python, "-c", "from forewarn.client import Client; print(Client())"),
    ):
        assert run(*command, cwd=tmp_path)
    refused = run(programs / "forewarn", "demo", cwd=tmp_path, code=1)
    assert refused == (
        "forewarn: this command needs pip install 'forewarn[server]';"
        " without it there are `forewarn agent` and `forewarn conform`\n"
    )
