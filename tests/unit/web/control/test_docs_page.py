"""The reference page shows the whole API, offline, and executes nothing foreign."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

from forewarn.web.control.docs_page import render
from tests.unit.web.control_world import World, main
from tests.unit.web.openapi_reader import operations

VOID = {"meta", "input", "link", "br", "hr", "img"}


class Page(HTMLParser):
    """Parses a page and rejects what a browser would repair silently."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], "unclosed tags"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action"):
                self.links.append(value or "")
            assert name != "style", f"{tag} would be blocked by the policy"
            assert not name.startswith("on"), f"{tag} {name} would be blocked by the policy"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


async def fetch(world: World) -> tuple[str, dict[str, str], dict[str, Any]]:
    response = await world.request("GET", "/api/docs")
    return response.text, dict(response.headers), await world.json("GET", "/api/openapi.json")


def test_page_shows_every_operation_with_curl_and_codes() -> None:
    """Where there is no internet, this is all the documentation there is."""

    async def act(world: World) -> None:
        text, _, document = await fetch(world)
        page = Page(text)

        for name, operation in operations(document):
            method, path = name.split()
            assert name in page.text
            assert operation["operationId"] in page.ids
            assert re.search(rf"curl -X {method} .*{path.partition('{')[0]}", page.text)
            for status, response in operation["responses"].items():
                for code in response["description"].split(", ") if int(status) >= 400 else ():
                    assert code in page.text
        assert len(page.ids) == len(set(page.ids)), "duplicate id"
        anchors = [link[1:] for link in page.links if link.startswith("#")]
        assert set(anchors) <= set(page.ids)
        assert """-d '{"type": "Freeze"}'""" in page.text

    main(act)


def test_page_loads_nothing_from_elsewhere() -> None:
    """No CDN, font or image; and it can be used without a mouse or eyes."""

    async def act(world: World) -> None:
        text, headers, _ = await fetch(world)
        page = Page(text)

        assert text.startswith("<!DOCTYPE html>")
        assert [link for link in page.links if not link.startswith("#")] == ["/api/openapi.json"]
        assert not {"link", "img", "iframe", "form", "object"} & set(page.tags)
        assert re.findall(r"url\(|@import", text) == []
        assert set(re.findall(r"https?://[^/\s]+", text)) == {"http://127.0.0.1:8081"}
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert '<html lang="en">' in text
        assert page.tags.count("h1") == page.tags.count("main") == 1

    main(act)


def test_policy_allows_the_style_of_the_page_and_no_script() -> None:
    """A name from a fleet file that looks like a script stays a name."""

    async def act(world: World) -> None:
        text, headers, _ = await fetch(world)
        policy = headers["content-security-policy"]

        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "script" not in policy
        assert "<script" not in text
        [content] = re.findall("<style>(.*?)</style>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"style-src 'sha256-{digest}'" in policy

    main(act)


def test_everything_in_the_page_is_escaped() -> None:
    async def act(world: World) -> None:
        document = await world.json("GET", "/api/openapi.json")
        evil = "<b title='x' onclick=\"y\">&"
        operation = document["paths"]["/api/v1/vms/{vm}/restart"]["post"]
        operation |= {"description": evil, "tags": [evil], "operationId": evil, "x-role": evil}
        operation["parameters"][0] |= {"description": evil, "name": evil, "in": evil}
        operation["responses"]["409"]["description"] = evil
        document["paths"][f"/{evil}"] = document["paths"].pop("/api/v1/hosts/{host}/maintain")
        document["info"] |= {"title": evil, "version": evil, "description": evil}
        for schema in document["components"]["schemas"].values():
            for field in schema.get("properties", {}).values():
                field["description"] = evil

        text = render(document)

        assert "<b " not in text
        assert "&lt;b" in text
        Page(text)

    main(act)
