"""Who may write the files that the agent obeys or runs. The agent refuses what ssh refuses."""

import errno
import grp
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from forewarn.agent.__main__ import main
from forewarn.agent.ownership import check_ownership
from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed
from forewarn.errors import Invalid
from tests.unit.agent.steps.build import context, script

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    """A directory with one hook, which leaves a file behind."""
    directory = tmp_path / "hooks.d"
    (directory / "prepare.d").mkdir(parents=True)
    script(directory / "prepare.d" / "drain", f"touch {tmp_path}/ran")
    return directory


@pytest.fixture
def config(tmp_path: Path, hooks: Path) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(f"hooks = '{hooks}'\n[[rule]]\nname = 'r'\n")
    return path


@pytest.mark.parametrize(
    ("changed", "mode"),
    [
        ("hooks.d", 0o777),
        ("hooks.d/prepare.d", 0o777),
        ("hooks.d/prepare.d", 0o757),
        ("hooks.d", 0o1777),
        ("hooks.d/prepare.d", 0o1777),
        ("hooks.d/prepare.d/drain", 0o757),
        ("agent.toml", 0o646),
    ],
)
def test_check_and_run_refuse_what_others_may_write(
    config: Path, capsys: pytest.CaptureFixture[str], changed: str, mode: int
) -> None:
    """Every user of the machine could run commands with the rights of the agent."""
    path = config.parent / changed
    path.chmod(mode)

    for command in ("check", "run"):
        assert main([command, "--config", str(config)]) == 2
        error = capsys.readouterr().err
        assert f"{path} has the mode {mode:04o}, so other users could change" in error
        assert error.endswith(f": chmod go-w {path}\n")


@needs_root
@pytest.mark.parametrize(
    "changed", ["hooks.d", "hooks.d/prepare.d", "hooks.d/prepare.d/drain", "agent.toml", "."]
)
def test_check_refuses_what_belongs_to_another_user(
    config: Path, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    path = config.parent / changed
    os.chown(path, NOBODY, -1)

    assert main(["check", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert f"{path} belongs to the user nobody" in error
    assert error.endswith(f": chown root {path}\n")


def test_hook_that_was_changed_after_the_start_does_not_run(tmp_path: Path, hooks: Path) -> None:
    """The agent runs for months. The other hooks run."""
    script(hooks / "prepare.d" / "other", f"touch {tmp_path}/other-ran")
    (hooks / "prepare.d" / "drain").chmod(0o777)

    with pytest.raises(StepFailed, match=r"^drain was not run: .* has the mode 0777"):
        make_step("hooks", str(hooks), "W").run(context())

    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "other-ran").exists()


def test_hook_in_a_folder_to_which_others_may_add_does_not_run(tmp_path: Path, hooks: Path) -> None:
    """Where hard links are not protected, another user could add a program of root under a name of
    their choice. The sticky bit only keeps them from replacing what is there.
    """
    (hooks / "prepare.d").chmod(0o1777)

    with pytest.raises(StepFailed, match=r"^drain was not run: .*/prepare\.d has the mode 1777"):
        make_step("hooks", str(hooks), "W").run(context())

    assert not (tmp_path / "ran").exists()


def test_hooks_below_a_sticky_folder_are_accepted(tmp_path: Path, hooks: Path) -> None:
    tmp_path.chmod(0o1777)
    (hooks / "start.d").symlink_to("prepare.d")

    for path in (hooks, hooks / "prepare.d", hooks / "start.d", hooks / "prepare.d" / "drain"):
        check_ownership(path, is_run=True)


def test_link_is_as_safe_as_each_folder_on_its_way(tmp_path: Path, hooks: Path) -> None:
    """A link into a folder of everybody can be pointed elsewhere by everybody."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    (shared / "middle").symlink_to(hooks / "prepare.d" / "drain")
    (hooks / "prepare.d" / "link").symlink_to("../../shared/middle")

    check_ownership(hooks / "prepare.d" / "drain")
    with pytest.raises(Invalid, match=f"^{shared} has the mode 0777"):
        check_ownership(hooks / "prepare.d" / "link")


def test_parent_of_a_link_is_the_parent_of_its_target(tmp_path: Path) -> None:
    """`link/../drain` is beside the target of the link, where the kernel looks for it."""
    shared = tmp_path / "shared"
    (shared / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to(shared / "folder")
    (tmp_path / "drain").touch()
    script(shared / "drain", "true")
    (shared / "drain").chmod(0o777)

    with pytest.raises(Invalid, match=f"^{shared}/drain has the mode 0777"):
        check_ownership(tmp_path / "link" / ".." / "drain")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    check_ownership(tmp_path / "a")  # opening it fails


def test_sticky_folder_is_accepted(tmp_path: Path) -> None:
    """In /tmp, only the owner of a file can replace it, and the owner of the file is checked."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "agent.toml").write_text("")

    check_ownership(shared / "agent.toml")


@needs_root
def test_file_writable_by_a_group_is_refused_if_it_has_other_members(tmp_path: Path) -> None:
    """Many distributions make a group for each user, and files that it may write."""
    path = tmp_path / "agent.toml"
    path.write_text("")
    path.chmod(0o664)
    primary = [user.pw_name for user in pwd.getpwall() if user.pw_gid == 0]
    if [*primary, *grp.getgrgid(0).gr_mem] == ["root"]:
        check_ownership(path)
    os.chown(path, 0, 54321)  # no such group, so its members are unknown

    with pytest.raises(Invalid, match="has the mode 0664"):
        check_ownership(path)


@needs_root
def test_file_writable_by_the_primary_group_of_another_user_is_refused(tmp_path: Path) -> None:
    """Such a user is in no list of members."""
    nobody = pwd.getpwuid(NOBODY)
    assert nobody.pw_name not in grp.getgrgid(nobody.pw_gid).gr_mem
    path = tmp_path / "agent.toml"
    path.write_text("")
    path.chmod(0o664)
    os.chown(path, 0, nobody.pw_gid)

    with pytest.raises(Invalid, match="has the mode 0664"):
        check_ownership(path)


def let_write(path: Path, user: int) -> None:
    """As `setfacl -m u:USER:rwx`: the mode of a file shows the mask of its ACL as the group's."""
    version, undefined = 2, 0xFFFFFFFF
    user_obj, named_user, group_obj, mask, other = 0x01, 0x02, 0x04, 0x10, 0x20
    entries = (
        (user_obj, 7, undefined),
        (named_user, 7, user),
        (group_obj, 5, undefined),
        (mask, 7, undefined),
        (other, 5, undefined),
    )
    acl = struct.pack("<I", version) + b"".join(struct.pack("<HHI", *each) for each in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip(f"the file system of {path} has no POSIX ACLs")
    assert path.stat().st_mode & 0o777 == 0o775


@needs_root
@pytest.mark.parametrize(
    "changed", ["hooks.d", "hooks.d/prepare.d", "hooks.d/prepare.d/drain", "agent.toml"]
)
def test_check_refuses_what_an_acl_lets_others_write(
    config: Path, capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    """The group of root has no other members, and the mode does not show the user."""
    path = config.parent / changed
    let_write(path, NOBODY)

    assert main(["check", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert f"{path} has an ACL (see getfacl) and the mode 0775, so other users could" in error
    assert error.endswith(f": chmod go-w {path}\n")
    path.chmod(0o755)
    assert main(["check", "--config", str(config)]) == 0


@pytest.mark.system
@needs_root
@pytest.mark.parametrize(
    ("members", "is_refused"), [("", False), ("root", False), ("root,nobody", True)]
)
def test_file_writable_by_a_group_is_refused_if_it_lists_another_member(
    tmp_path: Path, members: str, is_refused: bool
) -> None:
    """No user has it as their primary group: only its list of members decides."""
    groups, file = tmp_path / "group", tmp_path / "agent.toml"
    groups.write_text(f"{Path('/etc/group').read_text()}shared:x:54321:{members}\n")
    file.write_text("")
    file.chmod(0o664)
    os.chown(file, 0, 54321)
    check = (
        "from pathlib import Path; from forewarn.agent.ownership import check_ownership;"
        f"check_ownership(Path('{file}'))"
    )
    steps = f'mount --bind {groups} /etc/group && {sys.executable} -c "{check}"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", steps],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode != 0) == is_refused, done.stderr
    assert ("has the mode 0664" in done.stderr) == is_refused


@pytest.mark.system
@needs_root
def test_read_only_file_system_is_accepted(tmp_path: Path) -> None:
    """Kubernetes mounts a ConfigMap with the mode 0777, and read-only."""
    check = (
        "from pathlib import Path; from forewarn.agent.ownership import check_ownership;"
        f"check_ownership(Path('{tmp_path}/mount/agent.toml'))"
    )
    steps = (
        f"mkdir {tmp_path}/mount && mount -t tmpfs -o mode=777 none {tmp_path}/mount",
        f"cd {tmp_path}/mount && touch agent.toml && cd /",
        f'! {sys.executable} -c "{check}" 2> /dev/null',
        f"mount -o remount,ro {tmp_path}/mount",
        f'{sys.executable} -c "{check}"',
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", " && ".join(steps)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
