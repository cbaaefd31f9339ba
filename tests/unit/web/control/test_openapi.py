"""The OpenAPI document says what Litestar cannot know: roles, error codes, optional bodies."""

import sys

import jsonschema
import pytest
from litestar.stores.memory import MemoryStore

from forewarn.web.control.app import make_app
from tests.unit.web.control_world import World, main, make_client
from tests.unit.web.openapi_reader import operations


def test_errors_of_an_operation_are_listed_by_code() -> None:
    """A client author sees in advance which errors to handle."""

    async def act(world: World) -> None:
        document = await world.json("GET", "/api/openapi.json")
        restart = document["paths"]["/api/v1/vms/{vm}/restart"]["post"]

        assert document["openapi"] == "3.1.0"
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
        schema = restart["responses"]["409"]["content"]["application/json"]["schema"]
        assert schema["allOf"][1]["properties"]["error"]["enum"][0] == "already_pending"

    main(act)


def test_roles_bodies_and_keys_are_described() -> None:
    async def act(world: World) -> None:
        document = await world.json("GET", "/api/openapi.json")
        described = dict(operations(document))
        restart = described["POST /api/v1/vms/{vm}/restart"]

        assert restart["x-role"] == "operator"
        assert [one["name"] for one in restart["parameters"]] == ["vm", "Idempotency-Key"]
        assert restart["requestBody"]["required"] is False
        assert described["POST /api/v1/hosts/{host}/maintain"]["requestBody"]["required"] is True
        fleet = described["PUT /api/v1/fleet"]["requestBody"]
        assert list(fleet["content"]) == ["application/json", "application/yaml"]
        assert described["GET /healthz"]["security"] == []
        tokens = described["POST /api/v1/tokens"]
        assert (tokens["x-role"], tokens["parameters"]) == ("admin", [])
        notice = document["components"]["schemas"]["Notice"]
        assert notice["additionalProperties"] is False
        assert notice["properties"]["not_before"]["description"].startswith("the earliest start")

    main(act)


@pytest.mark.parametrize("path", ["/api/docs", "/api/openapi.json"])
def test_documents_are_rendered_once(path: str) -> None:
    """Both need no token: rendering 160 kB per request would delay polls."""

    async def count_calls(world: World, path: str) -> int:
        """The function calls of the second request."""
        await world.request("GET", path)
        calls = [0]

        def count(frame: object, event: str, argument: object) -> None:
            calls[0] += 1

        sys.setprofile(count)
        try:
            await world.request("GET", path)
        finally:
            sys.setprofile(None)
        return calls[0]

    async def act(world: World) -> None:
        assert await count_calls(world, path) < 2 * await count_calls(world, "/healthz")

    main(act)


def test_document_is_cached_once_however_its_path_is_written() -> None:
    """Nobody needs a token for it, so it must not fill the memory."""

    async def act(world: World) -> None:
        app = make_app(world.service)
        async with make_client(app) as client:
            for path in ("/api/docs", "/api/docs/", "//api/docs", "/api//docs", "/api/%64ocs"):
                assert (await client.get(f"http://127.0.0.1:8081{path}")).status_code == 200
            assert (await client.get("/api/docs?x=1")).status_code == 400
        cache = app.stores.get("response_cache")
        assert isinstance(cache, MemoryStore)
        assert list(cache._store) == ["/api/docs"]

    main(act)


def test_every_operation_is_named_by_a_verb_and_a_noun() -> None:
    """A generated client has one method for each, and they should read alike."""

    async def act(world: World) -> None:
        document = await world.json("GET", "/api/openapi.json")
        names = [operation["operationId"] for _, operation in operations(document)]
        nouns = {operation["tags"][0].lower().rstrip("s") for _, operation in operations(document)}
        assert [name for name in names if "_" not in name or name.split("_")[0] in nouns] == []

    main(act)


def test_examples_are_valid_and_complete() -> None:
    """Somebody who copies an example must not be told that it is wrong."""

    async def act(world: World) -> None:
        document = await world.json("GET", "/api/openapi.json")
        schemas = document["components"]["schemas"]
        examples = 0
        for _, operation in operations(document):
            bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
            for media in (media for body in bodies for media in body.get("content", {}).values()):
                schema = {**media["schema"], "components": {"schemas": schemas}}
                jsonschema.validate(media["example"], schema)
                examples += 1
        assert examples > 300
        restart = document["paths"]["/api/v1/vms/{vm}/restart"]["post"]["responses"]
        event = restart["202"]["content"]["application/json"]["example"]["event"]
        assert event["resources"] == ["web-0"]
        assert event.keys() == schemas["EventView"]["properties"].keys()

    main(act)
