"""What the command line makes of a campaign that it is shown."""

import pytest

from forewarn.cli.campaign import is_all_done


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
def test_a_watch_ends_well_only_if_every_host_has_had_its_maintenance(state: str, hosts: dict[str, int], expected: bool) -> None:
    """A script goes on by the exit code: a host that was skipped still has its old kernel."""
    assert is_all_done({"state": state, "hosts": hosts}) is expected
