"""The console against the real server: what operators do with it."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.cli_service import ROOT, environment, forewarn
from tests.e2e.console_page import OFFLINE, console
from tests.e2e.service import Service, steady_port
from tests.e2e.waiting import eventually

pytestmark = pytest.mark.system
POLL = "metadata/scheduledevents?api-version=2020-07-01"
PICTURE_WIDTH = "document.querySelector('.picture svg').clientWidth"
"""In one step: a change redraws the picture, and a removed element has no width."""
VIEWS = {
    "#/": "1 event under impact, 9 in notice; 8 waiting for approval",
    "#/fleet": "52 VMs",
    "#/vms/web-0": "update domain 0",
    "#/hosts": "kvm-09",
    "#/hosts/kvm-05": "No: 7 VMs would be interrupted",
    "#/hosts/kvm-09": "Yes: no VM runs on it",
    "#/campaigns": "kernel 6.12",
    "#/campaigns/c1": "1 of 5 hosts done",
    "#/campaigns/new": "Preview the plan",
    "#/history": "Export as JSON Lines",
    "#/lab": "paused, rate 1",
}


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """The URL of a lab after a busy day. Tests must leave its fleet and events as they were."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.busy_lab"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Lab(NamedTuple):
    """`forewarn lab serve` with the demo's fleet, whose VMs have polled."""

    control: str
    metadata: str

    def forewarn(self, *arguments: str) -> str:
        done = forewarn("--control-url", self.control, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def lab(folder: Path, *flags: str) -> Iterator[Lab]:
    """Its clock is paused, so no notice passes while a busy machine draws a page."""
    start = ("--start", "2030-01-31T12:00:00Z")
    command = ["lab", "serve", "--port", "0", "--control-port", "0", *start, *flags]
    with subprocess.Popen(
        [sys.executable, "-m", "forewarn", *command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            first, second = process.stdout.readline(), process.stdout.readline()
            found = re.match(r"the lab is ready: metadata (\S+), control (\S+)\n", second)
            assert found, second
            assert first == f"Console: {found[2]}/\n", "what a person needs is printed first"
            poll(found[1], "web-0")
            poll(found[1], "web-1")
            yield Lab(control=found[2], metadata=found[1])
        finally:
            process.kill()


def poll(metadata: str, vm: str) -> None:
    request = Request(f"{metadata}/as/{vm}/{POLL}", headers={"Metadata": "true"})
    with urlopen(request, timeout=30) as response:
        response.read()


def confirm(page: Page, label: str) -> str:
    """Press the button of the dialog; the text that it showed before."""
    dialog = page.get_by_role("dialog")
    button = dialog.get_by_role("button", name=label)
    expect(button).to_be_enabled()
    text = dialog.inner_text()
    button.click()
    return text


def test_every_view_shows_its_content_and_is_accessible(busy: str) -> None:
    """On a phone too, where nothing may be wider than the window."""
    with console(busy, color_scheme="dark") as shown:
        page = shown.open()
        event = page.locator("a.bar").last.get_attribute("href")
        assert event
        found = {}
        for address, text in {**VIEWS, event: "What its VMs see"}.items():
            shown.view(address)
            expect(page.locator("main")).to_contain_text(re.compile(text))
            page.set_viewport_size({"width": 390, "height": 800})
            found[address] = (shown.find_accessibility_problems(), max(shown.overflow(), 0))
            page.set_viewport_size({"width": 1280, "height": 800})

    assert found == dict.fromkeys(found, ([], 0))


def test_light_colours_have_enough_contrast(busy: str) -> None:
    with console(busy, color_scheme="light") as shown:
        found = []
        for address in ("#/", "#/fleet", "#/hosts/kvm-05", "#/campaigns/c1", "#/history", "#/lab"):
            shown.open() if address == "#/" else shown.view(address)
            found += shown.find_accessibility_problems()

    assert found == []


def test_restart_from_click_to_countdown_to_approval_to_finished(tmp_path: Path) -> None:
    with lab(tmp_path, "--running") as service, console(service.control) as shown:
        page = shown.open("#/vms/web-0")
        page.get_by_role("button", name="Restart").click()
        text = confirm(page, "Restart web-0")
        assert re.search(r"web-0 restarts on host-a\.", text)
        assert re.search(r"It starts at 12:1\d:\d\d, in 15m, or earlier once it is approved", text)
        expect(page.get_by_role("dialog")).to_contain_text("Announced. It starts at")
        page.get_by_role("button", name="Close").click()
        expect(page.locator(".head .badge")).to_have_text("▲ in notice")

        shown.view("#/")
        row = page.get_by_role("row", name="web-0").first
        expect(row.locator("time")).to_have_text(re.compile(r"in 1\dm \d+s"))
        before = row.locator("time").inner_text()
        expect(row.locator("time")).not_to_have_text(before)
        expect(page.locator("#sentence")).to_have_text("1 event in notice; 1 waiting for approval.")
        row.get_by_role("button", name="Approve").click()
        confirm(page, "Approve")
        expect(page.locator("#sentence")).to_have_text("1 event under impact.")
        expect(page.get_by_text("Nothing waits for an approval.")).to_be_visible()
        page.get_by_role("button", name="Close").click()
        page.locator("a.bar.impact").click()
        expect(page.locator("#main")).to_contain_text("Impacts")

        service.forewarn("lab", "clock", "advance", "10m")

        def is_over() -> bool:
            poll(service.metadata, "web-0")  # the VM is back
            return "completed" in page.locator(".head .badge").inner_text()

        eventually(is_over)
        expect(page.get_by_role("region", name="History of the event")).to_contain_text("operator")
        shown.view("#/")
        expect(page.locator("#sentence")).to_have_text("All quiet.")


def test_operator_postpones_and_cancels_in_the_row(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("vm", "restart", "web-0")
        page = shown.open()
        page.get_by_role("button", name="Postpone the Reboot of web-0").click()
        page.get_by_label("By how many minutes?").fill("90")
        assert "moves from 12:15:00 to 13:45:00, and cannot be moved back." in confirm(
            page, "Postpone"
        )
        expect(page.get_by_role("dialog")).to_contain_text("Postponed to")
        page.get_by_role("button", name="Close").click()
        expect(page.locator("tbody time")).to_have_text("in 1h 45m")
        page.get_by_role("button", name="Cancel the Reboot of web-0").click()
        assert "nothing is done to web-0" in confirm(page, "Cancel the event")
        expect(page.locator("#sentence")).to_have_text("All quiet.")


def test_refusal_says_what_to_do(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("vm", "restart", "web-0")
        shown.allowed.append("status of 409")
        page = shown.open("#/vms/web-0")
        page.get_by_role("button", name="Restart").click()
        confirm(page, "Restart web-0")
        expect(page.locator("dialog .outcome.bad")).to_contain_text("Reboot")


def test_host_is_maintained_and_its_answer_changes(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        page = shown.open("#/hosts/host-a")
        expect(page.locator(".verdict")).to_contain_text("No:")
        page.get_by_role("button", name="Maintain").click()
        page.get_by_label("What is done to the VMs?").select_option("Reboot")
        text = confirm(page, "Maintain")
        assert "Restarts 2 VMs of 2 scopes. The notice begins now. It starts at 12:15:00" in text
        expect(page.get_by_role("dialog")).to_contain_text("announced.")
        page.get_by_role("button", name="Close").click()
        expect(page.locator(".verdict")).to_contain_text("has notice until")


def test_campaign_is_previewed_started_paused_and_resumed(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        page = shown.open("#/campaigns")
        expect(page.locator("main")).to_contain_text("There are no campaigns yet.")
        page.get_by_role("link", name="Plan a campaign").click()
        page.get_by_label("Hosts", exact=True).fill("host-*")
        page.get_by_label("Maintenance").select_option("Reboot")
        page.get_by_label("Name").fill("kernel")
        page.get_by_role("button", name="Preview the plan").click()
        expect(page.locator(".waves li").first).to_contain_text("Wave 1")
        assert json.loads(service.forewarn("campaign", "list", "--json"))["total"] == 0
        page.get_by_role("button", name="Start the campaign").click()
        assert "notified now" in confirm(page, "Start")
        expect(page.locator("h1")).to_have_text("kernel")
        page.get_by_role("button", name="Close").click()
        for label, state in (("Pause", "paused"), ("Resume", "running"), ("Pause", "paused")):
            page.get_by_role("button", name=label, exact=True).click()
            confirm(page, label)
            page.get_by_role("button", name="Close").click()
            expect(page.locator(".head .badge")).to_have_text(state)
        expect(page.locator("main")).to_contain_text("somebody to resume the campaign")
        page.get_by_role("button", name="Cancel", exact=True).click()
        confirm(page, "Cancel the campaign")
        expect(page.locator(".head .badge")).to_have_text("canceled")
        expect(page.locator(".answer")).to_have_text(
            re.compile(r"0 of \d+ hosts done; the others were canceled")
        )


def test_campaign_names_its_done_hosts_and_counts_its_waves(busy: str) -> None:
    """The first host was empty: done at once, which says nothing about when the others end."""
    with console(busy) as shown:
        page = shown.open("#/campaigns/c1")
        expect(page.locator(".answer")).to_have_text("1 of 5 hosts done, 1 of 5 planned waves over")
        done = page.get_by_role("row", name="kvm-09")
        expect(done).to_contain_text("done")
        ends = page.locator("dl > div", has_text="Ends")
        expect(ends).to_contain_text(re.compile(r"probably in .*\(1[23]:\d\d:00\)"))


def test_plan_says_which_hosts_wait(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("host", "maintain", "host-a", "--type", "Reboot")
        service.forewarn("lab", "clock", "advance", "15m")
        page = shown.open("#/campaigns/new")
        page.get_by_label("Hosts", exact=True).fill("host-b, host-c")
        page.get_by_role("button", name="Preview the plan").click()
        expect(page.locator("section[role=status]")).to_contain_text(
            re.compile("These wait until they can start.*host-b.*another update domain of web")
        )
        page.get_by_label("VMs of a scope that may be down").fill("0")
        expect(page.locator("section[role=status]")).to_have_text("")
        shown.allowed.append("status of 400")
        page.get_by_role("button", name="Preview the plan").click()
        expect(page.get_by_role("alert")).to_contain_text("max_unavailable")


def test_host_under_maintenance_is_safe_until_the_first_impact_ends(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("host", "maintain", "host-a", "--type", "Freeze")
        service.forewarn("lab", "clock", "advance", "15m")
        page = shown.open("#/hosts/host-a")
        expect(page.locator(".verdict")).to_contain_text("Yes, while its maintenance lasts")
        expect(page.locator(".verdict")).to_contain_text("The first impact should end at 12:15:09.")


def test_lost_connection_is_shown_and_recovers_without_reload(tmp_path: Path) -> None:
    address = ("--control", f"127.0.0.1:{steady_port()}")
    service = Service(tmp_path, "--identify", "path", *address).start()
    try:
        poll(service.metadata, "web-0")
        with console(service.control) as shown:
            page = shown.open()
            shown.allowed += OFFLINE
            expect(page.locator("#live")).to_have_text("Live")
            page.evaluate("window.isSamePage = true")
            service.kill()
            expect(page.locator("#live")).to_have_text(re.compile("Stale since .*; trying again"))
            expect(page.locator("#sentence")).to_have_text("All quiet.")
            service.start()
            service.ask("POST", "/vms/web-0/restart")
            expect(page.locator("#live")).to_have_text("Live")
            expect(page.locator("#sentence")).to_contain_text("1 event in notice")
            assert page.evaluate("window.isSamePage")
    finally:
        service.kill()


def test_fleet_is_filtered_and_walked_by_keyboard(busy: str) -> None:
    with console(busy) as shown:
        page = shown.open("#/fleet")
        page.get_by_label("State", exact=True).select_option("under impact")
        expect(page.locator(".lead")).to_have_text("1 of 52 VMs")
        page.get_by_label("State", exact=True).select_option("All states")
        page.get_by_label("Host", exact=True).select_option("kvm-05")
        page.get_by_label("Search").fill("BATCH")
        shown_tiles = page.locator("a.tile:visible")
        page.get_by_label("Search").fill("batch_19")
        expect(shown_tiles).to_have_count(1)
        page.get_by_label("State", exact=True).focus()
        page.keyboard.press("Tab")
        alone = page.evaluate("document.activeElement.dataset.name")
        expect(shown_tiles).to_have_attribute("data-name", alone)
        page.get_by_label("Search").fill("BATCH")
        expect(shown_tiles).to_have_count(3)
        page.get_by_label("State", exact=True).focus()
        page.keyboard.press("Tab")
        first = page.evaluate("document.activeElement.dataset.name")
        page.keyboard.press("ArrowRight")
        second = page.evaluate("document.activeElement.dataset.name")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text(second)

    assert first != second


def test_dialog_is_used_by_keyboard_and_gives_the_focus_back(busy: str) -> None:
    focused = "document.activeElement.textContent"
    with console(busy) as shown:
        page = shown.open("#/vms/web-0")
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Skip to the content"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "Restart"
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "Not now"
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.evaluate(focused) == "Restart"


def test_timeline_bar_shows_its_details_on_focus(busy: str) -> None:
    with console(busy) as shown:
        page = shown.open()
        page.locator("a.bar.failed").focus()
        tip = page.locator(".tip").inner_text()
        lanes = page.locator(".lanes div").count()
        width = page.evaluate(PICTURE_WIDTH)
        page.get_by_role("button", name="Zoom in").click()
        zoomed = page.evaluate(PICTURE_WIDTH)

    assert re.search(r"Redeploy cache_5\nannounced .*, started .*, failed ", tip)
    assert lanes == 19, "a lane for each scope and update domain with an event"
    assert zoomed == pytest.approx(2 * width, abs=2)


def test_history_is_filtered_and_exported(busy: str) -> None:
    with console(busy) as shown:
        page = shown.open("#/history/vm=web-0")
        expect(page.get_by_label("VM", exact=True)).to_have_value("web-0")
        page.get_by_label("Change").select_option("approved")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator("tbody tr")).to_have_count(1)
        files = {}
        for label in ("CSV", "JSON Lines"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"Export as {label}").click()
            files[label] = Path(download.value.path()).read_text()

    (row,) = csv.DictReader(io.StringIO(files["CSV"]))
    (entry,) = [json.loads(line) for line in files["JSON Lines"].splitlines()]
    assert (row["what"], row["by"], row["resources"]) == ("approved", "vm web-1", "web-0")
    assert (entry["what"], entry["by"], entry["resources"]) == ("approved", "vm web-1", ["web-0"])


def test_event_shows_the_document_of_the_chosen_version(busy: str) -> None:
    with console(busy) as shown:
        page = shown.open()
        address = page.locator("a.bar.impact").last.get_attribute("href")
        assert address
        shown.view(address)
        document = page.get_by_role("region", name="Document")
        expect(document).to_contain_text('"DurationInSeconds"')
        page.get_by_label("api-version").select_option("2017-03-01")
        expect(document).not_to_contain_text("DurationInSeconds")
        raw = page.get_by_role("link", name="As sent").get_attribute("href")
        with urlopen(f"{busy}{raw}", timeout=30) as response:
            sent = json.loads(response.read())
        assert json.loads(document.inner_text()) == sent


def test_lab_moves_its_clock_faults_a_vm_and_runs_a_scenario(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        page = shown.open("#/lab")
        time = page.locator("section .answer").first
        expect(time).to_have_text("12:00:00, paused, rate 1")
        page.get_by_role("button", name="+ 15 minutes").click()
        expect(time).to_contain_text("12:15:00")
        page.get_by_label("Fault", exact=True).select_option("status")
        page.get_by_label("VM", exact=True).select_option("web-0")
        page.get_by_label("Settings").fill("code=500")
        page.get_by_role("button", name="Switch on").click()
        expect(page.locator("main")).to_contain_text("code 500 for web-0")
        page.get_by_role("button", name="Switch off status").click()
        expect(page.locator("main")).to_contain_text("No fault is on")
        page.get_by_label("Fault", exact=True).select_option("skew")
        expect(page.locator("main")).to_contain_text("NotBefore is shifted by `seconds`.")
        page.get_by_label("Settings").fill("seconds=-30 chance=0.5")
        page.get_by_role("button", name="Switch on").click()
        expect(page.locator("main")).to_contain_text("seconds -30")
        page.get_by_label("Scenario", exact=True).select_option("user-restart")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("main")).to_contain_text("user-restart passed (4 expectations)")


def test_timeline_shows_now_after_many_events_far_apart(tmp_path: Path) -> None:
    """Each gap takes some pixels: together they must not push the present out of the picture."""
    with lab(tmp_path) as service, console(service.control) as shown:

        def send(path: str, **body: float) -> None:
            headers = {"Content-Type": "application/json"}
            request = Request(
                f"{service.control}/api/v1/{path}", json.dumps(body).encode(), headers
            )
            with urlopen(request, timeout=60) as response:
                response.read()

        for _ in range(18):
            send("vms/web-0/restart")
            send("clock/advance", seconds=4200)
            poll(service.metadata, "web-0")
        send("vms/web-0/restart")
        page = shown.open()
        expect(page.locator("a.bar")).to_have_count(19)
        places = {}
        is_drawn = "document.querySelector('.picture svg').clientWidth < innerWidth * 2"
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            eventually(lambda: page.evaluate(is_drawn))
            places[width] = page.evaluate(
                "() => { const box = (each) => each.getBoundingClientRect();"
                " const [now, frame, svg] = ['.now line', '.picture', '.picture svg']"
                ".map((each) => box(document.querySelector(each)));"
                " const bars = [...document.querySelectorAll('a.bar')]"
                ".map((each) => box(each).right);"
                " return [frame.left <= now.left && now.right <= frame.right,"
                " Math.max(...bars) <= svg.right + 1]; }"
            )

    assert places == {1280: [True, True], 390: [True, True]}


def test_event_that_is_over_shows_its_approvals_and_impacts(busy: str) -> None:
    """The API has only live events; what its VMs see now has nothing to do with this one."""
    with console(busy) as shown:
        page = shown.open()
        bar = page.locator("a.bar.failed")
        shown.view(bar.get_attribute("href") or "")
        document = page.get_by_role("region", name="Document")
        expect(document).to_have_text("The event is over: its VMs no longer see it.")
        expect(page.get_by_label("api-version")).to_be_hidden()
        expect(page.get_by_role("region", name="Impacts")).to_contain_text("cache_5failed")


def test_vm_whose_own_impact_succeeded_is_not_failed(tmp_path: Path) -> None:
    """Two VMs of one event, and only the impact on the second one fails."""
    entries = [
        {"what": "failed", "resources": ["web-0", "web-1"]},
        {"what": "impact-failed", "vm": "web-1", "resources": ["web-1"]},
        {"what": "impacted", "vm": "web-0", "resources": ["web-0"]},
        {"what": "started", "resources": ["web-0", "web-1"]},
    ]
    common = {"event": "E", "type": "Reboot", "scope": "web", "at": "2030-01-31T11:00:00Z"}
    common |= {"vm": "", "host": "", "by": "", "detail": "", "description": ""}
    history = [{**common, "number": 4 - place, **each} for place, each in enumerate(entries)]
    with lab(tmp_path) as service, console(service.control) as shown:
        shown.page.route(
            "**/api/v1/history?limit=1000*",
            lambda route: route.fulfill(json={"history": history, "total": 4, "next": None}),
        )
        page = shown.open("#/fleet")
        expect(page.locator('[data-name="web-1"]')).to_have_attribute("data-state", "failed")
        expect(page.locator('[data-name="web-0"]')).to_have_attribute("data-state", "quiet")
