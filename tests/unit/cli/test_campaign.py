"""Exit codes of `forewarn campaign`."""

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
def test_watch_succeeds_only_if_every_host_is_done(
    state: str, hosts: dict[str, int], expected: bool
) -> None:
    """A script relies on the exit code: a skipped host still has its old kernel."""
    assert is_all_done({"state": state, "hosts": hosts}) is expected
