"""The VMs of a host, from a command, and what happens when they cannot be listed."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from forewarn.core.fleet import Power, ScopeKind
from forewarn.errors import Invalid, Unavailable
from forewarn.hostd.inventory import CommandSource, Inventory, ListedVm
from forewarn.option_kind import ExecCommand
from tests.builders import guid
from tests.unit.hostd.fake_server import FakeSource, running_together, until
from tests.unit.hostd.http_server import in_loop


def source(*words: str) -> CommandSource:
    return CommandSource(ExecCommand("", words), os.environ)


def printing(content: Any) -> CommandSource:
    return source("echo", content if isinstance(content, str) else json.dumps(content))


@in_loop
async def test_a_command_lists_the_vms() -> None:
    full = {
        "name": "web-0",
        "id": guid(1),
        "mac": "52:54:00:00:00:01",
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
            mac="52:54:00:00:00:01",
            addresses=("10.0.0.7", "2001:db8::7"),
            power=Power.STOPPED,
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
        (lambda: printing([{"name": "a"}]), "Object missing required field `id`"),
        (lambda: printing([{"name": "a", "id": "7"}]), r"`\$\[0\].id`"),
        (lambda: printing([{"name": "a", "id": guid(1), "prots": []}]), "unknown field `prots`"),
        (lambda: source("sh", "-c", "echo why >&2; exit 3"), "exited with 3: why"),
        (lambda: source("sh", "-c", "yes"), "printed more than"),
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
    inventory = Inventory(made, 0.01)
    with caplog.at_level(logging.INFO, "forewarn"):
        async with running_together(inventory.run()):
            await until(inventory.readable.is_set)
            made.problem = Unavailable("libvirt does not run")
            await until(lambda: not inventory.readable.is_set())
            made.woken.set()
            assert inventory.vm_of_port("virbr0", "vnet1") == guid(1).lower()
            made.problem = None
            made.woken.set()
            await until(inventory.readable.is_set)
    assert caplog.messages == [
        "the VMs of this host are listed",
        "the VMs of this host cannot be listed",
        "the VMs of this host are listed",
    ]


@in_loop
async def test_the_command_runs_again_and_changes_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "vms.json"
    file.write_text("[]")
    inventory = Inventory(source("cat", str(file)), 0.01)
    async with running_together(inventory.run()):
        await until(inventory.readable.is_set)
        inventory.changed.clear()
        file.write_text(json.dumps([{"name": "db", "id": guid(2), "ports": ["tap2"]}]))
        await until(inventory.changed.is_set)
    assert inventory.vm_of_port("br0", "tap2") == guid(2).lower()
    assert "ports" not in inventory.report.as_sent()["vms"][0]
