"""Which files only this host has."""

import subprocess
import sys
from pathlib import Path

import pytest

from forewarn.platform.file_systems import MountTable, read_mounts

AS_ANOTHER_USER = """
import os, sys
from forewarn.platform.file_systems import MountTable
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(repr(MountTable({"/": "ext4"}).local_type(sys.argv[1])))
"""
LINE = "{number} 1 0:{number} / {place} rw,relatime shared:1 - {kind} source rw\n"


def table(folder: Path, **mounts: str) -> MountTable:
    """The mount table with these types of file systems in folders of `folder`; its own is ext4."""
    places = {"/": "ext4"} | {f"{folder}/{name}": kind for name, kind in mounts.items()}
    lines = [
        LINE.format(number=number, place=place.replace(" ", "\\040"), kind=kind)
        for number, (place, kind) in enumerate(places.items(), 20)
    ]
    (folder / "mountinfo").write_text("".join(lines))
    return read_mounts(folder / "mountinfo")


def disk(folder: Path, *path: str) -> str:
    file = folder.joinpath(*path, "disk.img")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return str(file)


def test_file_on_a_local_file_system_is_local(tmp_path: Path) -> None:
    path = disk(tmp_path, "images")

    assert table(tmp_path).local_type(path) == "ext4"
    assert table(tmp_path, images="xfs").local_type(path) == "xfs"


def test_file_on_a_shared_or_unknown_file_system_is_not_certainly_local(tmp_path: Path) -> None:
    path = disk(tmp_path, "images", "web")

    for kind in ("nfs4", "ceph", "fuse.glusterfs", "gfs2", "somefs"):
        assert table(tmp_path, images=kind).local_type(path) == ""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "ceph", "fuse.glusterfs", "gfs2", "ocfs2", "cifs"])
def test_file_on_a_network_file_system_is_shared(tmp_path: Path, kind: str) -> None:
    """Also if it is not there, because nothing is looked at: a file server may hang."""
    assert table(tmp_path, images=kind).shared_type(f"{tmp_path}/images/web/disk.img") == kind
    assert table(tmp_path, images=kind).shared_type(f"{tmp_path}/disk.img") == ""


@pytest.mark.parametrize("kind", ["ext4", "somefs", "fuse"])
def test_file_on_a_local_or_unknown_file_system_is_not_certainly_shared(
    tmp_path: Path, kind: str
) -> None:
    path = disk(tmp_path, "images")
    assert table(tmp_path, images=kind).shared_type(path) == ""
    assert MountTable().shared_type(path) == ""


def test_mount_point_with_a_space_is_understood(tmp_path: Path) -> None:
    path = disk(tmp_path, "vm images")

    assert table(tmp_path, **{"vm images": "nfs"}).local_type(path) == ""


def test_last_mount_hides_the_ones_below(tmp_path: Path) -> None:
    path, file = disk(tmp_path, "images"), tmp_path / "two"
    lines = [LINE.format(number=n, place="/", kind=kind) for n, kind in ((1, "ext4"), (2, "nfs"))]
    file.write_text("".join(lines))

    assert read_mounts(file).local_type(path) == ""


def test_path_with_a_link_may_lead_elsewhere(tmp_path: Path) -> None:
    disk(tmp_path, "real")
    (tmp_path / "images").symlink_to(tmp_path / "real")

    assert table(tmp_path).local_type(f"{tmp_path}/images/disk.img") == ""


def test_path_that_is_not_visible_here_may_be_anything(tmp_path: Path) -> None:
    assert table(tmp_path).local_type(f"{tmp_path}/images/disk.img") == ""


def test_path_that_this_user_may_not_enter_may_be_anything(tmp_path: Path) -> None:
    """One image in a home folder must not hide all other VMs of the host."""
    path = disk(tmp_path, "home", "images")
    (tmp_path / "home").chmod(0)
    try:
        command = [sys.executable, "-c", AS_ANOTHER_USER, path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        (tmp_path / "home").chmod(0o755)

    assert (done.stdout, done.stderr) == ("''\n", "")


@pytest.mark.parametrize("mark", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u00a0"])
def test_mount_point_may_have_any_character(tmp_path: Path, mark: str) -> None:
    """Any user with a USB stick or a user namespace can name a mount point."""
    path = disk(tmp_path, "images")
    found = table(tmp_path, **{f"stick{mark}x": "vfat", "images": "xfs"})

    assert found.types[f"{tmp_path}/stick{mark}x"] == "vfat"
    assert found.local_type(path) == "xfs"


def test_mount_point_that_is_not_text_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    file.write_bytes(
        LINE.format(number=1, place="/m", kind="nfs").encode().replace(b"/m", b"/\xff")
    )

    assert read_mounts(file).types == {"/\udcff": "nfs"}


def test_line_that_is_not_a_mount_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(
        f"1 2\n20 1 0:20 / /x rw -\n20 - \n{LINE.format(number=1, place='/', kind='xfs')}"
    )

    assert read_mounts(file).types == {"/": "xfs"}


def test_nothing_is_local_without_a_mount_table(tmp_path: Path) -> None:
    assert read_mounts(tmp_path / "none").local_type(disk(tmp_path)) == ""


def test_mount_table_of_this_machine_is_readable() -> None:
    assert "/" in read_mounts().types
