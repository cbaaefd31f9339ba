"""Real guests: our image in a QEMU domain of a host, seen from outside."""

import re
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import libvirt

from tests.vm.guest_image import COMMAND_LINE, GuestImage, count_boots, make_data_disk
from tests.vm.network import Namespace
from tests.vm.real_libvirt import RealHost, wait_for

MEMORY_MB = 160
NETWORK = """
<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'>
  <name>default</name><forward mode='nat'/><bridge name='virbr0' stp='off' delay='0'/>
  <ip address='192.168.122.1' netmask='255.255.255.0'>
    <dhcp><range start='192.168.122.100' end='192.168.122.200'/>{leases}</dhcp>
  </ip>{more}
</network>
"""
GUEST = """
<domain type='qemu'>
  <name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>{memory}</memory><vcpu>1</vcpu>
  <metadata><forewarn:vm xmlns:forewarn='urn:forewarn:vm:1' {metadata}/></metadata>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{kernel}</kernel><initrd>{initramfs}</initrd><cmdline>{command_line}</cmdline>
  </os>
  <features><acpi/></features>
  <clock offset='utc'><timer name='hpet' present='no'/></clock><on_reboot>restart</on_reboot>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>
    <disk type='file'>
      <driver name='qemu' type='raw'/><source file='{root}'/><target dev='vda' bus='virtio'/>
      <readonly/>
    </disk>
    <disk type='network'>
      <driver name='qemu' type='raw' cache='none'/><target dev='vdb' bus='virtio'/>
      <source protocol='nbd'><host transport='unix' socket='{folder}/disk.socket'/></source>
    </disk>
    <interface type='network'>
      <source network='default'/><mac address='{mac}'/><model type='virtio'/>
    </interface>
    <serial type='file'><source path='{folder}/console' append='on'/></serial>
    <memballoon model='none'/>{more}
  </devices>
</domain>
"""
LOCAL_DISK = """
<disk type='file'>
  <driver name='qemu' type='raw' cache='writeback'/><source file='{}'/>
  <target dev='vdc' bus='virtio'/>
</disk>
"""
SLOW_POWER_BUTTON = """
sed 's/^sync/sleep {seconds}; sync/' /etc/power-button > /tmp/power-button
mount --bind /tmp/power-button /etc/power-button
"""
LAN = """
<interface type='bridge'>
  <source bridge='br0'/><mac address='{}'/><model type='virtio'/>
</interface>
"""
POLLER = """
cat > /tmp/poll.py <<'END'
import http.client, time
while True:
    connection = http.client.HTTPConnection("169.254.169.254", timeout=1)
    try:
        connection.request("GET", "/metadata/{path}", headers={{"Metadata": "true"}})
        result = connection.getresponse().status
    except OSError as error:
        result = type(error).__name__
    connection.close()
    print("poll", result, flush=True)
    time.sleep(0.25)
END
python3 /tmp/poll.py < /dev/null > /dev/console 2>&1 &
echo $! > /tmp/poll.pid
"""
GUEST_AGENT = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
BOOT_SECONDS_MAX = 120
EVENTS = "scheduledevents?api-version=2020-07-01"
NAME = "instance/compute/name?api-version=2021-02-01&format=text"
ANSWER_SECONDS_MAX = 10
DOWNTIME_MAX_MS = 60_000


class Guest:
    """A VM. Its disk is on the network, so it can migrate."""

    def __init__(
        self,
        image: GuestImage,
        folder: Path,
        name: str,
        *,
        address: str,
        metadata: str,
        has_guest_agent: bool = False,
        is_on_lan: bool = False,
    ) -> None:
        self.name, self.address, self.id = name, address, str(uuid.uuid4())
        self.mac = "52:54:00:" + ":".join(re.findall("..", self.id[:6]))
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._disk = self._folder / "disk.img"
        make_data_disk(self._disk)
        self.xml = GUEST.format(
            name=name,
            uuid=self.id,
            memory=MEMORY_MB,
            metadata=metadata,
            kernel=image.kernel,
            initramfs=image.initramfs,
            command_line=COMMAND_LINE,
            root=image.root,
            folder=self._folder,
            mac=self.mac,
            more=(GUEST_AGENT if has_guest_agent else "")
            + (LAN.format(self.mac.replace("52:54:00", "52:54:01")) if is_on_lan else ""),
        )

    @contextmanager
    def with_disk(self) -> Iterator["Guest"]:
        """The server of its disk, for as many hosts as want it at once."""
        socket = self._folder / "disk.socket"
        server = subprocess.Popen(
            ["qemu-nbd", "--persistent", "--shared=0", "--format=raw", "-k", socket, self._disk]
        )
        try:
            wait_for(socket.exists, BOOT_SECONDS_MAX)
            yield self
        finally:
            server.kill()
            server.wait()

    @property
    def boots(self) -> int:
        """How often it has booted, as it wrote on its disk."""
        return count_boots(self._disk)

    @property
    def console(self) -> str:
        file = self._folder / "console"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def presses(self) -> int:
        """How often it has noticed that its power button was pressed."""
        return self.console.count("power button")

    def answers(self, host: RealHost, seconds_max: float = ANSWER_SECONDS_MAX) -> bool:
        """Whether its web server answers at its address on this host."""
        try:
            return self._call(host.namespace, "", seconds_max=seconds_max) == "up\n"
        except OSError:
            return False

    def run(self, host: RealHost, script: str) -> str:
        """Run a script inside."""
        return self._call(host.namespace, "cgi-bin/run", script.encode())

    def _call(
        self,
        namespace: Namespace,
        path: str,
        body: bytes | None = None,
        seconds_max: float = ANSWER_SECONDS_MAX,
    ) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with (
            namespace.entered(),
            opener.open(f"http://{self.address}/{path}", body, seconds_max) as response,
        ):
            return str(response.read().decode())

    def poll(self, host: RealHost, path: str = EVENTS) -> str:
        """What the guest gets at 169.254.169.254."""
        command = "wget -q -O - --header Metadata:true"
        return self.run(host, f"{command} 'http://169.254.169.254/metadata/{path}'")

    def polls(self, host: RealHost) -> bool:
        """Whether the guest is served as itself."""
        try:
            return self.poll(host, NAME) == self.name
        except OSError:
            return False

    @contextmanager
    def polling(self, host: RealHost, later: RealHost) -> Iterator[None]:
        """It polls all the time within this, and prints each status; at the end on another host."""
        answered = self.answered
        self.run(host, POLLER.format(path=EVENTS))
        wait_for(lambda: self.answered > answered, BOOT_SECONDS_MAX)
        yield
        self.run(later, "kill $(cat /tmp/poll.pid)")

    @property
    def answered(self) -> int:
        """How many of these polls got the document."""
        return self.console.count("poll 200")

    def migrate_quickly(self, host: RealHost) -> None:
        """Let QEMU stop the guest early in the next migration.

        Software emulation may lose a write to a page that is being copied at that moment, so a
        guest that runs on while most of its memory is copied sometimes has damaged memory
        afterwards: measured, once in eight migrations on a busy machine. With this, never.
        """
        host.connection.lookupByName(self.name).migrateSetMaxDowntime(DOWNTIME_MAX_MS)

    def shut_down_slowly(self, host: RealHost, seconds: int) -> None:
        """Let it take so long, until its next boot."""
        self.run(host, SLOW_POWER_BUTTON.format(seconds=seconds))

    @contextmanager
    def with_local_disk(self, host: RealHost) -> Iterator[str]:
        """Within this it has a disk that no other host has. Gives its path on the host."""
        (host.folder / "lib/local.img").write_bytes(bytes(1 << 20))
        path = "/var/lib/libvirt/local.img"
        both = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
        domain = host.connection.lookupByName(self.name)
        domain.attachDeviceFlags(LOCAL_DISK.format(path), both)
        try:
            yield path
        finally:
            domain.detachDeviceFlags(LOCAL_DISK.format(path), both)

    def wait_until_up(self, host: RealHost) -> None:
        wait_for(lambda: self.answers(host), BOOT_SECONDS_MAX)

    def wait_for_line(self, line: str, seconds_max: float = BOOT_SECONDS_MAX) -> None:
        """Wait until the console has this line."""
        wait_for(lambda: line in self.console, seconds_max, lambda: f"{self.name}: {self.console}")


def start_network(host: RealHost, guests: list[Guest], dnsmasq: str = "") -> None:
    """libvirt's default network, with a fixed address for each guest.

    `dnsmasq` is an option that libvirt passes on to it.
    """
    leases = "".join(f"<host mac='{guest.mac}' ip='{guest.address}'/>" for guest in guests)
    more = (
        f"<dnsmasq:options><dnsmasq:option value='{dnsmasq}'/></dnsmasq:options>" if dnsmasq else ""
    )
    network = host.connection.networkDefineXML(NETWORK.format(leases=leases, more=more))
    network.setAutostart(1)
    network.create()
