"""Which file systems only this host has, and which ones hosts share. Reads the mount table, and
touches no remote one.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")
MOUNT_POINT, SEPARATOR = 4, "-"
"""The place of the mount point in a line, and what comes before the type of its file system."""
ESCAPED = re.compile(r"\\([0-7]{3})")
LOCAL = frozenset(
    (
        *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay"),
        *("ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"),
    )
)
"""File systems that two hosts cannot use at the same time, so that a path in them is another file
on another host. Of the others (NFS, CephFS, GFS2, whatever is in FUSE) that is not certain.
"""

SHARED = frozenset(
    (
        *("beegfs", "ceph", "cifs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "gfs2"),
        *("gpfs", "lustre", "nfs", "nfs4", "ocfs2", "smb3"),
    )
)
"""File systems that other hosts use at the same time."""


@dataclass(frozen=True)
class MountTable:
    """The type of the file system at each mount point; without any, nothing is certainly local."""

    types: Mapping[str, str] = field(default_factory=dict)

    def local_type(self, path: str) -> str:
        """The type of the file system of a path if only this host has it; empty if it may be
        shared.

        Empty also if the path is not visible to this process, or has a symbolic link, which may
        lead elsewhere. Each folder is looked at only if it is local, so that a file server that
        hangs delays nothing.
        """
        kind, place = self.types.get("/", ""), ""
        for name in os.path.normpath(path).split("/")[1:]:
            place = f"{place}/{name}"
            kind = self.types.get(place, kind)
            if kind not in LOCAL or not _is_visible(Path(place)):
                return ""
        return kind

    def shared_type(self, path: str) -> str:
        """The type of the file system of a path if other hosts use it, too; empty if that is not
        certain. Looks at no folder.
        """
        kind, place = self.types.get("/", ""), ""
        for name in os.path.normpath(path).split("/")[1:]:
            place = f"{place}/{name}"
            kind = self.types.get(place, kind)
        return kind if kind in SHARED else ""


def _is_visible(place: Path) -> bool:
    """Whether this process sees a file or folder there, and no symbolic link."""
    try:
        return not place.is_symlink() and place.exists()
    except OSError:  # such as a home folder that the user of the daemon cannot enter
        return False


NO_MOUNTS = MountTable()


def read_mounts(table: Path = MOUNT_TABLE) -> MountTable:
    """The mounts that this process sees; none if there is no such table. The last one at a mount
    point hides the others.

    The kernel escapes a space, tab or newline in a name, and nothing else that Python takes for
    white space or the end of a line.
    """
    try:
        lines = os.fsdecode(table.read_bytes()).split("\n")
    except OSError:
        return NO_MOUNTS
    types = dict[str, str]()
    for line in lines:
        fields = line.split(" ")
        with suppress(LookupError, ValueError):  # a line that is not as expected is left out
            kind = fields[fields.index(SEPARATOR) + 1]
            types[ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[MOUNT_POINT])] = kind
    return MountTable(types)
