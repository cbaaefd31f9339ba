"""Listeners of their own for single VMs.

Each can be shut, and then connections are really refused, and opened again.
"""

import asyncio
import socket
from collections.abc import Callable, Container

from forewarn.config import Address
from forewarn.errors import Refused, Unavailable
from forewarn.web.http.listener import Listener

DOORS_MAX = 256


class Doors:
    """The doors of a lab. `make` gives the listener of a VM for an address."""

    def __init__(self, make: Callable[[str, Address], Listener]) -> None:
        self._make = make
        self._doors: dict[str, Door] = {}

    async def of(self, vm: str, vms: Container[str]) -> "Door":
        """The door of a VM, opened if it is new. Those of VMs that are gone make room."""
        gone = [self._doors.pop(name) for name in list(self._doors) if name not in vms]
        await asyncio.gather(*(door.close() for door in gone))
        if vm not in self._doors:
            if len(self._doors) >= DOORS_MAX:
                raise Refused(
                    f"there are {DOORS_MAX} doors already; use /as/{vm} on the shared listener",
                    doors_max=DOORS_MAX,
                )
            self._doors[vm] = Door(lambda address: self._make(vm, address))
        door = self._doors[vm]
        if not door.address.port:
            await door.open()
        return door

    def addresses(self) -> dict[str, Address]:
        """Where each door stands, also one that is shut for now; in the order of the VMs' names."""
        return {vm: door.address for vm, door in sorted(self._doors.items()) if door.address.port}

    def __contains__(self, vm: str) -> bool:
        return vm in self._doors

    async def move(self, is_shut: Callable[[str], bool]) -> None:
        """Shut those that are to be shut, and open the others.

        All are tried before one that cannot be opened is told.
        """
        problems: list[Unavailable] = []
        for vm, door in list(self._doors.items()):
            try:
                await (door.shut() if is_shut(vm) else door.open())
            except Unavailable as problem:
                problems.append(problem)
        if problems:
            raise problems[0]

    async def close(self) -> None:
        await asyncio.gather(
            *(door.close() for door in self._doors.values()), return_exceptions=True
        )


class Door:
    """One listener; the first one chooses the port, and nobody else gets it while the door is shut."""

    def __init__(self, make: Callable[[Address], Listener]) -> None:
        self.address = Address("127.0.0.1", 0)
        self._make = make
        self._listener: Listener | None = None
        self._held: socket.socket | None = None
        self._ends: set[asyncio.Task[None]] = set()
        self._moving = asyncio.Lock()
        self._is_closed = False

    async def open(self) -> None:
        async with self._moving:
            if self._listener is None and not self._is_closed:
                self._let_go()
                listener = self._make(self.address)
                await listener.start()
                self._listener, self.address = listener, listener.address

    async def shut(self) -> None:
        """From now on connections are refused; those that there were are cut off.

        What is left of them ends by itself.
        """
        async with self._moving:
            if self._listener is not None:
                listener, self._listener = self._listener, None
                await listener.disconnect()
                self._held = _hold(self.address)
                end = asyncio.create_task(listener.stop())
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)

    async def close(self) -> None:
        """For good: answer what is in flight, and let the port go."""
        async with self._moving:
            self._is_closed = True
            self._let_go()
            listener, self._listener = self._listener, None
            if listener is not None:
                await listener.stop()
            await asyncio.gather(*self._ends)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _hold(address: Address) -> socket.socket | None:
    """A socket that has the address, and refuses to share it;

    None if somebody was quicker, and then `open` says so.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections that have ended are no obstacle
        held.bind((address.host, address.port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        held.close()
        return None
    return held
