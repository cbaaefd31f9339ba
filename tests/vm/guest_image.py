"""A small Linux guest from Debian packages: kernel, busybox, Python, QEMU's guest agent, our agent.

It is built for speed under software emulation. QEMU loads the kernel as an ELF file, so nothing is
decompressed; the initramfs has only busybox and the drivers of the disks; Python is compiled.
"""

import functools
import lzma
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.make_agent import build as build_agent

KERNEL_PACKAGE = "linux-image-cloud-amd64"
DISK_MODULES = ("virtio_pci", "virtio_blk")
MODULES = ("virtio_net", "virtio_console", "button", "evdev")
"""`button` and `evdev` let the guest notice that somebody pressed the power button."""
NOT_IN_THE_GUEST = re.compile(
    r"(config-.*|test|idlelib|tkinter|lib2to3|ensurepip|pydoc_data|distutils|unittest|turtle.*"
    r"|dist-packages)"
)
KERNEL_LZ4 = b"\x02\x21\x4c\x18"
ROOT_MB, DATA_MB = 96, 8
COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=1 mitigations=off no_timer_check tsc=reliable audit=0 panic=1"
    " acpi=noirq lsm=capability 8250.nr_uarts=1 i8042.noaux i8042.nokbd random.trust_cpu=on"
)
"""Measured with TCG, in seconds of CPU until the guest has an address: 5.6 without these, 3.9 with
them.
"""

FIRST_INIT = """#!/bin/sh
mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module.ko; done
until mount -t ext4 -o ro /dev/vda /root 2> /dev/null; do sleep 0.1; done
mount --move /dev /root/dev
exec switch_root /root /sbin/init
"""
INIT = """#!/bin/sh
# Mount, count the boot, start the network and what answers from outside, then the agent for ever.
mount -t proc proc /proc && mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp && mount -t tmpfs run /run
for module in {modules}; do insmod /modules/$module.ko; done
mount -t ext4 /dev/vdb /data
exec 2> /dev/null
boots=$(($(dd if=/dev/vdb bs=1M skip={data} | tr -d '\0' | grep -c boot) + 1))
echo "boot $boots" | dd of=/dev/vdb bs=512 seek=$(({data} * 2048 + boots)) conv=sync,fsync
exec 2> /dev/console
echo "boot $boots"
{{ dd if=/dev/input/event0 bs=24 count=1 of=/dev/null 2> /dev/null; sh /etc/power-button; }} &
ip link set lo up && ip link set eth0 up
udhcpc -i eth0 -O staticroutes -q -n -t 20 -T 1 -s /etc/dhcp > /dev/null
ip -4 route
httpd -p 80 -h /www
for port in /dev/vport*p1; do
    [ -e $port ] && qemu-ga -m virtio-serial -p $port -t /run -f /run/qemu-ga.pid -d
done
[ -e /data/agent.toml ] || cp /etc/forewarn-agent.toml /data/agent.toml
while true; do
    python3 /usr/bin/forewarn-agent.pyz run --config /data/agent.toml
    sleep 1
done
"""
DHCP = """#!/bin/sh
[ "$1" = bound ] || [ "$1" = renew ] || exit 0
ip address replace $ip/${mask:-24} dev $interface
[ -z "$router" ] || ip route replace default via $router
if [ -n "$staticroutes" ]; then
    set -- $staticroutes
    while [ $# -ge 2 ]; do
        ip route replace $1 via $2 2> /dev/null || ip route replace $1 dev $interface
        shift 2
    done
fi
"""
POWER_BUTTON = """#!/bin/sh
echo "power button"
sync
poweroff -f
"""
RUN = """#!/bin/sh
# Run the script that was posted.
echo "Content-Type: text/plain"
echo
head -c "$CONTENT_LENGTH" > /tmp/script
sh /tmp/script 2>&1
"""
REPORT = """#!/bin/sh
echo "$1 $EVENT_TYPE $EVENT_ID" > /dev/console
"""
AGENT = """
endpoint = "http://169.254.169.254"
journal = "/data/agent.journal"
socket = "/run/agent.socket"

[[rule]]
name = "everything that affects this VM"
approve = "when-prepared"
prepare = [{run = ["/etc/report", "prepared"]}]
start = [{run = ["/etc/report", "started"]}]
recover = [{run = ["/etc/report", "recovered"]}]
"""


@dataclass(frozen=True)
class GuestImage:
    """What the guests boot. They share it and cannot write to it."""

    kernel: Path
    initramfs: Path
    root: Path


def build_image(folder: Path) -> GuestImage:
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "package"
    unpack_packages(package)
    image = GuestImage(folder / "vmlinux", folder / "initramfs", folder / "root.img")
    image.kernel.write_bytes(extract_kernel(next((package / "boot").glob("vmlinuz-*"))))
    build_initramfs(package, folder / "first", image.initramfs)
    build_root(package, folder / "root", image.root)
    for leftover in ("package", "first", "root"):
        shutil.rmtree(folder / leftover)
    return image


def make_data_disk(path: Path) -> None:
    """What a guest keeps through reboots: a file system, and after it a line for each boot."""
    run("truncate", "-s", f"{DATA_MB + 1}M", path)
    run("mkfs.ext4", "-q", "-F", path, f"{DATA_MB}M")


def count_boots(path: Path) -> int:
    return path.read_bytes()[DATA_MB << 20 :].count(b"boot ")


def unpack_packages(folder: Path) -> None:
    """The files of Debian packages that the guest needs and this machine does not."""
    if not run("apt-cache", "search", "--names-only", f"^{KERNEL_PACKAGE}$"):
        run("apt-get", "-qq", "update")
    depends = run("apt-cache", "depends", KERNEL_PACKAGE)
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    assert found, f"{KERNEL_PACKAGE} depends on no kernel: {depends}"
    with tempfile.TemporaryDirectory() as place:
        names = (found[1], "qemu-guest-agent", "busybox-static")
        run("apt-get", "-qq", "download", *names, cwd=Path(place))
        for package in Path(place).glob("*.deb"):
            run("dpkg-deb", "-x", package, folder)


def extract_kernel(file: Path) -> bytes:
    """The kernel as an ELF file, out of the compressed one that boot loaders start.

    Its place is in the header: https://docs.kernel.org/arch/x86/boot.html.
    """
    content = file.read_bytes()
    offset, length = struct.unpack_from("<II", content, 0x248)
    start = (content[0x1F1] + 1) * 512 + offset
    payload = content[start : start + length - 4]
    assert payload.startswith(KERNEL_LZ4), f"{file} is not compressed with LZ4: {payload[:4]!r}"
    return subprocess.run(["lz4", "-dc"], input=payload, capture_output=True, check=True).stdout


def build_initramfs(package: Path, folder: Path, target: Path) -> None:
    for one in ("bin", "dev", "root", "modules"):
        (folder / one).mkdir(parents=True)
    install_busybox(package, folder)
    names = install_modules(package, folder / "modules", DISK_MODULES)
    write_script(folder / "init", FIRST_INIT.format(modules=" ".join(names)))
    files = "\n".join(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")))
    with target.open("wb") as output:
        subprocess.run(
            ["cpio", "--quiet", "-o", "-H", "newc"],
            cwd=folder,
            input=files.encode(),
            stdout=output,
            check=True,
        )


def build_root(package: Path, folder: Path, target: Path) -> None:
    places = "bin sbin dev proc sys tmp run data modules etc usr/bin www/cgi-bin var"
    for one in places.split():
        (folder / one).mkdir(parents=True)
    install_busybox(package, folder)
    names = install_modules(package, folder / "modules", MODULES)
    names = [name for name in names if name not in install_order(package, DISK_MODULES)]
    write_script(folder / "sbin/init", INIT.format(modules=" ".join(names), data=DATA_MB))
    write_script(folder / "etc/dhcp", DHCP)
    write_script(folder / "etc/power-button", POWER_BUTTON)
    write_script(folder / "etc/report", REPORT)
    write_script(folder / "www/cgi-bin/run", RUN)
    (folder / "var/run").symlink_to("/run")
    (folder / "sbin/hwclock").symlink_to("/bin/busybox")  # where qemu-ga expects it
    (folder / "www/index.html").write_text("up\n")
    (folder / "etc/passwd").write_text("root::0:0:root:/:/bin/sh\n")
    (folder / "etc/forewarn-agent.toml").write_text(AGENT)
    install_python(folder)
    install_program(package / "usr/sbin/qemu-ga", folder, "usr/bin/qemu-ga")
    install_agent(folder / "usr/bin/forewarn-agent.pyz")
    run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", folder, target, f"{ROOT_MB}M")


def install_busybox(package: Path, folder: Path) -> None:
    program = package / "bin/busybox"
    shutil.copy2(program, folder / "bin/busybox")
    for name in run(program, "--list").split():
        if not (folder / "bin" / name).exists():
            (folder / "bin" / name).symlink_to("busybox")


@functools.cache
def install_order(package: Path, modules: tuple[str, ...]) -> list[str]:
    """The modules with everything that they depend on, first things first."""
    files = module_files(package)
    order: list[str] = []

    def add(name: str) -> None:
        depends = re.search(rb"\0depends=([^\0]*)\0", read_module(files[name]))
        assert depends, f"{files[name]} does not say what it depends on"
        for one in filter(None, depends[1].decode().split(",")):
            add(one.replace("-", "_"))
        if name not in order:
            order.append(name)

    for name in modules:
        add(name)
    return order


@functools.cache
def module_files(package: Path) -> dict[str, Path]:
    return {path.name.split(".")[0].replace("-", "_"): path for path in package.rglob("*.ko*")}


def install_modules(package: Path, folder: Path, modules: tuple[str, ...]) -> list[str]:
    names = install_order(package, modules)
    for name in names:
        (folder / f"{name}.ko").write_bytes(read_module(module_files(package)[name]))
    return names


def read_module(file: Path) -> bytes:
    content = file.read_bytes()
    return lzma.decompress(content) if file.suffix == ".xz" else content


def install_python(folder: Path) -> None:
    """Debian's Python, whose library is compiled already."""
    python = Path("/usr/bin/python3").resolve()
    install_program(python, folder, "usr/bin/python3")
    library = Path("/usr/lib") / python.name
    target = folder / "usr/lib" / python.name
    shutil.copytree(
        library,
        target,
        ignore=lambda _, names: [name for name in names if NOT_IN_THE_GUEST.fullmatch(name)],
    )
    for extension in (target / "lib-dynload").glob("*.so"):
        install_libraries(extension, folder)


def install_agent(target: Path) -> None:
    """The agent as one file, as `make agent` builds it, with compiled copies of its modules.

    Under emulation the compiler needs longer than the agent.
    """
    build_agent(target)
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(target, "a") as archive:
        archive.extractall(place)
        arguments = ("-q", "-b", "--invalidation-mode", "unchecked-hash", "-s", place, place)
        run("/usr/bin/python3", "-m", "compileall", *arguments)
        for file in sorted(Path(place).rglob("*.pyc")):
            archive.write(file, file.relative_to(place))


def install_program(program: Path, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, folder / name)
    install_libraries(program, folder)


def install_libraries(program: Path, folder: Path) -> None:
    for library in re.findall(r"(/\S+) \(0x", run("ldd", program)):
        target = folder / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(Path(library).resolve(), target)


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed: {done.stdout}{done.stderr}"
    return done.stdout
