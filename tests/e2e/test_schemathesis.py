"""Generated requests against a real service: no 5xx, and no undocumented response."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.cli_service import FLEET, Service, environment, running

ST = str(Path(sys.executable).with_name("st"))
SECONDS_MAX = 300
TOKENS = ("POST /api/v1/tokens", "POST /api/v1/session")
"""Come last: once there is a token, everything else needs it, and a wrong one is a 401."""
UNFIT = "positive_data_acceptance"
"""The rules may reject valid input: a time that is too early, a key that was used."""
ENDLESS = "/api/v1/stream"
DAEMONS = "Host daemons"
"""Only the token of a host reaches them: see `tests/unit/web/control/routes/test_hostd.py`."""


def run_schemathesis(service: Service, folder: Path, *which: str, examples_max: int) -> str:
    """The output of a run that found nothing wrong."""
    checks = ("--checks", "all", "--exclude-checks", UNFIT, "--phases", "examples,coverage,fuzzing")
    bounds = ("--max-examples", str(examples_max), "--seed", "1", "--workers", "1")
    run = subprocess.run(
        [ST, "run", f"{service.control}/api/openapi.json", *which, *checks, *bounds],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr
    return run.stdout


def test_every_response_matches_the_openapi_document(tmp_path: Path) -> None:
    """Statuses, bodies, content types, error codes and Allow are as /api/openapi.json says,
    whatever is asked.
    """
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with running(tmp_path, "serve", "--fleet", "fleet.yaml", "--store", "memory") as service:
        others = [word for name in TOKENS for word in ("--exclude-name", name)]
        others += ["--exclude-path", ENDLESS, "--exclude-tag", DAEMONS]
        output = run_schemathesis(service, tmp_path, *others, examples_max=10)
        last = [word for name in TOKENS for word in ("--include-name", name)]
        tokens = run_schemathesis(service, tmp_path, *last, examples_max=5)
        service.process.terminate()
        log = service.process.communicate(timeout=30)[1]

    assert " passed" in output
    assert "Authentication failed" not in output, "every operation was reached"
    assert " passed" in tokens
    assert "request failed" not in log
