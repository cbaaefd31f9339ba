"""Everything that the description allows, and much that it does not, asked of a real service: no
5xx, nothing undocumented.
"""

import subprocess
import sys
from pathlib import Path

from tests.e2e.cli_service import FLEET, Service, environment, running

ST = str(Path(sys.executable).with_name("st"))
SECONDS_MAX = 300
CREATE = "POST /api/v1/tokens"
"""Comes last: once there is a token, everything else needs it."""
UNFIT = "positive_data_acceptance"
"""The rules may refuse what is well-formed: a moment that is too near, a key that came before."""
ENDLESS = "/api/v1/stream"


def ask(service: Service, folder: Path, *which: str, examples_max: int) -> str:
    """What it said; it has found nothing wrong."""
    checks = ("--checks", "all", "--exclude-checks", UNFIT, "--phases", "examples,coverage,fuzzing")
    bounds = ("--max-examples", str(examples_max), "--seed", "1", "--workers", "1")
    asked = subprocess.run(
        [ST, "run", f"{service.control}/api/openapi.json", *which, *checks, *bounds],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout[-20_000:] + asked.stderr
    return asked.stdout


def test_no_request_gets_a_5xx_or_an_answer_that_is_not_described(tmp_path: Path) -> None:
    """Statuses, bodies, content types, error codes and Allow are as /api/openapi.json says,
    whatever is asked.
    """
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with running(tmp_path, "serve", "--fleet", "fleet.yaml", "--store", "memory") as service:
        said = ask(
            service, tmp_path, "--exclude-name", CREATE, "--exclude-path", ENDLESS, examples_max=20
        )
        tokens = ask(service, tmp_path, "--include-name", CREATE, examples_max=5)
        service.process.terminate()
        log = service.process.communicate(timeout=30)[1]

    assert " passed" in said
    assert "Authentication failed" not in said, "every operation was reached"
    assert " passed" in tokens
    assert "request failed" not in log
