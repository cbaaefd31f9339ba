"""Exit codes and removed options of `forewarn campaign`."""

import pytest
from typer.testing import CliRunner

from forewarn.cli.campaign import app, is_all_done
from forewarn.cli.exit_codes import Usage


@pytest.mark.parametrize(
    ("state", "hosts", "expected"),
    [
        ("done", {"total": 3, "done": 3, "skipped": 0, "failed": 0}, True),
        ("done", {"total": 3, "done": 2, "skipped": 1, "failed": 0}, False),
        ("done", {"total": 3, "done": 2, "skipped": 0, "failed": 1}, False),
        ("canceled", {"total": 3, "done": 3, "skipped": 0, "failed": 0}, False),
        ("paused", {"total": 3, "done": 3, "skipped": 0, "failed": 0}, False),
    ],
)
def test_watch_succeeds_only_if_every_host_is_done(
    state: str, hosts: dict[str, int], expected: bool
) -> None:
    """A script relies on the exit code: a skipped host still has its old kernel."""
    assert is_all_done({"state": state, "hosts": hosts}) is expected


@pytest.mark.parametrize("option", ["--health-command", "--health-seconds-max"])
def test_removed_health_option_names_its_replacement(option: str) -> None:
    """A script of version 0.1 must not continue without its health check."""
    result = CliRunner().invoke(
        app, ["start", "--type", "Reboot", "--hosts", "rack-*", option, "1"]
    )

    assert isinstance(result.exception, Usage)
    assert result.exception.message == (
        f"{option} is now an option of the server:"
        f" `forewarn serve --campaign-{option.removeprefix('--')} ...`"
    )
