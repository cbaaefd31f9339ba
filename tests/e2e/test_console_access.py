"""The console and people who must not do something: roles, other sites, hostile names."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e.cli_service import Service, forewarn, serving
from tests.e2e.console_page import console

pytestmark = pytest.mark.system
HOSTILE = (
    '"><img src=x onerror=window.hacked=1>',
    "</script><script>window.hacked=1</script>",
    "'; window.hacked=1; //",
    "javascript:window.hacked=1",
    "\u202egnp.exe\u202c \u2067right-to-left\u2069",
    "x" * 200,
    "${window.hacked=1} {{window.hacked=1}} %3Cimg%3E /../..",
)
LATE_SIGN_OUT = """() => {
    const { promise, resolve } = Promise.withResolvers();
    const fetchNow = window.fetch;
    window.fetch = async (url, options) => {
        const response = await fetchNow(url, options);
        if (response.status === 401) setTimeout(resolve, 500);
        if (options?.method === "DELETE") await promise;
        return response;
    };
}"""
"""The reply to a sign-out comes half a second after another request was refused."""


@contextmanager
def guarded(folder: Path) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with a token of each role."""
    with serving(folder) as service:
        texts: dict[str, str] = {}
        for role in ("admin", "operator", "viewer"):
            made = forewarn(
                "--control-url", service.control, "token", "create", role, "--role", role,
                FOREWARN_TOKEN=texts.get("admin", ""),
            )  # fmt: skip
            found = re.search(r"fw_\w+", made.stdout)
            assert found, made.stdout + made.stderr
            texts[role] = found[0]
        yield service, texts


def sign_in(page: Page, text: str) -> None:
    page.get_by_label("Token").fill(text)
    page.get_by_role("button", name="Sign in").click()


def fetch(page: Page, method: str, path: str) -> int:
    """The status of a request that the page itself sends, with its cookie."""
    status: int = page.evaluate(
        "([method, path]) => fetch(path, {method, body: method == 'POST' ? '{}' : undefined,"
        " headers: {'Content-Type': 'application/json'}}).then((response) => response.status)",
        [method, path],
    )
    return status


def test_viewer_sees_no_actions_and_the_server_refuses_them(tmp_path: Path) -> None:
    with guarded(tmp_path) as (service, texts), console(service.control) as shown:
        shown.allowed.append("status of 40")
        page = shown.open()
        sign_in(page, texts["viewer"])
        expect(page.locator("#who")).to_contain_text("viewer (viewer)")
        buttons = {}
        for address in ("#/vms/web-0", "#/hosts/host-a", "#/campaigns"):
            shown.view(address)
            buttons[address] = page.locator("main").get_by_role("button").count()
        refused = [
            fetch(page, "POST", f"/api/v1/{path}")
            for path in ("vms/web-0/restart", "hosts/host-a/fail", "campaigns/c1/pause")
        ]

    assert buttons == {"#/vms/web-0": 0, "#/hosts/host-a": 0, "#/campaigns": 0}
    assert refused == [403, 403, 403]


def test_operator_signs_in_acts_and_signs_out(tmp_path: Path) -> None:
    with guarded(tmp_path) as (service, texts), console(service.control) as shown:
        shown.allowed.append("status of 401")
        page = shown.open()
        sign_in(page, f"fw_operator_{'0' * 64}")
        expect(page.get_by_role("alert")).to_have_text(re.compile("This token is unknown"))
        sign_in(page, texts["operator"])
        shown.view("#/vms/web-0")
        page.get_by_role("button", name="Restart").click()
        page.get_by_role("dialog").get_by_role("button", name="Restart web-0").click()
        expect(page.get_by_role("dialog")).to_contain_text(
            "It runs now, without an event: no VM of web has polled in"
        )
        page.get_by_role("button", name="Close").click()
        (cookie,) = shown.context.cookies()
        script_sees = page.evaluate("document.cookie")
        page.reload()
        expect(page.locator("#who")).to_contain_text("operator (operator)")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        shown.context.add_cookies(
            [{"name": cookie["name"], "value": cookie["value"], "url": service.control}]
        )
        stolen = fetch(page, "GET", "/api/v1/session")

    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert texts["operator"] not in cookie["value"]
    assert (script_sees, stolen) == ("", 401), "the session has ended on the server too"


def test_revoking_a_token_signs_its_browser_out(tmp_path: Path) -> None:
    with guarded(tmp_path) as (service, texts), console(service.control) as shown:
        shown.allowed.append("status of 401")
        page = shown.open()
        sign_in(page, texts["viewer"])
        expect(page.locator("#live")).to_have_text("Live")
        forewarn(
            "--control-url", service.control, "token", "revoke", "viewer",
            FOREWARN_TOKEN=texts["admin"],
        )  # fmt: skip
        expect(page.get_by_role("alert")).to_have_text("Your session has ended. Sign in again.")
        sign_in(page, texts["operator"])
        expect(page.locator("#who")).to_contain_text("operator (operator)")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)


def test_signing_out_is_not_shown_as_a_session_that_has_ended(tmp_path: Path) -> None:
    """The stream of the page may learn of it before the reply to the sign-out arrives."""
    with guarded(tmp_path) as (service, texts), console(service.control) as shown:
        shown.allowed.append("status of 401")
        page = shown.open()
        sign_in(page, texts["viewer"])
        expect(page.locator("#live")).to_have_text("Live")
        page.evaluate(LATE_SIGN_OUT)
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)


def test_hostile_names_are_refused_by_the_fleet(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        for number, name in enumerate(HOSTILE):
            fleet = tmp_path / f"{number}.yaml"
            fleet.write_text(json.dumps({"scopes": [{"name": "s", "vms": [{"name": name}]}]}))
            assert service.forewarn("fleet", "apply", str(fleet)).returncode != 0, name


def test_history_on_a_phone_shows_every_column_within_the_screen(tmp_path: Path) -> None:
    """The table scrolled sideways there, and its details were columns of two letters."""
    with serving(tmp_path) as service, console(service.control) as shown:
        service.forewarn("host", "maintain", "host-a", "--type", "Reboot")
        shown.page.set_viewport_size({"width": 390, "height": 800})
        page = shown.open("#/history")
        row = page.locator("tbody tr").filter(has_text="scheduled").first
        expect(row).to_be_visible()
        edges = row.locator("td").evaluate_all(
            "cells => cells.map((cell) => cell.getBoundingClientRect().right)"
        )
        height = row.evaluate("row => row.getBoundingClientRect().height")

    assert max(edges) <= 390
    assert height < 150


def test_hostile_names_do_no_harm_in_the_page(tmp_path: Path) -> None:
    """The rules refuse such names; the page must not depend on that."""

    def make_hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(key, each) for key, each in value.items()}
        return [make_hostile(each) for each in value] if isinstance(value, list) else value

    def rename(key: str, value: Any) -> Any:
        if key in ("name", "scope", "host", "vm", "description", "detail", "by", "address"):
            return names.setdefault(value, HOSTILE[len(names) % len(HOSTILE)]) if value else value
        if key in ("vms", "scopes", "resources", "hosts") and value and isinstance(value[0], str):
            return [rename("name", each) for each in value]
        return make_hostile(value)

    def answer(route: Route) -> None:
        response = route.fetch(url=unquote(route.request.url))
        body = response.json()
        route.fulfill(response=response, json=make_hostile(body))

    names: dict[str, str] = {}
    lists = re.compile(r"/api/v1/(vms|scopes|hosts|events|history|campaigns)\?")
    with serving(tmp_path) as service, console(service.control) as shown:
        service.forewarn("host", "maintain", "host-a", "--type", "Reboot")
        service.forewarn("campaign", "start", "host-b", "--type", "Reboot", "--name", "patch")
        shown.page.route(lists, answer)
        page = shown.open()
        widths = {}
        for address in ("#/", "#/fleet", "#/hosts", "#/campaigns", "#/history"):
            shown.view(address)
            page.set_viewport_size({"width": 390, "height": 800})
            widths[address] = max(shown.overflow(), 0)
        shown.view("#/fleet")
        labels = page.locator("a.tile").evaluate_all("all => all.map((each) => each.dataset.name)")
        page.locator("a.tile").first.click()
        heading = page.locator("h1")
        expect(heading).not_to_have_text("Fleet")
        title = heading.inner_text()
        found = page.evaluate(
            "[window.hacked, document.querySelectorAll('main img, main script').length]"
        )

    assert set(labels) <= set(HOSTILE)
    assert title in HOSTILE
    assert found == [None, 0]
    assert widths == dict.fromkeys(widths, 0)
