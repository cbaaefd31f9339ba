"""`qemu+ssh` as the user of the service: the commands of docs/platforms.md, with a real sshd and a
real libvirtd, in namespaces of their own.
"""

import re
import subprocess
from pathlib import Path

from tests.vm.real_libvirt import real_hosts

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 120
SCRIPT = """
set -eu
ip link set lo up
cp -a /etc {folder}/etc && mount --bind {folder}/etc /etc
echo '127.0.0.1 localhost host-a host-b' > /etc/hosts
mount -t tmpfs -o mode=0755 tmpfs /var/lib
mount -t tmpfs -o mode=0700 tmpfs /root && mkdir -m 0700 /root/.ssh
systemd-sysusers {folder}/forewarn.sysusers
mkdir -p /run/sshd && ssh-keygen -q -A
/usr/sbin/sshd -D -e -o PermitRootLogin=prohibit-password -o UsePAM=no &
trap "kill $!" EXIT
until ssh-keyscan host-a 2> /dev/null | grep -q ssh-ed25519; do sleep 0.1; done
{prepare}
cp /var/lib/forewarn/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
{connect}
"""


def test_service_user_reaches_libvirt_through_ssh(tmp_path: Path) -> None:
    """Without an entry in the user database, ssh fails with "No user exists for uid"."""
    page = (ROOT / "docs/platforms.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    prepare, connect = (block for block in blocks if "runuser" in block)
    users = (ROOT / "deploy/forewarn.sysusers").read_bytes()
    (tmp_path / "forewarn.sysusers").write_bytes(users)
    script = SCRIPT.format(folder=tmp_path, prepare=prepare, connect=connect)

    with real_hosts("host-a") as hosts:
        host = hosts["host-a"]
        host.run_vm()
        limit = ("timeout", str(SECONDS_MAX))
        ended = subprocess.run(
            host.inside("unshare", "--mount", "--net", *limit, "sh", "-c", script),
            capture_output=True,
            text=True,
            check=False,
        )

    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^ \d+ +web-0 +running$", ended.stdout, re.MULTILINE), ended.stdout
