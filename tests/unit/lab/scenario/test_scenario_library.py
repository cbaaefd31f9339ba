"""The library: each scenario passes with good guests, and fails with wrong ones."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from forewarn.lab.scenario.schema import (
    Approves,
    GuestEntry,
    Scenario,
    list_library,
    list_vms,
    load_from_library,
)
from tests.unit.lab.scenario.small_scenarios import play

NEVER = {"approve": "never"}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "bad-day": (NEVER, "web-0 approves patch within 3m", "was not approved by web-0 in time"),
    "cancelled-maintenance": (
        {"approve": "5s"},
        "no VM approves patch",
        "web-0 approved Reboot of web-0",
    ),
    "degraded-hardware": (
        NEVER,
        "db-0 approves repair within 1d",
        "was not approved by db-0 in time",
    ),
    "hardware-failure": (
        {"poll": "10m"},
        "web-0 is shown a Started Platform Reboot event failure within 5s",
        "was shown like this after 1m38.7s",
    ),
    "host-reboot": (NEVER, "web-0 approves patch within 10m", "was not approved by web-0 in time"),
    "host-update": (
        {"approve": "0s", "of": Approves.FOREIGN},
        "no VM approves an event of other VMs",
        "web-1 approved Freeze of web-0",
    ),
    "live-migration": (
        {"of": Approves.FOREIGN},
        "db-2 never approves migration",
        "db-2 approved Freeze of db-0, db-1",
    ),
    "long-day": (
        NEVER,
        "one of its VMs approves restart within 90s",
        "was not approved by one of its VMs in time",
    ),
    "rolling-update": (
        {"of": Approves.FOREIGN},
        "no VM approves an event of other VMs",
        "which does not name it",
    ),
    "scale-in-terminate": (
        NEVER,
        "one of its VMs approves scale-in within 3m",
        "was not approved by one of its VMs in time",
    ),
    "spot-eviction": (
        {"approve": "25s"},
        "batch_0 approves eviction within 20s",
        "was approved by batch_0 after 25.3s",
    ),
    "user-redeploy": ({"approve": "10s"}, "no VM approves patch", "app-0 approved Reboot of app-0"),
    "user-restart": (NEVER, "restart is started within 30s", "was started after 15m"),
}


@pytest.mark.parametrize("name", list_library())
def test_scenario_passes_with_good_guests(name: str) -> None:
    result = play(load_from_library(name))

    assert [verdict for verdict in result.verdicts if not verdict.is_passed] == []
    assert len(result.verdicts) >= 3


@pytest.mark.parametrize("name", list_library())
def test_scenario_fails_with_a_wrong_guest(name: str) -> None:
    guest, expected, reason = WRONG[name]
    result = play(with_guest(shortened(load_from_library(name)), GuestEntry(**guest)))
    failed = {
        verdict.expected: verdict.reason for verdict in result.verdicts if not verdict.is_passed
    }

    assert expected in failed
    assert reason in failed[expected]


def with_guest(scenario: Scenario, guest: GuestEntry) -> Scenario:
    vms = list_vms(*scenario.fleets)
    return dataclasses.replace(scenario, guests=dict.fromkeys(vms, guest))


def shortened(scenario: Scenario) -> Scenario:
    """A thousand times the same failure is not needed to see it once."""
    steps = tuple(
        step if step.repeat is None else replace(step, repeat=replace(step.repeat, times=3))
        for step in scenario.file.steps
    )
    return dataclasses.replace(
        scenario,
        file=replace(scenario.file, steps=steps, until=min(scenario.file.until, "2h", key=len)),
    )
