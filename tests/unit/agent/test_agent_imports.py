"""What the agent loads, in a fresh process: each module stays in the memory of every guest."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.unit.cli.test_api import serving

CONFIG = """
name = "web-0"
journal = "{folder}/journal"
socket = "{folder}/socket"
[[rule]]
name = "all"
approve = "when-prepared"
prepare = [{{log = "x"}}, {{run = ["true"]}}]
"""
DOCUMENT = {
    "DocumentIncarnation": 1,
    "Events": [
        {
            "EventId": "A",
            "EventType": "Reboot",
            "EventStatus": "Scheduled",
            "ResourceType": "VirtualMachine",
            "Resources": ["web-0"],
            "NotBefore": "Thu, 31 Jan 2030 12:00:00 GMT",
        }
    ],
}
HEAVY = {
    "asyncio", "ssl", "email", "http.client", "http.server", "urllib.request",
    "httpx", "litestar", "msgspec", "rich", "typer", "uvicorn", "yaml",
}  # fmt: skip
"""asyncio and ssl alone are 5.7 MB, more than a quarter of the agent."""
ENTRIES = {
    "the module": "from forewarn.agent.__main__ import main; main(sys.argv[1:])",
    "the forewarn command": "from forewarn.cli.main import run; run(['agent', *sys.argv[1:]])",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_agent_loads_no_module_that_costs_megabytes(entry: str, tmp_path: Path) -> None:
    """The agent has its own HTTP reader so that it stays at about 20 MB. One careless import, of a
    shared module or only when an event is handled, undoes that. `--once` handles an event as a run
    without it does: it polls, runs the steps, approves and writes its journal.
    """
    config, approvals = tmp_path / "agent.toml", list[bytes]()
    config.write_text(CONFIG.format(folder=tmp_path))

    class Endpoint(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(DOCUMENT).encode() if self.command == "GET" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            approvals.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    code = f"import json, sys; {ENTRIES[entry]}; print(json.dumps(sorted(sys.modules)))"
    with serving(Endpoint) as url:
        done = subprocess.run(
            [sys.executable, "-c", code, "run", "--once", "--config", config, "--endpoint", url],
            capture_output=True,
            text=True,
            check=True,
        )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))

    assert approvals == [b'{"StartRequests": [{"EventId": "A"}]}'], done.stderr
    assert loaded & HEAVY == set()
