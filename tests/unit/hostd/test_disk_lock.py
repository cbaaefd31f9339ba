"""The warning about a host without libvirt's lock manager."""

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from forewarn.errors import ImpactFailed
from forewarn.hostd import disk_lock
from forewarn.hostd.disk_lock import CREDENTIAL, MISSING, QEMU_CONF, RETRY_SECONDS
from forewarn.option_kind import HostUri

ALONE = [HostUri("", "qemu:///system")]
SHARED = [*ALONE, HostUri("", "qemu+tls://{host}/system")]
UNIT = Path(__file__).parents[3] / "deploy/forewarn-hostd.service"
NOT_LOCKED = "disks of VMs are not locked"
UNKNOWN = "cannot tell whether disks of VMs are locked"
LOCKD_CONF = "qemu-lockd.conf"
NOT_SHOWN = "cannot tell yet whether hosts share disks of VMs"


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forewarn")


def check_disk_lock(
    uris: list[HostUri],
    environ: dict[str, str],
    path: Path,
    shared: str = "",
    failures: int = 0,
    type_: str = "file",
) -> None:
    """`shared` is the disk that is found. Before, libvirt cannot be asked for it so many times."""
    left = failures

    async def find(types: Collection[str]) -> str:
        nonlocal left
        if left:
            left -= 1
            raise ImpactFailed("libvirt does not answer")
        return shared if type_ in types else ""

    async def sleep(seconds: float) -> None:
        assert seconds == RETRY_SECONDS

    asyncio.run(
        disk_lock.check_disk_lock(uris, environ, find, path, path.parent / LOCKD_CONF, sleep)
    )


def write(folder: Path, content: str, name: str = "qemu.conf") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def problems(caplog: pytest.LogCaptureFixture) -> list[str]:
    records: list[Any] = caplog.records
    return [record.facts["problem"] for record in records]


@pytest.mark.parametrize("content", ["", '#lock_manager = "lockd"\n', 'lock_manager = "nop"\n'])
def test_host_that_reaches_others_without_a_lock_manager_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """A VM that is started on two hosts destroys its disk."""
    path = write(tmp_path, content)
    check_disk_lock(ALONE, {}, path)
    assert caplog.messages == [], "its VMs run nowhere else"
    check_disk_lock(SHARED, {}, path)
    assert (caplog.messages, caplog.records[0].levelname) == ([NOT_LOCKED], "WARNING")
    (problem,) = problems(caplog)
    assert problem.startswith(f"{path} has no lock_manager")
    assert "\n" not in problem


DISK = "a disk of web-0, /mnt/web-0.img is on a shared file system (nfs4)"


def test_shared_disk_without_a_lock_manager_is_named_also_on_a_host_that_moves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Someone else may: with virsh, or by autostart on two hosts."""
    path = write(tmp_path, "")
    check_disk_lock(ALONE, {}, path, DISK)
    assert (caplog.messages, caplog.records[0].levelname) == ([NOT_LOCKED], "WARNING")
    records: list[Any] = caplog.records
    assert records[0].facts["shared"] == DISK
    caplog.clear()
    check_disk_lock(ALONE, {}, write(tmp_path, 'lock_manager = "lockd"'), DISK)
    assert caplog.messages == []


def test_daemon_that_starts_before_libvirt_warns_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_disk_lock(ALONE, {}, write(tmp_path, ""), DISK, failures=3)
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages == [NOT_SHOWN, NOT_LOCKED]
    assert problems(caplog)[0] == "libvirt does not answer"


def test_unreadable_file_matters_where_a_disk_is_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_disk_lock(ALONE, {}, tmp_path / "none")
    assert caplog.messages == []
    check_disk_lock(ALONE, {}, tmp_path / "none", DISK)
    assert caplog.messages == [UNKNOWN]


@pytest.mark.parametrize("name", ["lockd", "sanlock"])
def test_lock_manager_needs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = write(tmp_path, f'# locks\nlock_manager = "{name}"\n')
    check_disk_lock(SHARED, {}, path)
    assert caplog.messages == []


BLOCK_DISK = "a disk of web-0, /dev/vg/web-0 is a block device"
NETWORK_DISK = "a disk of web-0, pool/web-0 is a network disk (rbd)"


@pytest.mark.parametrize(("type_", "disk"), [("block", BLOCK_DISK), ("network", NETWORK_DISK)])
def test_disk_that_may_be_shared_without_a_lock_manager_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, type_: str, disk: str
) -> None:
    """Nothing says whether other hosts reach it."""
    check_disk_lock(ALONE, {}, write(tmp_path, ""), disk, type_=type_)
    assert caplog.messages == [NOT_LOCKED]


DEFAULT = '#file_lockspace_dir = "/var/lib/libvirt/lockd/files"\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory; it may have a lockspace directory for block devices"),
        (DEFAULT, "has no lockspace directory: virtlockd locks block devices on this host only"),
    ],
)
def test_block_device_without_a_lockspace_directory_may_be_unlocked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None, says: str
) -> None:
    """libvirt's own file: locks in /dev do not propagate across hosts."""
    path = write(tmp_path, 'lock_manager = "lockd"')
    if content is not None:
        write(tmp_path, content, LOCKD_CONF)
    check_disk_lock(ALONE, {}, path, DISK)
    assert caplog.messages == [], "files are locked"
    check_disk_lock(ALONE, {}, path, BLOCK_DISK, type_="block")
    assert (caplog.messages, caplog.records[0].levelname) == ([UNKNOWN], "INFO")
    assert says in problems(caplog)[0]


@pytest.mark.parametrize("kind", ["file", "lvm", "scsi"])
def test_lockspace_directory_needs_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    write(tmp_path, f'{kind}_lockspace_dir = "/mnt/locks"', LOCKD_CONF)
    path = write(tmp_path, 'lock_manager = "lockd"')
    check_disk_lock(ALONE, {}, path, BLOCK_DISK, type_="block")
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["lockd", "sanlock"])
def test_network_disk_is_not_locked_by_libvirt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """libvirt passes files, block devices and folders to a lock manager, and nothing else."""
    path = write(tmp_path, f'lock_manager = "{name}"')
    check_disk_lock(ALONE, {}, path, NETWORK_DISK, type_="network")
    assert caplog.messages == [UNKNOWN]
    assert problems(caplog) == ["libvirt's lock managers do not lock network disks"]


def test_other_drivers_have_no_lock_manager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [HostUri("host-a", "test:///a"), HostUri("host-b", "test:///b")]
    check_disk_lock(others, {}, write(tmp_path, ""))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("content", "messages"), [("", [NOT_LOCKED]), ('lock_manager="lockd"', [])]
)
def test_file_that_only_root_can_read_is_a_credential_of_the_unit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, messages: list[str]
) -> None:
    """The unit's user cannot read libvirt's configuration, so systemd passes a copy."""
    write(tmp_path, content, CREDENTIAL)
    check_disk_lock(SHARED, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, tmp_path / "unreadable")
    assert caplog.messages == messages
    assert all(str(tmp_path / "unreadable") in each for each in problems(caplog))


def test_unit_without_the_credential_leaves_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator's own unit may have other credentials only."""
    (tmp_path / "credentials").mkdir()
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path / "credentials")}
    check_disk_lock(SHARED, environ, write(tmp_path, ""))
    assert caplog.messages == [NOT_LOCKED]


@pytest.mark.parametrize("is_unit", [True, False])
def test_log_says_that_it_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_unit: bool
) -> None:
    """libvirt may run elsewhere, or its file cannot be read. Silence would look like a lock."""
    if is_unit:
        write(tmp_path, MISSING, CREDENTIAL)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)} if is_unit else {}
    check_disk_lock(SHARED, environ, tmp_path / "none")
    assert (caplog.messages, caplog.records[0].levelname) == ([UNKNOWN], "INFO")
    assert problems(caplog) == [f"{tmp_path / 'none'}: No such file or directory"]


def test_unreadable_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").mkdir()  # root may read any file
    check_disk_lock(SHARED, {}, tmp_path / "folder")
    assert caplog.messages == [UNKNOWN]
    assert problems(caplog) == [f"{tmp_path / 'folder'}: Is a directory"]


def test_unit_passes_the_file_and_starts_without_it() -> None:
    """systemd starts no unit whose credential is missing, unless that has a default."""
    lines = UNIT.read_text().splitlines()
    assert f"LoadCredential={CREDENTIAL}:{QEMU_CONF}" in lines
    assert f"SetCredential={CREDENTIAL}:{MISSING}" in lines
