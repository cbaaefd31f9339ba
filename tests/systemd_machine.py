"""A machine with systemd as its first process: namespaces of its own for processes, mounts and
network, and private copies of the folders that are written. Needs root and the package systemd.

The product is installed there as `deploy/` says, in /opt/forewarn.
"""

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "time-sync", "multi-user")
"""The targets that units order themselves after, without what a distribution starts for them."""
PRIVATE = "/opt /run /usr/local/lib /var/cache /var/lib /var/log"
SYSTEMD = "/usr/lib/systemd/system /usr/lib/systemd/system-generators"
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/etc /mnt/source /mnt/python /mnt/packages /mnt/cgroup
mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t sysfs sysfs /sys  # that of this network
mount --rbind /mnt/cgroup /sys/fs/cgroup
cp -a /etc/. /mnt/etc
mount --bind {source} /mnt/source
mount --bind {python} /mnt/python
mount --bind {packages} /mnt/packages
for folder in {private}; do mount -t tmpfs -o mode=755 tmpfs $folder; done
mount --bind /mnt/etc /etc
rm -rf /etc/systemd/system/* /etc/forewarn
for name in {targets}; do
    printf '[Unit]\\nDescription=%s\\n' $name > /usr/lib/systemd/system/$name.target
done
mkdir -p /opt/forewarn/bin /etc/sysusers.d /etc/forewarn
cat > /opt/forewarn/bin/forewarn <<END
#!/bin/sh
export PYTHONPATH=/mnt/source/src:/mnt/packages LD_LIBRARY_PATH=/mnt/python/lib
exec /mnt/python/bin/{interpreter} -m forewarn "\\$@"
END
chmod 755 /opt/forewarn/bin/forewarn
ip link set lo up
mount --make-rshared /  # systemd hands credentials to a unit by a mount
exec env -i container=other PATH=$PATH /lib/systemd/systemd --system --unit=multi-user.target \
    --log-target=console
"""
BOOT_SECONDS_MAX, RUN_SECONDS_MAX = 60, 60


class SystemdMachine:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "systemd.log"
        script = BOOT.format(
            source=shlex.quote(str(ROOT)),
            python=shlex.quote(sys.base_prefix),  # its home is hidden from units
            packages=shlex.quote(sysconfig.get_path("purelib")),
            interpreter=Path(sys.executable).resolve().name,
            private=f"{PRIVATE} {SYSTEMD}",
            targets=" ".join(TARGETS),
        )
        apart = ("--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc")
        with self.log.open("ab") as log:
            self._unshare = subprocess.Popen(
                ["unshare", *apart, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def _first_process(self) -> str:
        unshare = self._unshare.pid
        return Path(f"/proc/{unshare}/task/{unshare}/children").read_text().strip()

    def wait_until_up(self) -> None:
        def is_up() -> bool:
            assert self._unshare.poll() is None, self.log.read_text()
            if not self._first_process:
                return False
            state = self.try_run("systemctl is-system-running").stdout.strip()
            return state in ("running", "degraded")

        self.wait_for(is_up)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + BOOT_SECONDS_MAX
        while not condition():
            assert time.monotonic() < end, self.report()
            time.sleep(0.1)

    def try_run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the machine."""
        enter = ["nsenter", "--target", self._first_process, "--mount", "--net", "--pid"]
        return subprocess.run(
            [*enter, "bash", "-c", command],
            check=False,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            cwd="/",
        )

    def run(self, command: str) -> str:
        done = self.try_run(command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.report()}"
        return done.stdout

    def report(self) -> str:
        return self.log.read_text() + self.try_run("tail -n 20 /run/*.log").stdout

    def install(self, unit: str, *, log: str) -> None:
        """Run the commands at the beginning of a unit that create its user and install it."""
        commands = [
            line.removeprefix("#   ")
            for line in (ROOT / "deploy" / unit).read_text().splitlines()
            if line.startswith("#   install -m 0644 deploy/")
        ]
        self.run("cd /mnt/source && " + " && ".join(commands))
        self.write(
            f"/etc/systemd/system/{unit}.d/log.conf", f"[Service]\nStandardError=append:{log}"
        )
        self.run("systemctl daemon-reload")

    def write(self, path: str, text: str) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def path(self, path: str) -> Path:
        """A file of the machine, as it is seen from outside."""
        return Path(f"/proc/{self._first_process}/root{path}")

    def status_of(self, unit: str) -> dict[str, str]:
        """The fields of /proc/PID/status of the unit's main process."""
        pid = self.run(f"systemctl show --value --property MainPID {unit}").strip()
        lines = self.run(f"cat /proc/{pid}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def stop(self) -> None:
        os.killpg(self._unshare.pid, signal.SIGKILL)
        self._unshare.wait(30)


@contextmanager
def systemd_machine() -> Iterator[SystemdMachine]:
    with tempfile.TemporaryDirectory(prefix="fw-systemd-") as folder:
        machine = SystemdMachine(Path(folder))
        try:
            machine.wait_until_up()
            yield machine
        finally:
            machine.stop()
