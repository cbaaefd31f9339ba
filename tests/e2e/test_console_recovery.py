"""The console when a reply is lost, late or an error: what it shows must become true again."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from tests.e2e.console_page import OFFLINE, console
from tests.e2e.test_console import confirm, lab

pytestmark = pytest.mark.system


def test_campaign_whose_reply_was_lost_is_not_started_twice(tmp_path: Path) -> None:
    keys: list[str | None] = []

    def lose_first(route: Route) -> None:
        body = route.request.post_data_json
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
