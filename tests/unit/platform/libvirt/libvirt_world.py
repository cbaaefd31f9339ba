"""Two hosts with libvirt's own test driver: the real library, domains that run nowhere, and a clock
that makes nobody wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import libvirt
import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import RedeployMethod, Vm
from forewarn.errors import ImpactFailed
from forewarn.option_kind import HostUri
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.file_systems import MountTable
from forewarn.platform.libvirt.connection import LibvirtHosts, prepare
from forewarn.platform.libvirt.driver import LibvirtPlatform
from forewarn.platform.libvirt.marker import Marker, read
from forewarn.platform.libvirt.targets import Targets
from tests.builders import guid
from tests.unit.platform.instant_clock import InstantClock

DOMAIN = """
<domain type='test'>
  <name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>{mib}</memory><vcpu>1</vcpu>
  <os><type>hvm</type></os>
  <metadata>{metadata}</metadata>
  <devices><interface type='network'>
    <mac address='{mac}'/><source network='default'/>
  </interface></devices>
</domain>
"""
NODE = """
<node><network><name>default</name>
  <ip address='192.168.122.1' prefix='24'>
    <dhcp><range start='192.168.122.128' end='192.168.122.253'/></dhcp>
  </ip>
</network>{}</node>
"""
"""The driver makes leases up, and breaks down over a network that has no addresses."""
HOSTS = ("host-a", "host-b")
MORE_HOSTS = (*HOSTS, "host-c", "host-d", "host-e")
URIS = tuple(HostUri(host, f"test:///{host}") for host in MORE_HOSTS)
NODE_MIB = 3072
"""The memory of each host, as the test driver makes it up."""
NOT_LIVE = (
    "cannot migrate live to host-b: libvirt of host-a: this function is not supported by the"
    " connection driver: virDomainMigrate3"
)
"""What the test driver says of every migration."""
RUNNING, PAUSED, OFF = (
    libvirt.VIR_DOMAIN_RUNNING,
    libvirt.VIR_DOMAIN_PAUSED,
    libvirt.VIR_DOMAIN_SHUTOFF,
)


def domain_xml(name: str = "web-0", number: int = 1, metadata: str = "", mib: int = 64) -> str:
    return DOMAIN.format(
        name=name,
        uuid=guid(number).lower(),
        mac=f"52:54:00:00:00:{number:02x}",
        metadata=metadata,
        mib=mib,
    )


class LibvirtWorld:
    """`web-0` runs on host-a; host-b is empty."""

    def __init__(self, folder: Path, hosts: Sequence[str] = HOSTS) -> None:
        prepare()
        (folder / "node.xml").write_text(NODE.format(""))
        self.clock = InstantClock()
        self.connections = {
            f"test:///{host}": libvirt.open(f"test://{folder}/node.xml") for host in hosts
        }
        self.hosts = list(hosts)
        self.web = self.on("host-a").defineXML(domain_xml())
        self.web.create()

    def on(self, host: str) -> Any:
        return self.connections[f"test:///{host}"]

    def names_on(self, host: str) -> list[str]:
        return sorted(domain.name() for domain in self.on(host).listAllDomains())

    def run_vm(self, host: str, name: str, number: int, mib: int = 64) -> Any:
        handle = self.on(host).defineXML(domain_xml(name, number, mib=mib))
        handle.create()
        return handle

    def state(self, host: str = "host-a") -> int:
        return int(self.on(host).lookupByName("web-0").state()[0])

    def connect(self, uri: str) -> Any:
        return self.connections[uri]

    def platform(
        self,
        connect: Any = None,
        *,
        grace: float = 0,
        call_seconds_max: float = 30,
        clock: Any = None,
        read_mounts: Callable[[], MountTable] = MountTable,
        **more: Any,
    ) -> LibvirtPlatform:
        libvirts = LibvirtHosts(
            URIS, call_seconds_max=call_seconds_max, connect=connect or self.connect
        )
        targets = Targets(libvirts, hosts=lambda: self.hosts, **more)
        limit = timedelta(seconds=grace)
        return LibvirtPlatform(targets, clock or self.clock, limit, read_mounts)

    def run_impact(self, what: ImpactRequest, **more: Any) -> ImpactResult:
        return asyncio.run(self.platform(**more).run_impact(what))


def is_marked(handle: Any, event_id: str) -> bool:
    """Whether this event has begun to act on the domain."""
    return read(handle).event == event_id


def order(
    type_: EventType,
    cause: Cause = Cause.MAINTENANCE,
    *,
    tries: int = 1,
    seconds: int = -1,
    name: str = "web-0",
    host: str = "host-a",
    vm_id: str = "",
    targets: tuple[str, ...] = (),
    method: RedeployMethod = RedeployMethod.LIVE,
) -> ImpactRequest:
    vm = Vm(name=name, host=host, id=vm_id)
    return ImpactRequest(guid(1), "web", vm, type_, cause, tries, seconds, targets, method=method)


DRAIN = order(EventType.REDEPLOY)
DRAIN_AGAIN = order(EventType.REDEPLOY, tries=2)
LIVE_MIGRATION = order(
    EventType.FREEZE, Cause.LIVE_MIGRATION, method=RedeployMethod.LIVE_ONLY, seconds=9
)


def refusal(number: int) -> libvirt.libvirtError:
    """What libvirt raises, with its own number for the reason."""
    error = libvirt.libvirtError("no")
    error.err = (number, 0, "no", 2, None, None, None, 0, 0)
    return error


class Guest:
    """A domain of the test driver with manners of its own: each of `ways` stands in for a verb.

    Verbs are written down.
    """

    def __init__(self, handle: Any, host: "Host", ways: dict[str, Callable[[Any], Any]]) -> None:
        self._handle, self._host, self._ways = handle, host, ways

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._host.calls.append(verb)
            self._host.arguments[verb] = arguments
            way = self._ways.get(verb)
            return getattr(self._handle, verb)(*arguments) if way is None else way(self._handle)

        return call


class Host:
    """A connection whose domains are such guests. `listeners` hold who listens for reboots."""

    def __init__(self, connection: Any, **ways: Callable[[Any], Any]) -> None:
        self._connection, self._ways = connection, ways
        self.calls: list[str] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.listeners: list[Callable[..., None]] = []

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._connection, verb)

    def lookupByName(self, name: str) -> Guest:
        return self._guest(self._connection.lookupByName(name))

    def listAllDomains(self, *flags: int) -> list[Guest]:
        return [self._guest(handle) for handle in self._connection.listAllDomains(*flags)]

    def _guest(self, handle: Any) -> Guest:
        return Guest(handle, self, {"connect": lambda handle: self, **self._ways})

    def domainEventRegisterAny(
        self, domain: Any, what: int, listener: Callable[..., None], more: Any
    ) -> int:
        assert what == libvirt.VIR_DOMAIN_EVENT_ID_REBOOT
        self.listeners.append(listener)
        return 1

    def domainEventDeregisterAny(self, number: int) -> None:
        self.listeners.clear()


class Target(Host):
    """A host on which a defined domain, or the connection, has manners of its own."""

    def defineXML(self, xml: str) -> Guest:
        return Guest(self._connection.defineXML(xml), self, self._ways)

    def __getattr__(self, verb: str) -> Any:
        way = self._ways.get(verb)
        return getattr(self._connection, verb) if way is None else lambda *_: way(None)


def refuse(number: int) -> Callable[[Any], None]:
    def way(handle: Any) -> None:
        raise refusal(number)

    return way


class MoveWorld(LibvirtWorld):
    """`source` records what is done to web-0; `target` is host-b with manners of its own."""

    def __init__(self, folder: Path, hosts: Sequence[str] = HOSTS) -> None:
        super().__init__(folder, hosts)
        self.source, self.target = Host(self.on("host-a")), Target(self.on("host-b"))

    def give(self, devices: str = "", cpu: str = "<devices>") -> None:
        """Let web-0 have these devices."""
        xml = domain_xml().replace("</devices>", f"{devices}</devices>").replace("<devices>", cpu)
        self._replace(xml)

    def give_uefi(self, nvram: str) -> str:
        """Let web-0 have UEFI, with its variables there. Return its definition."""
        loader = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader>"
        xml = domain_xml().replace("</os>", f"{loader}{nvram}</os>")
        self._replace(xml)
        return xml

    def _replace(self, xml: str) -> None:
        self.web.destroy()
        self.web = self.on("host-a").defineXML(xml)
        self.web.create()

    def carry_out(self, request: ImpactRequest, **more: Any) -> ImpactResult:
        hosts = self.connections | {"test:///host-a": self.source, "test:///host-b": self.target}
        return self.run_impact(request, connect=hosts.__getitem__, **more)

    def fails_untouched(self, reason: str, request: ImpactRequest = DRAIN, **more: Any) -> bool:
        """Whether the impact fails with this reason, finally, and the VM runs on as before."""
        with pytest.raises(ImpactFailed) as failed:
            self.carry_out(request, **more)
        assert str(failed.value).endswith(reason)
        assert failed.value.facts.get("is_final")
        assert not {"shutdown", "destroy", "suspend", "create"} & {*self.source.calls}
        assert (self.state(), self.names_on("host-b")) == (RUNNING, [])
        return read(self.web) == Marker()


def break_down(handle: Any) -> None:
    """The connection to the host is lost."""
    error = refusal(libvirt.VIR_ERR_SYSTEM_ERROR)
    error.err = (error.err[0], libvirt.VIR_FROM_RPC, *error.err[2:])
    raise error
