"""The warning about a host without libvirt's lock manager."""

from pathlib import Path

import pytest

from forewarn.hostd.disk_lock import find_missing_lock
from forewarn.option_kind import HostUri

ALONE = [HostUri("", "qemu:///system")]
SHARED = [*ALONE, HostUri("", "qemu+tls://{host}/system")]


@pytest.mark.parametrize("content", ["", '#lock_manager = "lockd"\n', 'lock_manager = "nop"\n'])
def test_host_that_reaches_others_without_a_lock_manager_is_named(
    tmp_path: Path, content: str
) -> None:
    """A VM that is started on two hosts destroys its disk."""
    path = tmp_path / "qemu.conf"
    path.write_text(content)
    problem = find_missing_lock(SHARED, path)
    assert problem.startswith(f"{path} has no lock_manager")
    assert "\n" not in problem
    assert find_missing_lock(ALONE, path) == "", "its VMs run nowhere else"


@pytest.mark.parametrize("name", ["lockd", "sanlock"])
def test_lock_manager_needs_no_warning(tmp_path: Path, name: str) -> None:
    path = tmp_path / "qemu.conf"
    path.write_text(f'# locks\nlock_manager = "{name}"\n')
    assert find_missing_lock(SHARED, path) == ""


def test_nothing_is_said_if_it_cannot_be_told(tmp_path: Path) -> None:
    """The file is readable by root only on most hosts, and the test driver has none."""
    assert find_missing_lock(SHARED, tmp_path / "none") == ""
    path = tmp_path / "qemu.conf"
    path.write_text("")
    others = [HostUri("host-a", "test:///a"), HostUri("host-b", "test:///b")]
    assert find_missing_lock(others, path) == ""
