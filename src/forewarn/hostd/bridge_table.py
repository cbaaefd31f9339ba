"""The nftables table of a bridge: what a guest sends to the relay stays on the guest's host.

On a LAN, the bridge of every host with a daemon has the relay's addresses. A guest that was
migrated goes on sending to the MAC of the host that it has left, or of that host's router, until
its own neighbor table forgets it, which may take minutes. So the daemon keeps a table:

- What comes from a guest's port for the relay goes to this bridge, whatever MAC it is sent to. A
  connection to the old host that the guest still has open is reset: this host does not know it.
- What comes from another port, such as the one to the LAN, for the relay is dropped, and the
  relay's addresses are not announced there. So a host is silent to guests of other hosts.
- Neither a guest nor another machine can claim the relay's addresses.
- A guest can begin a limited number of connections per second. Many half-open ones would have the
  kernel use SYN cookies, and then it does not know from which port a connection comes. Fragments
  are dropped: the flags of TCP may be in the second one.

A frame with the VLAN 0 has only a priority, and Linux receives it as one without a tag. So rules
match the protocol behind that tag (`meta protocol`; `arp` or `ip` alone would match that of the
frame). Frames of other VLANs pass.

A guest's port is one where the inventory has a VM, or any tap device: a VM that arrives by
migration has its port before the inventory has the VM.

The table stays when the daemon ends. Without it, guests would be led to other hosts until the next
daemon starts; with it, they are refused at once, and try again.
"""

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from forewarn.errors import Unavailable
from forewarn.hostd.netlink import nftables_generation
from forewarn.log import log

INTERFACES = Path("/sys/class/net")
PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
NFT_SECONDS_MAX = 10.0
LOADS_MAX = 3
"""At a time, if other programs change tables meanwhile, perhaps this one."""
CONNECTIONS_PER_SECOND, CONNECTIONS_BURST = 100, 200
"""Of one port. A half-open connection lasts three seconds, and the kernel holds 4096 of them."""
UNUSUAL = re.compile(r"[^A-Za-z0-9_.-]")
RULES = """\
add table bridge {table}
delete table bridge {table}
table bridge {table} {{
    set connecting {{
        type iface_index; size 4096; flags dynamic, timeout; timeout 1m;
    }}
    chain prerouting {{
        type filter hook prerouting priority -300; policy accept;
        @ll,96,16 {{ 0x8100, 0x88a8 }} @ll,112,16 & 0x0fff != 0 accept
{stacked_tags}
{requests}
{claims}
    }}
    chain request {{
{from_others}
{from_guests}
    }}
    chain guest_request {{
        meta protocol ip ip frag-off & 0x3fff != 0 drop
        meta protocol ip6 exthdr frag exists drop
        tcp flags & (syn | ack) == syn update @connecting {{ iif limit rate over \
{rate}/second burst {burst} packets }} drop
        ether daddr set {mac} meta pkttype set host
    }}
    chain claim {{
{no_claims}
    }}
    chain output {{
        type filter hook output priority -300; policy accept;
{silence}
    }}
}}
"""


class Ports(NamedTuple):
    """The ports of a bridge, by the indexes of their interfaces."""

    guests: frozenset[int]
    others: frozenset[int]


async def run_nft(arguments: Sequence[str], script: str = "") -> str:
    """What nft prints; Unavailable with what it complains about.

    The script is a file in memory: nft may end before it has read a pipe.
    """
    program = shutil.which("nft", path=PATH)
    if program is None:
        raise Unavailable("the program nft is not installed; expected the package nftables")
    pipe = asyncio.subprocess.PIPE
    with open(os.memfd_create("nft"), "w+b") as file:
        file.write(script.encode())
        file.seek(0)
        process = await asyncio.create_subprocess_exec(
            program, *arguments, stdin=file, stdout=pipe, stderr=pipe
        )
    try:
        async with asyncio.timeout(NFT_SECONDS_MAX):
            printed, errors = await process.communicate()
    except TimeoutError as error:
        raise Unavailable(f"nft takes longer than {NFT_SECONDS_MAX:g} seconds") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        raise Unavailable(f"nft failed: {' '.join(errors.decode(errors='replace').split())[:300]}")
    return printed.decode(errors="replace")


class BridgeTable:
    """The table of one bridge, in the bridge family. `keep` is called every few seconds."""

    def __init__(
        self,
        bridge: str,
        addresses: Sequence[str],
        run: Callable[[Sequence[str], str], Awaitable[str]] = run_nft,
        read_generation: Callable[[], int] = nftables_generation,
    ) -> None:
        self._bridge = bridge
        self._addresses = addresses
        self._name = table_name(bridge)
        self._run = run
        self._read_generation = read_generation
        self._script = ""
        self._listing = ""
        self._generation = 0

    async def keep(self, mac: str, ports: Ports) -> None:
        """Load the table unless it is loaded; Unavailable if that is not possible.

        The kernel counts changes of all tables, so most calls need no process.
        """
        script = write_script(self._name, self._addresses, mac, ports)
        generation = self._read_generation()
        if script == self._script:
            if generation == self._generation:
                return
            if await self._list() == self._listing:
                self._generation = generation
                return
            log.warning("nftables rules were removed or changed; restored", table=self._name)
        self._script = ""
        for _ in range(LOADS_MAX):
            generation = self._read_generation() + 1  # a load is one change
            await self._run(["-f", "-"], script)
            self._listing = await self._list()
            if self._read_generation() == generation:
                break  # so nothing else has changed what was listed
        if not self._listing:
            raise Unavailable(f"the nftables table {self._name} was removed while it was loaded")
        self._script, self._generation = script, generation

    async def _list(self) -> str:
        """The rules as nft prints them, without what changes by itself; empty without a table.

        nft fails in the same way without a table as for any other reason, so the tables are
        listed first.
        """
        tables = await self._run(["list", "tables", "bridge"], "")
        if f"table bridge {self._name}" not in tables.splitlines():
            return ""
        return await self._run(["-s", "-t", "list", "table", "bridge", self._name], "")


def table_name(bridge: str) -> str:
    """nft accepts only some characters in a name."""
    return "forewarn_" + UNUSUAL.sub(lambda match: f"_{ord(match[0]):x}_", bridge)


def find_ports(bridge: str, vms: dict[int, str], interfaces: Path = INTERFACES) -> Ports:
    """The ports that the bridge has now. One that disappears meanwhile is left out."""
    guests, others = set[int](), set[int]()
    for port in (interfaces / bridge / "brif").iterdir():
        interface = interfaces / port.name
        with suppress(OSError):
            index = int((interface / "ifindex").read_text())
            is_guest = index in vms or (interface / "tun_flags").exists()
            (guests if is_guest else others).add(index)
    return Ports(frozenset(guests), frozenset(others))


def write_script(table: str, addresses: Sequence[str], mac: str, ports: Ports) -> str:
    """Replaces the table in one step.

    Only link-local addresses are taken: another one may be the address by which the host itself
    is reached from the LAN.
    """
    parsed = [ip_address(address) for address in addresses]
    taken = [address for address in parsed if address.is_link_local]
    requests, claims, silence = list[str](), list[str](), list[str]()
    guests, others = (", ".join(map(str, sorted(each))) for each in ports)
    for address in taken:
        requests += [f"{match} goto request" for match in _requests(address)]
        claims += [f"{match} goto claim" for match in _claims(address)]
        if others:
            silence += [f"oif {{ {others} }} {match} drop" for match in _claims(address)]
        if guests and isinstance(address, IPv4Address):  # a router may send it back from the LAN
            claims.append(f"iif {{ {guests} }} meta protocol ip ip saddr {address} drop")
    both = ", ".join(filter(None, (guests, others)))
    rules = {
        "stacked_tags": [f"iif {{ {both} }} meta protocol {{ 8021q, 8021ad }} drop"]
        if both
        else [],
        "requests": requests,
        "claims": claims,
        "from_others": [f"iif {{ {others} }} drop"] if others else [],
        "from_guests": [f"iif {{ {guests} }} goto guest_request"] if guests else [],
        "no_claims": [f"iif {{ {both} }} drop"] if both else [],
        "silence": silence,
    }
    lines = {name: "\n".join(" " * 8 + rule for rule in each) for name, each in rules.items()}
    rate, burst = CONNECTIONS_PER_SECOND, CONNECTIONS_BURST
    return RULES.format(table=table, mac=mac, rate=rate, burst=burst, **lines)


def _requests(address: IPv4Address | IPv6Address) -> list[str]:
    """What asks for the address, or is sent to it."""
    if isinstance(address, IPv4Address):
        return [f"meta protocol ip ip daddr {address}", f"meta protocol arp arp daddr ip {address}"]
    solicitation = f"icmpv6 type nd-neighbor-solicit {_target(address)}"
    return [f"meta protocol ip6 {match}" for match in (f"ip6 daddr {address}", solicitation)]


def _claims(address: IPv4Address | IPv6Address) -> list[str]:
    """What announces that its sender has the address."""
    if isinstance(address, IPv4Address):
        return [f"meta protocol arp arp saddr ip {address}"]
    advertisement = f"icmpv6 type nd-neighbor-advert {_target(address)}"
    return [f"meta protocol ip6 {match}" for match in (f"ip6 saddr {address}", advertisement)]


def _target(address: IPv6Address) -> str:
    """The target of a neighbor message; nft has no name for it before 1.0.9."""
    return f"@th,64,128 {int(address):#x}"
