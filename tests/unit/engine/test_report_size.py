"""How large a report may be, and that its size delays no polls."""

import asyncio
from typing import Any

import msgspec
import pytest

from forewarn.engine.inventory import VM_BYTES_MAX, HostInventory
from forewarn.hostd.worker import DETAILS_LENGTH_MAX, PROBLEMS_LENGTH_MAX
from forewarn.platform.remote import UNMOVABLE_LENGTH_MAX, VMS_MAX
from tests.unit.engine.hostd_world import World, encoded, reported, run, vm_id

NAME_LENGTH_MAX = 128


def largest(number: int) -> dict[str, Any]:
    """A VM with long names, four addresses and a reason why it cannot move."""
    return reported(
        f"{number:0{NAME_LENGTH_MAX}}",
        id=f"00000000-0000-4000-8000-{number:012}",
        macs=[f"52:54:00:00:{number >> 8:02x}:{number & 255:02x}"] * 2,
        addresses=[f"2001:0db8:0000:0000:0000:0000:{each}:{number:04x}" for each in range(1, 4)]
        + [f"10.0.{number >> 8}.{number & 255}"],
        scope=f"{number % 1000:0{NAME_LENGTH_MAX}}",
        kind="availability-set",
        update_domain=19,
        fault_domain=2,
        unmovable="x" * UNMOVABLE_LENGTH_MAX,
    )


def test_largest_report_of_a_real_host_is_accepted() -> None:
    """All of its VMs, and a failed command for each."""
    result = {
        "problem": "x" * (PROBLEMS_LENGTH_MAX // VMS_MAX),
        "detail": "x" * (DETAILS_LENGTH_MAX // VMS_MAX),
        "is_back": False,
        "is_final": True,
    }
    vms = [largest(number) for number in range(VMS_MAX)]
    failed = [{"event_id": vm["id"], "vm": vm["name"], "tries": 99, "result": result} for vm in vms]

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a")
        daemon.running = failed
        response = await daemon.send(inventory={"vms": vms, "memory_bytes": 1 << 40})
        assert response.status_code == 200
        # a daemon that gets a 429 looks for another server
        assert (await daemon.send()).status_code == 200

    run(test)


@pytest.mark.parametrize("size", [VM_BYTES_MAX - 1000, VM_BYTES_MAX + 1000, 10 * VM_BYTES_MAX])
def test_vm_with_too_many_bytes_is_not_accepted_and_hides_no_other(size: int) -> None:
    """What is known of it stays."""

    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0"), reported("web-1"))
        padded = reported("web-0", power="stopped", unknown="x" * size)
        problems = await daemon.report(padded, reported("web-1", power="stopped"))
        powers = [world.servers[0].vm(name).power for name in ("web-0", "web-1")]
        if size < VM_BYTES_MAX:
            assert (problems, powers) == ([], ["stopped", "stopped"])
        else:
            (problem,) = problems
            assert problem.startswith("VM 'web-0': it has ")
            assert problem.endswith(f" bytes; at most {VM_BYTES_MAX} are accepted")
            assert powers == ["running", "stopped"]

    run(test)


@pytest.mark.parametrize(
    ("vm", "problem"),
    [
        (7, "VM '': not a JSON object"),
        ([{}], "VM '': not a JSON object"),
        ({}, "VM '': name: expected"),
        ({"name": [1], "id": vm_id("web-0")}, "VM '': name: expected"),
        ({"name": "web-0", "id": 7}, "VM 'web-0': id: expected"),
    ],
)
def test_entry_that_is_not_a_vm_hides_no_other(vm: Any, problem: str) -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a")
        (found,) = await daemon.report(reported("web-1"), vm)
        assert found.startswith(problem)
        assert world.servers[0].vm("web-1").host == "host-a"

    run(test)


def test_entry_that_cannot_be_decoded_hides_no_other() -> None:
    """Such as one that is nested too deeply for the decoder."""

    async def test(world: World) -> None:
        deep = "[" * 900 + "]" * 900
        server = world.servers[0]
        bad = f'{{"name": {deep}}}'.encode(), b'{"name": "\xff"}', b'{"name": "\\ud800"}'
        vms = [*encoded(reported("web-0")), *map(msgspec.Raw, bad)]
        inventory = HostInventory(server.engine, server.hosts.managed, "host-a", vms)
        await inventory.read()
        assert list(inventory.vms) == [vm_id("web-0")]
        assert len(inventory.problems) == len(bad)

    run(test)


def test_polls_pass_between_vms_that_take_long_to_decode() -> None:
    async def test(world: World) -> None:
        server, vms = world.servers[0], encoded(*[[[1]] * 4000] * 50)
        assert all(10_000 < len(vm) < VM_BYTES_MAX for vm in vms)
        inventory = HostInventory(server.engine, server.hosts.managed, "host-a", vms)
        reading, turns = asyncio.ensure_future(inventory.read()), 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= len(vms) // 2

    run(test)
