"""Doors: one that cannot be opened again keeps no other shut."""

import asyncio
from typing import cast

import pytest

from forewarn.config import Address
from forewarn.errors import Unavailable
from forewarn.lab.listeners import Doors
from forewarn.web.http.listener import Listener


class Taken:
    """A listener of which only the first can have the port."""

    def __init__(self, vm: str, address: Address, opened: list[str]) -> None:
        self.vm = vm
        self.address = address
        self.opened = opened

    async def start(self) -> None:
        if self.address.port and self.vm == "web-0":
            raise Unavailable("cannot listen: another program does already")
        self.address = Address("127.0.0.1", 8000 + len(self.opened))
        self.opened.append(self.vm)

    async def disconnect(self) -> None:
        self.opened.remove(self.vm)

    async def stop(self) -> None: ...


def test_all_doors_are_tried_before_one_that_cannot_be_opened_is_told() -> None:
    opened: list[str] = []

    async def story() -> None:
        doors = Doors(lambda vm, address: cast("Listener", Taken(vm, address, opened)))
        for vm in ("web-0", "web-1"):
            await doors.of(vm, {"web-0", "web-1"})
        await doors.move(lambda vm: True)
        assert opened == []
        with pytest.raises(Unavailable, match="another program does already"):
            await doors.move(lambda vm: False)
        assert opened == ["web-1"]
        await doors.close()

    asyncio.run(story())
