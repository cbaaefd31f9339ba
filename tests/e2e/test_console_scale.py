"""The console with 10,000 VMs. Times are printed, not checked: a busy machine is not a defect."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.cli_service import Service, running
from tests.e2e.console_page import console
from tests.e2e.test_console import poll

pytestmark = pytest.mark.system
SCOPES, VMS = 20, 500
FIRST_TILES = """new Promise((resolve) => {
    const look = () => document.querySelectorAll("a.tile").length >= %d
        ? requestAnimationFrame(() => resolve(performance.now())) : setTimeout(look, 5);
    look();
})"""
CHANGE_BYTES_MAX = 20_000
"""What a page reads again after one change, whatever the size of the fleet."""
RESTART = r"""(vm) => new Promise(async (resolve) => {
    performance.clearResourceTimings();
    const tile = document.querySelector(`a.tile[data-name="${vm}"]`);
    const changed = new Set();
    const start = performance.now();
    new MutationObserver((records) => {
        for (const { target } of records) changed.add(target.dataset.name);
        if (tile.dataset.state === "notice") {
            requestAnimationFrame(() => resolve([performance.now() - start, [...changed],
                performance.getEntriesByType("resource")
                    .filter(({ name }) => /v1\/(vms|scopes|events|hosts)[?]/.test(name))
                    .reduce((sum, each) => sum + each.transferSize, 0)]));
        }
    }).observe(document.querySelector(".fleet"), { subtree: true, attributeFilter: ["data-state"]});
    await fetch(`/api/v1/vms/${vm}/restart`, { method: "POST" });
})"""


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Service]:
    lines = ["scopes:"]
    for scope in range(SCOPES):
        lines.append(f"  - name: s{scope:02}\n    kind: scale-set\n    vms:")
        for vm in range(VMS):
            place = f"update_domain: {vm % 5}, host: host-{(scope * VMS + vm) % 400:03}"
            lines.append(f"      - {{name: s{scope:02}_{vm:03}, {place}}}")
    (tmp_path / "fleet.yaml").write_text("\n".join(lines))
    flags = ("--fleet", "fleet.yaml", "--store", "memory", "--identify", "path")
    with running(tmp_path, "serve", *flags) as service:
        yield service


def test_ten_thousand_vms_are_shown_and_one_change_redraws_one_tile(
    large: Service, record_property: Callable[[str, object], None]
) -> None:
    with console(large.control) as shown:
        page = shown.page
        poll(large.metadata, "s07_123")
        page.goto(f"{large.control}/#/fleet", wait_until="commit")
        first = page.evaluate(FIRST_TILES % 1)
        complete = page.evaluate(FIRST_TILES % (SCOPES * VMS))
        expect(page.locator(".lead")).to_have_text("10,000 VMs")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        expect(page.locator("#live")).to_have_text("Live")
        redraw, changed, size = page.evaluate(RESTART, "s07_123")
        page.get_by_label("Search").fill("s07_12")
        expect(page.locator("a.tile:visible")).to_have_count(10)
    record_property(
        "measured",
        f"console with 10,000 VMs: first paint {paint:.0f} ms, first tiles {first:.0f} ms, all"
        f" {complete:.0f} ms after the request; one change, from the click to the redrawn tile,"
        f" {redraw:.0f} ms, and {size:,} bytes are read",
    )
    assert changed == ["s07_123"]
    assert 0 < size < CHANGE_BYTES_MAX


def test_every_waiting_event_can_be_reached(large: Service) -> None:
    """By deadline, a hundred at a time."""
    for scope in range(5):
        poll(large.metadata, f"s{scope:02}_000")
    with console(large.control) as shown:
        shown.page.goto(large.control)
        shown.page.evaluate(
            "() => Promise.all([...Array(240).keys()].map((each) => fetch("
            "`/api/v1/vms/s0${each % 5}_${String(100 + each)}/restart`, {method: 'POST'})))"
        )
        page = shown.open()
        rows = page.locator(".stack tbody tr")
        expect(rows).to_have_count(100)
        page.get_by_role("button", name="Show 100 more of 140 with later deadlines").click()
        expect(rows).to_have_count(200)
        page.get_by_role("button", name="Show 40 more of 40 with later deadlines").press("Enter")
        expect(rows).to_have_count(240)
        times = rows.locator("time").evaluate_all("all => all.map((each) => each.dateTime)")
        focused = page.evaluate("document.activeElement.closest('tr').sectionRowIndex")

    assert times == sorted(times)
    assert focused == 200
