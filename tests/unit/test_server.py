"""What the service does while it is put together."""

import logging
import os
from pathlib import Path

import pytest

from forewarn.server import warn_of_readable_store


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_store_that_others_can_read_is_a_warning_with_the_command_that_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Earlier versions made it so. Its owner may want it like this, so it is not changed."""
    path = tmp_path / "store.db"
    path.touch()
    path.chmod(mode)

    warn_of_readable_store(f"sqlite:///{path}")

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.facts == {"file": str(path), "mode": f"{mode:04o}", "fix": f"chmod 600 {path}"}  # type: ignore[attr-defined]
    assert os.stat(path).st_mode & 0o777 == mode


def test_a_store_that_nobody_else_can_read_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store.db"
    path.touch(0o600)

    warn_of_readable_store(f"sqlite:///{path}")
    warn_of_readable_store("memory")

    assert caplog.records == []
