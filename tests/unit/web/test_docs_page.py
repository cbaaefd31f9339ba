"""The description for machines is whole, and the page for people shows all of it without asking
anybody else.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from forewarn.web.control.docs_page import page
from forewarn.web.control.example import MESSAGES
from tests.unit.web.control_world import World, story

VOID = {"meta", "input", "link", "br", "hr", "img"}


class Reader(HTMLParser):
    """Reads a page and insists on what a browser would repair in silence."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == [], "not every tag is closed"

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
        self.words += data


async def page_of(world: World) -> tuple[str, dict[str, str], dict[str, Any]]:
    response = await world.ask("GET", "/api/docs")
    return response.text, dict(response.headers), await world.told("GET", "/api/openapi.json")


def operations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in described["paths"].items():
        for verb, operation in item.items():
            yield f"{verb.upper()} {path}", operation


def test_every_operation_and_every_code_stands_in_the_page() -> None:
    """Whoever cannot reach the internet reads this, and nothing else."""

    async def tell(world: World) -> None:
        shown, _, described = await page_of(world)
        reader = Reader(shown)

        for name, operation in operations(described):
            assert name in reader.words, name
            assert operation["operationId"] in reader.ids
            for status, response in operation["responses"].items():
                for code in response["description"].split(", ") if int(status) >= 400 else ():
                    assert f"error-{code}" in reader.ids
        assert len(reader.ids) == len(set(reader.ids)), "an id stands twice"
        assert [
            link for link in reader.links if link.startswith("#") and link[1:] not in reader.ids
        ] == []

    story(tell)


def test_the_page_asks_nobody_else_for_anything() -> None:
    """No CDN, no font, no picture: there is no internet where it is read.

    And it may be used without a mouse or eyes.
    """

    async def tell(world: World) -> None:
        shown, headers, _ = await page_of(world)
        reader = Reader(shown)

        assert shown.startswith("<!DOCTYPE html>")
        assert [link for link in reader.links if not link.startswith("#")] == ["/api/openapi.json"]
        assert not {"link", "img", "iframe", "form", "object"} & set(reader.tags)
        assert re.findall(r"https?://|url\(|@import", shown) == []
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert '<html lang="en">' in shown
        assert '<label for="search">' in shown
        assert reader.tags.count("h1") == reader.tags.count("main") == 1

    story(tell)


def test_the_policy_lets_run_what_is_written_in_the_page_and_nothing_else() -> None:
    """A name from a fleet file that looks like a script stays a name."""

    async def tell(world: World) -> None:
        shown, headers, _ = await page_of(world)
        policy = headers["content-security-policy"]

        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for tag in ("style", "script"):
            [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", shown, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy

    story(tell)


def test_whatever_the_description_holds_is_shown_and_not_obeyed() -> None:
    """A page made by hand escapes by hand, everywhere."""

    async def tell(world: World) -> None:
        described = await world.told("GET", "/api/openapi.json")
        evil = "<b title='x' onclick=\"y\">&"
        operation = described["paths"]["/api/v1/vms/{vm}/restart"]["post"]
        operation |= {"description": evil, "tags": [evil], "operationId": evil, "x-role": evil}
        operation["parameters"][0] |= {"description": evil, "name": evil, "in": evil}
        operation["requestBody"]["content"]["application/json"]["example"] = {evil: evil}
        operation["responses"]["409"]["description"] = evil
        described["info"] |= {"title": evil, "version": evil, "description": evil}
        described["components"]["schemas"]["ErrorAnswer"]["description"] = evil

        made = page(described)

        assert "<b " not in made
        assert "&lt;b" in made
        Reader(made)

    story(tell)


def test_every_answer_forbids_guessing_framing_and_keeping() -> None:
    """Errors too, also those of paths that are not there."""

    async def tell(world: World) -> None:
        for path in ("/api/v1/vms", "/api/v1/vms/nope", "/nope", "/healthz", "/api/openapi.json"):
            headers = (await world.ask("GET", path)).headers
            assert (headers["x-content-type-options"], headers["cache-control"]) == (
                "nosniff",
                "no-store",
            ), path
            assert (
                headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
            )
            assert "access-control-allow-origin" not in headers

    story(tell)


def test_a_head_is_a_get_without_its_body() -> None:
    """Health checks of older balancers ask so (RFC 9110, 9.3.2)."""

    async def tell(world: World) -> None:
        for path in ("/healthz", "/api/v1/vms", "/api/docs"):
            asked, got = await world.ask("HEAD", path), await world.ask("GET", path)
            assert (asked.status_code, asked.content) == (200, b"")
            assert (
                asked.headers["content-length"]
                == got.headers["content-length"]
                == str(len(got.content))
            )
        assert (await world.ask("HEAD", "/api/v1/vms/web-0/restart")).status_code == 405

    story(tell)


@pytest.mark.parametrize("path", ["/api/docs", "/api/openapi.json"])
def test_the_description_is_made_once_and_not_for_everybody_who_asks(path: str) -> None:
    """Both are open without a token; to make 160 kB anew for each request would keep VMs waiting
    for their documents.
    """

    async def calls(world: World, path: str) -> int:
        """How many functions an answer takes, the second time it is asked for."""
        await world.ask("GET", path)
        seen: list[int] = [0]

        def count(frame: object, event: str, argument: object) -> None:
            seen[0] += 1

        sys.setprofile(count)
        try:
            await world.ask("GET", path)
        finally:
            sys.setprofile(None)
        return seen[0]

    async def tell(world: World) -> None:
        assert await calls(world, path) < 2 * await calls(world, "/healthz")

    story(tell)


def test_every_answer_is_described_with_an_example_that_fits() -> None:
    """Generated clients and tests are made from these."""

    async def tell(world: World) -> None:
        described = await world.told("GET", "/api/openapi.json")
        assert described["openapi"] == "3.1.0"
        for name, operation in operations(described):
            for status, response in operation["responses"].items():
                for kind, content in response.get("content", {}).items():
                    if kind != "application/json":
                        continue
                    assert content.get("examples") or "example" in content, f"{name} {status}"
                    schema = {**content["schema"], "components": described["components"]}
                    for example in [
                        one["value"] for one in content.get("examples", {}).values()
                    ] or [content["example"]]:
                        jsonschema.validate(example, schema, jsonschema.Draft202012Validator)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = {**content["schema"], "components": described["components"]}
                jsonschema.validate(content["example"], schema, jsonschema.Draft202012Validator)

    story(tell)


def test_every_error_says_which_codes_it_may_have() -> None:
    """A client can tell beforehand what it must be ready for."""

    async def tell(world: World) -> None:
        described = await world.told("GET", "/api/openapi.json")
        restart = described["paths"]["/api/v1/vms/{vm}/restart"]["post"]

        assert {
            status: response["description"]
            for status, response in restart["responses"].items()
            if int(status) >= 400
        } == {
            "400": "invalid",
            "401": "unauthorized",
            "403": "forbidden",
            "404": "unknown_vm, not_found",
            "408": "request_timeout",
            "409": "already_pending, too_many_operations, notice_too_short, vm_down",
            "413": "body_too_large",
            "415": "unsupported_media_type",
            "422": "idempotency_key_reused",
            "429": "too_many_requests",
            "431": "head_too_large",
            "500": "problem",
            "503": "unavailable, store_lost, store_unusable",
        }
        assert restart["x-role"] == "operator"
        assert [one["name"] for one in restart["parameters"]] == ["vm", "Idempotency-Key"]
        schema = restart["responses"]["409"]["content"]["application/json"]["schema"]
        assert schema["allOf"][1]["properties"]["error"]["enum"][0] == "already_pending"
        codes = set(re.findall(r'"enum": \["[a-z_", ]+"\]', json.dumps(described)))
        assert codes, "enumerations of codes"
        assert "problem" in MESSAGES

    story(tell)
