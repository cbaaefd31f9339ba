"""The console when a reply is lost, late or an error: what it shows must become true again."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import APIResponse, Route, expect

from tests.e2e.console_page import OFFLINE, console
from tests.e2e.test_console import confirm, lab, poll
from tests.e2e.waiting import eventually

pytestmark = pytest.mark.system


def test_campaign_whose_reply_was_lost_is_not_started_twice(tmp_path: Path) -> None:
    keys: list[str | None] = []

    def lose_first(route: Route) -> None:
        body = route.request.post_data_json or {}
        if route.request.method != "POST" or body.get("plan"):
            route.continue_()
            return
        keys.append(route.request.headers.get("idempotency-key"))
        response = route.fetch()
        if len(keys) == 1:
            route.abort()
        else:
            route.fulfill(response=response)

    with lab(tmp_path) as service, console(service.control) as shown:
        shown.allowed += OFFLINE
        page = shown.open("#/campaigns/new")
        page.route("**/api/v1/campaigns", lose_first)
        page.get_by_label("Hosts", exact=True).fill("host-*")
        page.get_by_role("button", name="Preview the plan").click()
        page.get_by_role("button", name="Start the campaign").click()
        confirm(page, "Start")
        expect(page.locator("dialog .outcome.bad")).to_contain_text("then try again")
        confirm(page, "Start")
        expect(page.get_by_role("dialog")).to_contain_text("Started.")
        campaigns = json.loads(service.forewarn("campaign", "list", "--json"))

    assert campaigns["total"] == 1
    assert keys[0] == keys[1]
    assert re.fullmatch(r"\d+(-\d+){3}", keys[0] or "")


def test_action_that_was_refused_can_be_tried_again(tmp_path: Path) -> None:
    """The stored response of a refusal must not answer the next try."""
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("vm", "restart", "web-0")
        shown.allowed.append("status of 409")
        page = shown.open("#/vms/web-0")
        page.get_by_role("button", name="Restart").click()
        confirm(page, "Restart web-0")
        expect(page.locator("dialog .outcome.bad")).to_contain_text("pending already")
        events = json.loads(service.forewarn("event", "list", "--json"))["events"]
        service.forewarn("event", "cancel", events[0]["id"])
        confirm(page, "Restart web-0")
        expect(page.get_by_role("dialog")).to_contain_text("Announced.")


def refuse(route: Route) -> None:
    body = {"error": "unavailable", "message": "the store is out of reach", "facts": {}}
    route.fulfill(status=503, json=body)


def test_change_while_the_page_loads_is_shown(tmp_path: Path) -> None:
    """After the events were read, and before the stream is open."""
    with lab(tmp_path) as service, console(service.control) as shown:

        def announce(route: Route) -> None:
            response = route.fetch()
            service.forewarn("vm", "restart", "web-0")
            route.fulfill(response=response)

        shown.page.route("**/api/v1/events?*", announce, times=1)
        page = shown.open()
        expect(page.locator("#sentence")).to_contain_text("1 event in notice")


@pytest.mark.parametrize("loss", ["refused", "aborted"])
def test_read_that_failed_is_tried_again(tmp_path: Path, loss: str) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        shown.allowed += [*OFFLINE, "status of 503"]
        page = shown.open()
        expect(page.locator("#live")).to_have_text("Live")
        page.route(
            "**/api/v1/events?*", refuse if loss == "refused" else lambda route: route.abort()
        )
        service.forewarn("vm", "restart", "web-0")
        expect(page.locator("#live")).to_have_text(re.compile("Stale since .*; trying again"))
        page.unroute("**/api/v1/events?*")
        expect(page.locator("#live")).to_have_text("Live")
        expect(page.locator("#sentence")).to_contain_text("1 event in notice")


def test_late_response_does_not_overwrite_a_newer_one(tmp_path: Path) -> None:
    """Everything is read again, slowly; meanwhile the stream says that something has changed."""
    events = "**/api/v1/events?*"
    with lab(tmp_path) as service, console(service.control) as shown:
        shown.allowed.append("status of 503")
        page = shown.open()
        expect(page.locator("#live")).to_have_text("Live")
        page.route(events, refuse)
        service.forewarn("vm", "restart", "web-0")
        expect(page.locator("#live")).to_contain_text("Stale since")
        held: list[tuple[Route, APIResponse]] = []
        page.route(events, lambda route: held.append((route, route.fetch())), times=1)
        page.unroute(events, refuse)
        eventually(lambda: page.evaluate("1") == len(held))
        service.forewarn("vm", "restart", "web-1")
        ((route, response),) = held
        with page.expect_request(events):
            route.fulfill(response=response)
        expect(page.locator("#sentence")).to_contain_text("2 events in notice")


def test_view_that_was_not_available_recovers(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("vm", "restart", "web-0")
        shown.allowed.append("status of 503")
        page = shown.open()
        address = page.locator("a.bar").get_attribute("href")
        assert address
        page.route("**/api/v1/history?limit=200*", refuse)
        shown.view(address)
        expect(page.get_by_role("alert")).to_contain_text("The store is out of reach")
        page.unroute("**/api/v1/history?limit=200*")
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("h1")).to_have_text("Reboot of web-0")
        history = page.get_by_role("region", name="History of the event")
        expect(history).to_contain_text("scheduled")


def test_confirmation_says_what_is_true_when_it_opens(tmp_path: Path) -> None:
    """The rate of a lab changes without an entry, and so does a scope that nobody polls."""
    with lab(tmp_path) as service, console(service.control) as shown:
        page = shown.open("#/vms/web-0")
        expect(page.locator("#live")).to_have_text("Live")
        service.forewarn("lab", "clock", "rate", "60")
        page.get_by_role("button", name="Restart").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("It starts at 12:00:15, in 15s, or earlier")
        page.keyboard.press("Escape")
        service.forewarn("lab", "clock", "advance", "2d")
        page.get_by_role("button", name="Restart").click()
        expect(dialog).to_contain_text("without an event: no VM of web polls.")
        confirm(page, "Restart web-0")
        expect(dialog).to_contain_text("It runs now, without an event: no VM of web has polled in")


def test_event_that_ended_while_its_dialog_was_open_is_explained(tmp_path: Path) -> None:
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("vm", "restart", "web-0")
        shown.allowed += ["status of 404", "status of 409", "status of 410"]
        page = shown.open()
        page.get_by_role("button", name="Approve the Reboot of web-0").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("button", name="Approve")).to_be_enabled()
        events = json.loads(service.forewarn("event", "list", "--json"))["events"]
        service.forewarn("event", "cancel", events[0]["id"])
        expect(page.locator("#sentence")).to_have_text("All quiet.")
        confirm(page, "Approve")
        expect(dialog.locator(".outcome.bad")).to_have_text(
            re.compile("is over: canceled at .*There is nothing left to do.")
        )


def test_jump_of_a_labs_clock_is_shown_at_once(tmp_path: Path) -> None:
    """Nothing happens in the fleet meanwhile, so no entry of the history says so."""
    with lab(tmp_path) as service, console(service.control) as shown:
        service.forewarn("vm", "restart", "web-0")
        service.forewarn("lab", "clock", "advance", "2h")
        page = shown.open()
        expect(page.locator("a.bar.completed")).to_have_count(1)
        service.forewarn("lab", "clock", "advance", "1d")
        expect(page.get_by_text("Nothing in the last 24 hours")).to_be_visible(timeout=10_000)


def test_vm_that_has_not_polled_yet_is_not_silent(tmp_path: Path) -> None:
    """The first VM of its scope has just polled; the others have the usual time to follow."""
    with lab(tmp_path) as service, console(service.control) as shown:
        page = shown.open("#/fleet")
        expect(page.locator("#live")).to_have_text("Live")
        poll(service.metadata, "workers_0")
        history = page.context.new_page()
        history.goto(f"{service.control}/api/v1/history?what=enabled&scope=workers")
        expect(history.locator("body")).to_contain_text("workers")
        shown.view("#/vms/workers_1")
        expect(page.locator(".head .badge")).to_have_text("● quiet")
        service.forewarn("lab", "clock", "advance", "65m")
        expect(page.locator(".head .badge")).to_have_text("? silent")


def test_no_vm_is_silent_until_the_history_says_since_when_its_scope_polls(tmp_path: Path) -> None:
    """The last day is read after the fleet is shown, which takes a while in a large one."""
    waiting: list[Route] = []

    def hold(route: Route) -> None:
        waiting.append(route)

    with lab(tmp_path) as service, console(service.control) as shown:
        poll(service.metadata, "workers_0")
        page = shown.page
        page.route("**/api/v1/history?*since=*", hold)
        page.goto(f"{service.control}/#/fleet")
        page.wait_for_selector("a.tile")
        eventually(lambda: page.evaluate("1") and waiting, bool)
        states = page.locator("a.tile").evaluate_all("all => all.map((each) => each.dataset.state)")
        for route in waiting:
            route.continue_()

    assert "silent" not in states
    assert "quiet" in states
