"""One listener per VM: every request on it is a request of that VM."""

import asyncio
from collections.abc import Callable, Container

from forewarn.errors import Refused
from forewarn.web.http.listener import Listener

LISTENERS_MAX = 256


class VmListeners:
    """The listeners of single VMs. `make` creates the one of a VM."""

    def __init__(self, make: Callable[[str], Listener]) -> None:
        self._make = make
        self._listeners: dict[str, Listener] = {}
        self._opening = asyncio.Lock()

    async def open(self, vm: str, vms: Container[str]) -> str:
        """Return the URL of a VM's listener, opened on the first call.

        Listeners of VMs that have left the fleet make room.
        """
        async with self._opening:
            gone = [self._listeners.pop(name) for name in list(self._listeners) if name not in vms]
            await asyncio.gather(*(listener.stop() for listener in gone))
            if vm not in self._listeners:
                if len(self._listeners) >= LISTENERS_MAX:
                    raise Refused(
                        f"{LISTENERS_MAX} VMs have a listener already;"
                        f" use /as/{vm} on the shared listener",
                        listeners_max=LISTENERS_MAX,
                    )
                listener = self._make(vm)
                await listener.start()
                self._listeners[vm] = listener
            return f"http://{self._listeners[vm].address}"

    def urls(self) -> dict[str, str]:
        """Return the URLs of the open listeners, sorted by VM."""
        return {
            vm: f"http://{listener.address}" for vm, listener in sorted(self._listeners.items())
        }

    async def close(self) -> None:
        stops = (listener.stop() for listener in self._listeners.values())
        await asyncio.gather(*stops, return_exceptions=True)
