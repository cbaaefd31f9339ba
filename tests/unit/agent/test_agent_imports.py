"""What the agent loads, in a fresh process: each module stays in the memory of every guest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RULE = '[[rule]]\nname = "all"\nprepare = [{log = "x"}, {run = ["true"]}]\n'
HEAVY = {
    "asyncio", "ssl", "email", "http.client", "http.server", "urllib.request",
    "httpx", "litestar", "msgspec", "rich", "typer", "uvicorn", "yaml",
}  # fmt: skip
"""asyncio and ssl alone are 5.7 MB, a third of the agent."""
ENTRIES = {
    "the module": "from forewarn.agent.__main__ import main; main(sys.argv[1:])",
    "the forewarn command": "from forewarn.cli.main import run; run(['agent', *sys.argv[1:]])",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_agent_loads_no_module_that_costs_megabytes(entry: str, tmp_path: Path) -> None:
    """The agent has its own HTTP reader so that it stays below 20 MB. One careless import of a
    shared module undoes that."""
    config = tmp_path / "agent.toml"
    config.write_text(RULE)
    code = f"import json, sys; {ENTRIES[entry]}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--config", str(config)],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))

    assert {"forewarn.agent.daemon", "forewarn.client.client"} <= loaded
    assert loaded & HEAVY == set()
