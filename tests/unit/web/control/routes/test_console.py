"""The page at `/` and its files, without a browser: tests/e2e/test_console.py has one."""

import re

import pytest

from forewarn.web.control.routes.console import read_files
from tests.unit.web.control_world import World, main

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_browser_gets_the_console_and_a_program_the_entry_points() -> None:
    async def act(world: World) -> None:
        page = await world.request("GET", "/", headers=BROWSER)
        entry_points = await world.json("GET", "/")

        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "<title>Forewarn</title>" in page.text
        assert entry_points["api"] == "/api/v1"

    main(act)


def test_policy_allows_own_files_only_and_no_text_that_becomes_code() -> None:
    async def act(world: World) -> None:
        page = await world.request("GET", "/", headers=BROWSER)
        policy = page.headers["content-security-policy"]

        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy

    main(act)


@pytest.mark.parametrize(
    "name", ["console.py", "nothing.js", "..%2Fapp.py", "%2Fetc%2Fpasswd", "x" * 300]
)
def test_no_other_file_can_be_requested(name: str) -> None:
    async def act(world: World) -> None:
        code, error, _ = await world.error("GET", f"/console/{name}")

        assert (code, error) == (404, "not_found")

    main(act)


def test_page_names_all_its_modules_and_no_others() -> None:
    """A module that is not preloaded costs another round trip before the first paint."""
    files = read_files()
    text = files["index.html"].decode()
    named = set(re.findall(r'/console/([\w.]+)"', text))

    assert named == files.keys() - {"index.html"}


def test_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    files = read_files()
    everything = b"".join(files.values()).decode()
    outside = set(re.findall(r"https?://[^\s\"']+", everything)) - {"http://www.w3.org/2000/svg"}

    assert sum(map(len, files.values())) < 150 * 1024
    assert outside == set()


def test_page_never_parses_text_as_html() -> None:
    """The policy would stop it in a browser; here it is found before."""
    forbidden = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "srcdoc",
    )
    scripts = {name: text.decode() for name, text in read_files().items() if name.endswith(".js")}

    assert [name for name, text in scripts.items() if any(word in text for word in forbidden)] == []
