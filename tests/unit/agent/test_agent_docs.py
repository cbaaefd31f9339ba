"""The agent's page: every configuration in it is one that the agent takes, and every key and option
stands there.
"""

import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from forewarn.agent import settings
from forewarn.agent.__main__ import main
from forewarn.agent.config_reader import settings_of
from forewarn.agent.participant_socket import ParticipantSocket
from forewarn.agent.participants import Participants
from forewarn.agent.rules import PlannedStep, Rule
from forewarn.agent.settings import AgentSettings
from forewarn.agent.steps.base import WorkflowPhase
from forewarn.client import Event

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "agent.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
USES = (
    *("Checkpoint and restore", "Connection draining", "Primary failover"),
    *("Removal from a load balancer", "Event logging", "Graceful shutdown"),
)


@pytest.mark.parametrize("text", BLOCKS, ids=map(str, range(len(BLOCKS))))
def test_every_configuration_in_the_page_is_valid(text: str) -> None:
    """Users copy them."""
    assert settings.parse(text, "docs/agent.md").rules


@pytest.mark.parametrize("use", USES)
def test_each_of_the_six_uses_has_a_configuration(use: str) -> None:
    part = PAGE.partition(f"\n### {use}\n")[2]

    assert "```toml" in re.split(r"\n##", part)[0]


@pytest.mark.parametrize(
    "key",
    sorted({*settings_of(AgentSettings), *settings_of(Rule), *settings_of(PlannedStep)} - {"step"}),
)
def test_every_key_of_the_file_is_documented(key: str) -> None:
    assert f"\n| `{key}` |" in PAGE


@pytest.mark.parametrize("command", ["run", "status", "check"])
def test_every_option_of_a_command_is_documented(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    line = next(
        line for line in PAGE.splitlines() if line.startswith(f"| `forewarn agent {command}")
    )

    assert options == set(re.findall(r"--[a-z-]+", line))


def test_program_in_the_page_works() -> None:
    """It extends its time, does its work, gets ready, and is notified of recover."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "socket")
        source = PROGRAM.replace("/run/forewarn-agent/socket", str(path))
        is_flushing, may_go_on, is_warm = threading.Event(), threading.Event(), threading.Event()

        def flush() -> None:
            is_flushing.set()
            may_go_on.wait(20)

        programs = Participants()
        opened = ParticipantSocket(path, programs, dict)
        event = Event("E1", "Reboot", "Scheduled")
        programs.begin(event, WorkflowPhase.PREPARE, time.monotonic() + 900)
        program = threading.Thread(
            target=exec,
            args=(source, {"flush_everything": flush, "warm_up_the_cache": is_warm.set}),
        )
        program.start()

        assert is_flushing.wait(20)
        assert not programs.all_ready("E1")
        may_go_on.set()
        assert any(programs.all_ready("E1") or is_warm.wait(0.01) for _ in range(2000))
        programs.begin(event, WorkflowPhase.RECOVER, time.monotonic() + 300)
        assert is_warm.wait(20)
        opened.close()
        program.join(20)


@pytest.mark.system
def test_unit_for_systemd_is_valid() -> None:
    """systemd ignores keys that it does not know. Needs Debian's package systemd."""
    unit = ROOT / "deploy" / "forewarn-agent.service"
    found = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False
    )

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
