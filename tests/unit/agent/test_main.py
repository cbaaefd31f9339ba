"""The agent's own command line: what it refuses, in one line and with which exit code."""

from pathlib import Path

import pytest

from forewarn.agent.__main__ import main

RULE = '[[rule]]\nname = "all"\napprove = "when-prepared"\nprepare = [{log = "x"}]\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(RULE)
    return path


def test_a_file_that_is_fine_is_said_to_be_with_its_rules(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(config)]) == 0
    assert capsys.readouterr().out == f"all: all types, approve when-prepared\n{config} is fine: 1 rule(s)\n"


def test_a_wrong_file_is_refused_with_its_line_and_field(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one line says where to look."""
    config.write_text(RULE.replace("when-prepared", "whenever"))

    assert main(["check", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"forewarn-agent: {config}:3: rule[0].approve: expected one of never, at-once")
    assert said.count("\n") == 1


def test_a_wrong_file_is_refused_before_anything_is_begun(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("journl = 1")

    assert main(["run", "--config", str(config)]) == 2
    assert "did you mean 'journal'?" in capsys.readouterr().err


def test_an_endpoint_that_is_none_is_refused(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", str(config), "--endpoint", "ftp://x"]) == 2
    assert "endpoint is 'ftp://x'" in capsys.readouterr().err


def test_no_agent_is_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where no service answers."""
    assert main(["status", "--socket", str(tmp_path / "socket")], program="forewarn agent") == 4
    assert capsys.readouterr().err.startswith("forewarn agent: no agent answers at ")


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run", "--confg", "x"], ["status", "more"]])
def test_a_command_line_that_makes_no_sense_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("forewarn-agent")
