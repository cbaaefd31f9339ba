"""The stream of the console: heartbeats, its limits, pages that nobody looks at."""

import os
import re
import signal
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.cli_service import Service, poll, serving
from tests.e2e.console_page import OFFLINE, console
from tests.e2e.test_console import lab
from tests.e2e.waiting import eventually

pytestmark = pytest.mark.system
STREAMS_MAX = 10
HEARTBEAT_SECONDS = 15


def count_streams(service: Service) -> int:
    with urlopen(f"{service.control}/metrics", timeout=30) as response:
        found = re.search(r"^forewarn_streams (\d+)", response.read().decode(), re.MULTILINE)
    assert found
    return int(found[1])


def look_away(page: Page, *, hidden: bool) -> None:
    """What a browser does with a page in a tab behind another one."""
    page.evaluate(
        "value => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


def test_stream_without_heartbeats_is_lost_and_comes_back(tmp_path: Path) -> None:
    """The connection stays open and no byte arrives: no network tells the browser."""
    with serving(tmp_path) as service, console(service.control) as shown:
        shown.allowed += OFFLINE
        shown.page.clock.install()
        page = shown.open()
        expect(page.locator("#live")).to_have_text("Live")
        os.kill(service.process.pid, signal.SIGSTOP)
        try:
            page.clock.fast_forward(HEARTBEAT_SECONDS * 1000)
            expect(page.locator("#live")).to_have_text("Live")
            page.clock.fast_forward(HEARTBEAT_SECONDS * 1000 + 3000)
            expect(page.locator("#live")).to_contain_text("Connection lost. Stale since")
        finally:
            os.kill(service.process.pid, signal.SIGCONT)
        expect(page.locator("#live")).to_have_text("Live")


def test_page_without_a_stream_says_why_stays_fresh_and_recovers(tmp_path: Path) -> None:
    """Without tokens all clients together have ten streams."""
    with lab(tmp_path) as service, ExitStack() as streams:
        url = f"{service.control}/api/v1/stream"
        first, *_ = [
            streams.enter_context(closing(urlopen(url, timeout=30))) for _ in range(STREAMS_MAX)
        ]
        with console(service.control) as shown:
            shown.allowed.append("status of 503")
            shown.page.clock.install()
            page = shown.open()
            expect(page.locator("#live")).to_have_text(
                "Not live, read every 20 seconds: this client already has 10 open streams; the"
                " limit is 10. Close other tabs or windows of this console."
            )
            service.forewarn("vm", "restart", "web-0")
            page.clock.fast_forward(20_000)
            expect(page.locator("#sentence")).to_contain_text("1 event in notice")
            expect(page.locator("#live")).to_contain_text("Not live")
            first.close()
            eventually(lambda: try_again(page), lambda text: text == "Live")


def try_again(page: Page) -> str:
    page.clock.fast_forward(20_000)
    return page.locator("#live").inner_text()


def test_page_that_nobody_sees_holds_no_stream(tmp_path: Path) -> None:
    """A browser has six connections to a server, and a token has ten streams."""
    with serving(tmp_path) as service, console(service.control) as shown:
        poll(service)
        page = shown.open()
        expect(page.locator("#live")).to_have_text("Live")
        eventually(lambda: count_streams(service) == 1)
        look_away(page, hidden=True)
        eventually(lambda: count_streams(service) == 0)
        service.forewarn("vm", "restart", "web-0")
        look_away(page, hidden=False)
        expect(page.locator("#live")).to_have_text("Live")
        expect(page.locator("#sentence")).to_contain_text("1 event in notice")
        assert count_streams(service) == 1
