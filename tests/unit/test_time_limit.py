"""Every test has a time limit: code that waits forever fails one test and does not block others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGING = {
    "a thread": "import threading\ndef test_it():\n    threading.Event().wait()\n",
    "an event loop": (
        "import asyncio\n"
        "async def spin():\n    while True:\n        await asyncio.sleep(0)\n"
        "def test_it():\n    asyncio.run(spin())\n"
    ),
}


def test_time_limit_is_set_for_all_tests(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("faulthandler_timeout")) >= 600
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True


@pytest.mark.parametrize("what", HANGING)
def test_hanging_test_fails_and_the_next_one_runs(what: str, tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING[what])
    (tmp_path / "test_next.py").write_text("def test_it():\n    pass\n")
    options = ("-c", str(ROOT / "pyproject.toml"), "-n", "1", "-o", "faulthandler_timeout=2")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "1 failed, 1 passed" in done.stdout
    assert "crashed while running" in done.stdout
    assert "Timeout (0:00:02)!" in done.stderr
