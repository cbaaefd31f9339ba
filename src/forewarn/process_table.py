"""Which processes of a group have not exited, as Linux lists them. Standard library only.

The id of a group is that of its first process, the leader. Once the leader is reaped and the group
is empty, the system may use that id again, and a signal to the group would reach a stranger. So a
leader that has exited is reaped after the last signal: while it is a zombie, its id stays taken.
"""

import os


def has_members(group: int) -> bool:
    """Whether a process of the group has not exited yet. False where there is no /proc, True
    if it cannot be listed for now.

    Not by signal 0: that reaches zombies, too. It reads all of /proc, so it takes a while.
    """
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return False
    except OSError:  # no file descriptor is left
        return True
    return any(_is_member(name, group) for name in names if name.isdigit())


def _is_member(pid: str, group: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):  # it is gone
        return False
    return int(its_group) == group and state not in (b"Z", b"X")
