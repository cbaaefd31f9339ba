"""The VMs of a host, from a command, and what happens when they cannot be listed."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from forewarn.core.fleet import ScopeKind
from forewarn.errors import Invalid, Unavailable
from forewarn.hostd.inventory import CommandSource, Inventory, ListedVm, Report
from forewarn.option_kind import ExecCommand
from tests.builders import guid
from tests.unit.hostd.fake_server import FakeSource, running_together, until
from tests.unit.hostd.http_server import in_loop


def source(*words: str, seconds_max: float = 30) -> CommandSource:
    return CommandSource(ExecCommand("", words), os.environ, seconds_max)


def printing(content: Any) -> CommandSource:
    return source("echo", content if isinstance(content, str) else json.dumps(content))


@in_loop
async def test_a_command_lists_the_vms() -> None:
    full = {
        "name": "web-0",
        "id": guid(1),
        "macs": ["52:54:00:00:00:01", "52:54:00:00:00:02"],
        "addresses": ["10.0.0.7", "2001:db8::7"],
        "power": "stopped",
        "memory_bytes": 1024,
        "scope": "web",
        "kind": "availability-set",
        "update_domain": 1,
        "fault_domain": 0,
        "ports": ["tap0"],
    }
    report = await printing([full, {"name": "db", "id": guid(2)}]).list_vms()

    assert report.vms == (
        ListedVm(
            name="web-0",
            id=guid(1),
            macs=("52:54:00:00:00:01", "52:54:00:00:00:02"),
            addresses=("10.0.0.7", "2001:db8::7"),
            power="stopped",
            memory_bytes=1024,
            scope="web",
            kind=ScopeKind.AVAILABILITY_SET,
            update_domain=1,
            fault_domain=0,
            ports=("tap0",),
        ),
        ListedVm(name="db", id=guid(2)),
    )
    assert report.memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: printing("nothing"), "inventory_command printed something else: JSON is malfor"),
        (lambda: source("printf", r'[{"name": "\377"}]'), "printed something else: 'utf-8' codec"),
        (lambda: source("printf", "%100000s", "[" * 90000), "printed something else: "),
        (lambda: printing([{"name": "a"}]), "Object missing required field `id`"),
        (lambda: printing([{"name": "a", "id": "7"}]), r"`\$\[0\].id`"),
        (lambda: printing([{"name": "a", "id": guid(1), "prots": []}]), "unknown field `prots`"),
        (lambda: source("sh", "-c", "echo why >&2; exit 3"), "exited with 3: why"),
        (lambda: source("sh", "-c", "yes", seconds_max=1), "printed more than"),
        (lambda: source("sleep", "60", seconds_max=0.1), "did not finish within 0.1 seconds"),
    ],
)
@in_loop
async def test_a_wrong_command_is_reported_in_one_line(made: Any, message: str) -> None:
    with pytest.raises(Unavailable, match=message) as raised:
        await made().list_vms()
    assert "\n" not in str(raised.value)


@in_loop
async def test_a_command_that_does_not_exist_is_rejected_at_startup() -> None:
    with pytest.raises(Invalid, match="inventory_command: 'nowhere' is not found"):
        source("nowhere")


@in_loop
async def test_the_last_vms_are_kept_while_they_cannot_be_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The relay still identifies guests while libvirt restarts. One line tells it."""
    made = FakeSource("web-0")
    inventory = Inventory(made, 0.01, lambda: [(11, "vnet1")])
    with caplog.at_level(logging.INFO, "forewarn"):
        async with running_together(inventory.run()):
            await until(inventory.tried.is_set)
            made.problem = Unavailable("libvirt does not run")
            await until(lambda: inventory.problem)
            made.woken.set()
            assert inventory.ids == {11: guid(1).lower()}
            made.problem = None
            made.woken.set()
            await until(lambda: not inventory.problem)
    assert caplog.messages == [
        "the VMs of this host are listed",
        "the VMs of this host cannot be listed",
        "the VMs of this host are listed",
    ]


@in_loop
async def test_the_command_runs_again_and_changes_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "vms.json"
    file.write_text("[]")
    inventory = Inventory(source("cat", str(file)), 0.01, lambda: [(12, "tap2"), (13, "tap3")])
    async with running_together(inventory.run()):
        await until(inventory.tried.is_set)
        changes, ports = list[Report](), list[dict[int, str]]()
        inventory.on_change = lambda: changes.append(inventory.report)
        inventory.on_ports = lambda: ports.append({**inventory.ids})
        file.write_text(json.dumps([{"name": "db", "id": guid(2), "ports": ["tap2"]}]))
        await until(lambda: changes)
    assert ports == [{12: guid(2).lower()}]


class Interfaces:
    """Those of a host; a name that is used again has another index."""

    def __init__(self, *found: tuple[int, str]) -> None:
        self.found = [*found]

    def __call__(self) -> list[tuple[int, str]]:
        return [*self.found]


class SlowSource(FakeSource):
    """The test decides when it answers."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.is_asked, self.answers = asyncio.Event(), asyncio.Semaphore(0)

    async def list_vms(self) -> Report:
        report = await super().list_vms()
        self.is_asked.set()
        await self.answers.acquire()
        return report


@in_loop
async def test_interface_name_used_again_is_not_the_old_vm() -> None:
    """Its guest would be served as the VM that had the name before, until the next listing."""
    made, interfaces = SlowSource("web-0"), Interfaces((11, "vnet1"))
    inventory = Inventory(made, 3600, interfaces)
    async with running_together(inventory.run()):
        made.answers.release()
        await until(inventory.tried.is_set)
        assert inventory.ids == {11: guid(1).lower()}
        interfaces.found = [(12, "vnet1")]
        assert inventory.ids.get(12) is None


@in_loop
async def test_interface_replaced_during_a_listing_is_not_the_listed_vms() -> None:
    made, interfaces = SlowSource("web-0"), Interfaces((11, "vnet1"))
    inventory = Inventory(made, 3600, interfaces)
    async with running_together(inventory.run()):
        await made.is_asked.wait()
        interfaces.found = [(12, "vnet1")]
        made.answers.release()
        await until(inventory.tried.is_set)
        assert inventory.ids == {}


@in_loop
async def test_port_of_two_running_vms_is_neithers() -> None:
    made = FakeSource()
    made.vms = (
        ListedVm(name="a", id=guid(1), ports=("tap0", "tap1")),
        ListedVm(name="b", id=guid(2), ports=("tap0", "tap2")),
        ListedVm(name="c", id=guid(3), ports=("tap2", "tap3"), power="stopped"),
    )
    found = [(index, f"tap{index}") for index in range(4)]
    inventory = Inventory(made, 3600, Interfaces(*found))
    async with running_together(inventory.run()):
        await until(inventory.tried.is_set)
    assert inventory.ids == {0: "", 1: guid(1).lower(), 2: guid(2).lower()}
