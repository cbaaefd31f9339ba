"""Hosts with a libvirtd of their own and real QEMU domains under software emulation. The machine's
own libvirt and network are not touched.

Each host is a set of namespaces (mount, UTS, network, processes), so its folders, its name, its
bridge and its processes are its own, and it dies as a whole. One more network namespace is the
place of the servers; a bridge there connects all hosts. Needs root.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import libvirt

from forewarn.platform.libvirt.connection import open_connection, prepare
from tests.vm.network import Namespace

QEMU_CONF = """
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
user = "root"
group = "root"
"""
LIBVIRTD_CONF = """
host_uuid = "{uuid}"
auth_unix_rw = "none"
unix_sock_group = "root"
listen_tls = 0
listen_tcp = 1
auth_tcp = "none"
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
START_SECONDS_MAX, STOP_SECONDS_MAX, RUN_SECONDS_MAX = 60, 20, 60
SERVERS_ADDRESS = "10.77.0.1"


class RealHost:
    """One libvirtd. `uri` reaches it from outside its namespaces."""

    def __init__(
        self, folder: Path, name: str, namespace: Namespace, servers: Namespace, names: str
    ) -> None:
        self.name, self.folder, self.namespace, self.servers = name, folder, namespace, servers
        for one in FOLDERS:
            (folder / one).mkdir(parents=True)
        (folder / "etc/qemu.conf").write_text(QEMU_CONF)
        (folder / "etc/libvirtd.conf").write_text(LIBVIRTD_CONF.format(uuid=uuid.uuid4()))
        (folder / "names").write_text(names)
        self.uri = f"qemu+unix:///system?socket={folder}/run/libvirt/libvirt-sock"
        self.connection: Any = None
        self._boot()

    def _boot(self) -> None:
        """Start the host's first process, which ends with everything that runs on the host.

        It stays the parent of QEMU's processes: libvirtd does not collect those it has lost.
        """
        binds = [
            f"mount --bind {self.folder / one} {place}"
            for one, place in (FOLDERS | {"names": "/etc/hosts"}).items()
        ]
        script = " && ".join([f"hostname {self.name}", *binds, "{ libvirtd --listen & wait $!; }"])
        enter = ["ip", "netns", "exec", self.namespace.name]
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / "output").open("ab") as output:
            self._unshare = subprocess.Popen(
                [*enter, *apart, "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def start(self) -> None:
        def is_up() -> bool:
            assert self._unshare.poll() is None, (self.folder / "output").read_text()
            prepare()
            try:
                self.connection = open_connection(self.uri)
            except libvirt.libvirtError:
                return False
            return True

        wait_for(is_up, START_SECONDS_MAX)

    def inside(self, *command: str | Path) -> list[str]:
        """The command line that runs this command on the host."""
        namespaces = ("--mount", "--uts", "--net", "--pid")
        return ["nsenter", "--target", str(self._first_process), *namespaces, *map(str, command)]

    def run(self, *command: str | Path, text: str = "") -> str:
        done = subprocess.run(
            self.inside(*command),
            check=False,
            input=text,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
        )
        assert done.returncode == 0, f"{shlex.join(done.args)}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def _first_process(self) -> int:
        return children(self._unshare.pid)[0]

    @property
    def pid(self) -> int:
        """libvirtd's."""
        return children(self._first_process)[0]

    def run_vm(self, name: str = "web-0", *, bios: str = "", disk: Path | None = None) -> Any:
        disks = "" if disk is None else DISK.format(disk)
        return self.run_domain(DOMAIN.format(name=name, uuid=uuid.uuid4(), bios=bios, disks=disks))

    def run_domain(self, xml: str) -> Any:
        domain = self.connection.defineXML(xml)
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

    def die(self) -> None:
        """Like a power cut: every process of the host ends at once."""
        os.kill(self._first_process, signal.SIGKILL)
        self._unshare.wait(STOP_SECONDS_MAX)
        self.connection = None

    def boot_again(self) -> None:
        """Its disks are as they were; what was in `/run` is gone, and so is its bridge."""
        shutil.rmtree(self.folder / "run")
        (self.folder / "run").mkdir()
        self.namespace.run("ip link delete virbr0")
        self._boot()
        self.start()

    def stop(self) -> None:
        if self._unshare.poll() is None:
            self.die()


@contextmanager
def real_hosts(*names: str) -> Iterator[dict[str, RealHost]]:
    """These hosts, up and empty.

    Their folder has a short name: the path of a socket may have 107 characters.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="fw-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        servers = stack.enter_context(Namespace.made("servers"))
        servers.run("ip link add hosts type bridge")
        servers.run(f"ip address add {SERVERS_ADDRESS}/24 dev hosts")
        servers.run("ip link set hosts up")
        addresses = {name: f"10.77.0.{11 + number}" for number, name in enumerate(names)}
        table = "127.0.0.1 localhost\n" + f"{SERVERS_ADDRESS} servers\n"
        table += "".join(f"{address} {name}\n" for name, address in addresses.items())
        hosts = {}
        for name, address in addresses.items():
            namespace = stack.enter_context(Namespace.made(name))
            namespace.connect(servers, "hosts", f"{address}/24")
            hosts[name] = RealHost(folder / name, name, namespace, servers, table)
            stack.callback(hosts[name].stop)
        for host in hosts.values():
            host.start()
        yield hosts


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(
    is_so: Callable[[], object], seconds_max: float, why: Callable[[], object] = lambda: ""
) -> None:
    """Wait until it is so. If it does not become so in time, `why` says what was seen instead."""
    end = time.monotonic() + seconds_max
    while not is_so():
        assert time.monotonic() < end, f"it did not become so in {seconds_max:g} seconds {why()}"
        time.sleep(0.1)
