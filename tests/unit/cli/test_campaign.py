"""What the command line makes of a campaign that it is shown."""

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
def test_a_watch_ends_well_only_if_every_host_has_had_its_maintenance(
    state: str, hosts: dict[str, int], expected: bool
) -> None:
    """A script goes on by the exit code: a host that was skipped still has its old kernel."""
    assert is_all_done({"state": state, "hosts": hosts}) is expected


@pytest.mark.parametrize("option", ["--health-command", "--health-seconds-max"])
def test_the_removed_health_options_say_where_they_are_now(option: str) -> None:
    """A script of an earlier version must not go on without its check, and must not search for the
    reason.
    """
    result = CliRunner().invoke(
        app, ["start", "--type", "Reboot", "--hosts", "rack-*", option, "1"]
    )

    assert isinstance(result.exception, Usage)
    assert result.exception.message == (
        f"{option} is an option of the server now: give it to `forewarn serve` as --campaign-{option.removeprefix('--')}"
    )
