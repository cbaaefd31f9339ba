"""The console in Debian's Chromium: what a page must never do fails the test at its end."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

SECONDS_MAX = 60
AXE = files("axe_playwright_python").joinpath("axe.min.js")
LOOPBACK = ("127.0.0.1", "localhost", "")
OFFLINE = ("Failed to load resource: net::ERR_", "ERR_CONNECTION_REFUSED")
"""What Chromium itself prints for a request that got no answer."""
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
    ({ violatedDirective, sourceFile, lineNumber }) =>
        window.violations.push(`${violatedDirective} ${sourceFile}:${lineNumber}`));
"""
GO_TO_VIEW = """hash => new Promise((resolve) => {
    const before = location.hash;
    location.hash = hash;
    if (location.hash === before) resolve();
    else addEventListener("hashchange", () => resolve(), { once: true });
})"""
"""The browser fires `hashchange` later: until then the page shows the view that is left."""

expect.set_options(timeout=SECONDS_MAX * 1000)


class ConsolePage:
    """One page, and what it did wrong: console errors, exceptions, foreign requests."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(
            locale="en-GB",
            timezone_id="UTC",
            **{"viewport": {"width": 1280, "height": 800}, **options},
        )
        self.context.set_default_timeout(SECONDS_MAX * 1000)
        self.context.add_init_script(WATCH_POLICY)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.allowed: list[str] = []
        """Beginnings of messages of Chromium that this test expects."""
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self._check_host(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self.allowed):
            self.problems.append(f"{kind}: {text}")

    def _check_host(self, url: str) -> None:
        if (urlsplit(url).hostname or "") not in LOOPBACK:
            self.problems.append(f"request to {url}")

    def open(self, address: str = "#/") -> Page:
        """Go to a view, and wait until it is drawn and live."""
        self.page.goto(f"{self.url}/{address}")
        self.page.wait_for_selector("main[data-ready]")
        return self.page

    def view(self, address: str) -> Page:
        """Go to another view without loading the page again."""
        self.page.evaluate(GO_TO_VIEW, address)
        self.page.wait_for_selector("main[data-ready]")
        return self.page

    def find_accessibility_problems(self) -> list[str]:
        """Serious and critical findings of axe-core, injected past the policy of the page."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def close(self) -> None:
        self.problems += self.page.evaluate("window.violations")
        self.context.close()
        assert not self.problems, self.problems


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser for one test: Playwright's event loop must end with it, others run their own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield browser
        browser.close()


@contextmanager
def console(url: str, **options: Any) -> Iterator[ConsolePage]:
    """A watched page on the service at this URL."""
    with browsing() as browser:
        page = ConsolePage(browser, url, **options)
        yield page
        page.close()
