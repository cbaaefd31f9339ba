"""The page of the platforms says what is so."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forewarn.cli.app import app
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import ScopeKind
from forewarn.option_kind import PLACEHOLDERS
from forewarn.platform.libvirt.domain_xml import NAMESPACE, parse

PAGE = (Path(__file__).parents[3] / "docs" / "platforms.md").read_text()
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_every_placeholder_is_documented() -> None:
    rows = re.findall(r"^\| `\{(\w+)\}` \| `(\w+)` \|", PAGE, re.MULTILINE)

    assert rows == [(name, f"FOREWARN_{name.upper()}") for name in PLACEHOLDERS]
    assert [cause for cause in Cause if f"`{cause}`" not in PAGE] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_documented_example_is_accepted(example: str, tmp_path: Path) -> None:
    (tmp_path / "forewarn.toml").write_text(example)
    result = CliRunner().invoke(app, ["--config", str(tmp_path / "forewarn.toml"), "config"])

    assert result.exception is None


def test_the_examples_of_other_systems_have_a_command_for_every_type() -> None:
    complete = [
        example for example in EXAMPLES if all(f'"{type_}=' in example for type_ in EventType)
    ]

    assert len(complete) == 3


def test_every_documented_redeploy_follows_the_policy_of_the_scope() -> None:
    """A VM with `redeploy: cold` may break if it is migrated live."""
    scripts = re.findall(r"`/usr/local/bin/(\S+)`:\n\n```sh\n(.*?)```", PAGE, re.DOTALL)
    follows = {name for name, script in scripts if '"$FOREWARN_METHOD" = cold' in script}
    redeploys = [
        command
        for example in EXAMPLES
        for command in tomllib.loads(example).get("exec_command", ())
        if command.startswith("Redeploy=")
    ]

    assert len(redeploys) == 3
    for command in redeploys:
        assert "{method} = cold" in command or command.rpartition("/")[2] in follows


def test_every_shell_script_of_the_examples_can_be_parsed() -> None:
    """They are pasted; a quote too few would show only when a VM is to be moved."""
    commands = [
        line for example in EXAMPLES for line in tomllib.loads(example).get("exec_command", ())
    ]
    words = [shlex.split(command.partition("=")[2]) for command in commands]
    scripts = [command[2] for command in words if command[:2] == ["sh", "-c"]] + re.findall(
        r"```sh\n(.*?)```", PAGE, re.DOTALL
    )

    assert len(scripts) >= 10
    for script in scripts:
        checked = subprocess.run(
            ["sh", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, ""), script


def test_documented_metadata_is_parsed() -> None:
    (sample,) = re.findall(r"```xml\n(.*?)```", PAGE, re.DOTALL)

    outcome = parse(
        f"<domain><name>web-1</name>{sample}</domain>", host="", is_active=True, leases={}
    )

    assert (outcome.scope, outcome.kind, outcome.update_domain, outcome.fault_domain) == (
        "web",
        ScopeKind.AVAILABILITY_SET,
        1,
        0,
    )
    assert NAMESPACE in sample
