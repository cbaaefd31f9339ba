"""Hosts with a libvirtd of their own and real QEMU domains under software emulation. The machine's
own libvirt is not touched.

Each daemon runs in mount and UTS namespaces, so that its folders and its host name are its own.
Needs root.
"""

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import libvirt

from forewarn.platform.libvirt.connection import open_connection, prepare

QEMU_CONF = """
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
user = "root"
group = "root"
migration_port_min = {port}
migration_port_max = {port_max}
"""
LIBVIRTD_CONF = """
host_uuid = "{uuid}"
auth_unix_rw = "none"
unix_sock_group = "root"
"""
FOLDERS = {
    "etc": "/etc/libvirt",
    "lib": "/var/lib/libvirt",
    "cache": "/var/cache/libvirt",
    "log": "/var/log/libvirt",
    "run": "/run",
}
DOMAIN = """
<domain type='qemu'>
  <name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory><vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type><boot dev='hd'/>{bios}</os>
  <features><acpi/></features><on_reboot>restart</on_reboot>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>
    <memballoon model='none'/>{disks}
  </devices>
</domain>
"""
DISK = (
    "<disk type='file'><driver name='qemu' type='raw' cache='writeback'/><source file='{}'/><target"
    " dev='hda'/></disk>"
)
REBOOTS_BY_ITSELF = "<bios rebootTimeout='1500'/>"
"""What SeaBIOS does when it finds nothing to boot: a guest that reboots within two seconds of being
asked, or not.
"""
START_SECONDS_MAX, STOP_SECONDS_MAX = 60, 20
PORT_FIRST = 49_352


class RealHost:
    """One libvirtd. `uri` reaches it from outside its namespaces."""

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self.name, self._folder = name, folder
        for one in FOLDERS:
            (folder / one).mkdir(parents=True)
        port = PORT_FIRST + 20 * number
        (folder / "etc/qemu.conf").write_text(QEMU_CONF.format(port=port, port_max=port + 19))
        (folder / "etc/libvirtd.conf").write_text(LIBVIRTD_CONF.format(uuid=uuid.uuid4()))
        (folder / "names").write_text("127.0.0.1 localhost host-a host-b\n")
        binds = [
            f"mount --bind {folder / one} {place}"
            for one, place in (FOLDERS | {"names": "/etc/hosts"}).items()
        ]
        script = " && ".join([f"hostname {name}", *binds, "exec libvirtd"])
        with (folder / "output").open("wb") as output:
            command = ["unshare", "--mount", "--uts", "sh", "-c", script]
            self._daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.uri = f"qemu+unix:///system?socket={folder}/run/libvirt/libvirt-sock"
        self.connection: Any = None

    def start(self) -> None:
        def is_up() -> bool:
            assert self._daemon.poll() is None, (self._folder / "output").read_text()
            prepare()
            try:
                self.connection = open_connection(self.uri)
            except libvirt.libvirtError:
                return False
            return True

        wait_for(is_up, START_SECONDS_MAX)

    def run_vm(self, name: str = "web-0", *, bios: str = "", disk: Path | None = None) -> Any:
        disks = "" if disk is None else DISK.format(disk)
        domain = self.connection.defineXML(
            DOMAIN.format(name=name, uuid=uuid.uuid4(), bios=bios, disks=disks)
        )
        domain.create()
        return domain

    def clear(self) -> None:
        for domain in self.connection.listAllDomains():
            if domain.isActive():
                domain.destroy()
            domain.undefine()

    def state(self, name: str = "web-0") -> int:
        return int(self.connection.lookupByName(name).state()[0])

    def names(self) -> list[str]:
        return [domain.name() for domain in self.connection.listAllDomains()]

    @property
    def pid(self) -> int:
        return self._daemon.pid

    def stop(self) -> None:
        if self.connection is not None:
            self.clear()
            self.connection.close()
        self._daemon.terminate()
        try:
            self._daemon.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait(STOP_SECONDS_MAX)


@contextmanager
def real_hosts(*names: str) -> Iterator[dict[str, RealHost]]:
    """These hosts, up and empty.

    Their folder has a short name: the path of a socket may have 107 characters.
    """
    folder = Path(tempfile.mkdtemp(prefix="fw-"))
    hosts = {name: RealHost(folder / name, name, number) for number, name in enumerate(names)}
    try:
        for host in hosts.values():
            host.start()
        yield hosts
    finally:
        for host in hosts.values():
            host.stop()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(is_so: Callable[[], bool], seconds_max: float) -> None:
    end = time.monotonic() + seconds_max
    while not is_so():
        assert time.monotonic() < end, "it did not become so in time"
        time.sleep(0.1)
