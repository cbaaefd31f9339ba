"""The requests of published clients against a real server: they must work unchanged."""

import hashlib
import hmac
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from forewarn.auth.tokens import Role
from forewarn.config import Config, Identify
from forewarn.core.command import Evict
from forewarn.core.event import Status
from forewarn.core.fleet import Vm
from tests.e2e.metadata_world import EVENT_ID, POLL, World

ALL_VERSIONS = [
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
]
PROXIES = urllib.request.ProxyHandler({})
"""The protocol supports no proxies, and clients are body to go around them."""


def events_url(world: World, version: str = "2020-07-01", prefix: str = "") -> str:
    return f"{world.url}{prefix}/metadata/scheduledevents?api-version={version}"


def call(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        url, data, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.build_opener(PROXIES).open(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def read(world: World, version: str = "2020-07-01", prefix: str = "") -> Any:
    status, body = call(events_url(world, version, prefix), Metadata="true")
    assert status == 200
    return json.loads(body)


def start_requests(document: Any, **more: object) -> bytes:
    return json.dumps(
        {"StartRequests": [{"EventId": event["EventId"]} for event in document["Events"]], **more}
    ).encode()


def is_started(world: World) -> bool:
    return [event.status for event in world.scope().events] == [Status.STARTED]


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_python_sample_finds_every_member(version: str) -> None:
    """It calls string methods on NotBefore and compares names with Resources."""
    with World() as world:
        read(world)
        world.restart()
        lines = []
        for event in read(world, version)["Events"]:
            not_before = event["NotBefore"].replace(" ", "_")
            assert (event["EventId"], event["EventStatus"], event["ResourceType"]) == (
                EVENT_ID,
                "Scheduled",
                "VirtualMachine",
            )
            if "web-0" in [name.removeprefix("_") for name in event["Resources"]]:
                lines.append(
                    "+ Scheduled Event. This host is scheduled for"
                    f" {event['EventType']} not before {not_before}"
                )
        assert len(lines) == 1
        assert lines[0].endswith("_GMT")


@pytest.mark.parametrize("version", ALL_VERSIONS)
def test_approving_every_outstanding_event_starts_it(version: str) -> None:
    with World() as world:
        read(world)
        world.restart()
        assert call(
            events_url(world, version), start_requests(read(world, version)), Metadata="true"
        ) == (200, b"")
        assert is_started(world)
        assert read(world, version)["Events"][0]["NotBefore"] == ""


@pytest.mark.parametrize("incarnation", ["2", 2, "5", 99, None])
def test_incarnation_in_an_approval_is_ignored(incarnation: object) -> None:
    """The curl samples send it as text, PowerShell as a number, the later documents not at all."""
    with World() as world:
        read(world)
        world.restart()
        body = start_requests(read(world), DocumentIncarnation=incarnation)
        assert call(events_url(world), body, Metadata="true")[0] == 200
        assert is_started(world)


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "application/json", None]
)
def test_an_approval_is_json_whatever_its_content_type_says(content_type: str | None) -> None:
    """curl and PowerShell say form, others text, JSON, or nothing."""
    with World() as world:
        read(world)
        world.restart()
        connection = http.client.HTTPConnection("127.0.0.1", world.port)
        headers = {"Metadata": "true"} | ({"Content-Type": content_type} if content_type else {})
        connection.request(
            "POST",
            "/metadata/scheduledevents?api-version=2020-07-01",
            start_requests(read(world)),
            headers,
        )
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        connection.close()
        assert is_started(world)


def test_2017_03_01_approval_needs_no_metadata_header() -> None:
    """As the published C# and Python samples of that time do."""
    with World() as world:
        read(world)
        world.restart()
        url = events_url(world, "2017-03-01")
        assert call(url, start_requests(read(world, "2017-03-01"), DocumentIncarnation=2)) == (
            200,
            b"",
        )
        assert is_started(world)


def test_later_versions_need_the_metadata_header_to_approve() -> None:
    with World() as world:
        read(world)
        world.restart()
        status, body = call(events_url(world, "2017-08-01"), start_requests(read(world)))
        assert (status, json.loads(body)) == (
            400,
            {"error": "Bad request. Required metadata header not specified"},
        )
        assert not is_started(world)


def test_client_may_read_and_approve_with_different_versions() -> None:
    """It knows its own name from the instance, and parses any answer that is not empty."""
    with World() as world:
        read(world)
        world.restart()
        _, instance = call(f"{world.url}/metadata/instance?api-version=2021-12-13", Metadata="true")
        me = json.loads(instance)["compute"]["name"]
        document = read(world, "2020-07-01")
        assert document["Events"][0]["Resources"] == [me]
        _, body = call(events_url(world, "2019-08-01"), start_requests(document), Metadata="true")
        assert not body or json.loads(body)
        assert is_started(world)


def test_instance_name_as_text_matches_resources() -> None:
    with World() as world:
        url = f"{world.url}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        assert call(url, Metadata="true") == (200, b"web-0")


def test_etag_client_gets_304_until_a_change() -> None:
    """Microsoft's Node sample starts with 0 and sends back what it got, with POST as well."""
    with World() as world:
        seen, tag = [], "0"
        connection = http.client.HTTPConnection("127.0.0.1", world.port)
        for step in range(4):
            headers = {"Metadata": "true", "If-None-Match": tag}
            connection.request(
                "GET", "/metadata/scheduledevents?api-version=2020-07-01", headers=headers
            )
            response = connection.getresponse()
            body, tag = response.read(), response.headers["etag"]
            seen.append(
                json.loads(body)["DocumentIncarnation"]
                if response.status == 200
                else response.status
            )
            if step == 1:
                world.restart()
        connection.close()
        assert seen == [1, 304, 2, 304]
        body = start_requests(read(world))
        assert call(events_url(world), body, Metadata="true", If_None_Match=tag)[0] == 200


def test_versions_are_listed_for_clients() -> None:
    """Several do so by calling without one."""
    with World() as world:
        status, body = call(f"{world.url}/metadata/scheduledevents", Metadata="true")
        assert status == 400
        assert json.loads(body)["newest-versions"] == ["2020-07-01", "2019-08-01", "2019-04-01"]
        status, body = call(f"{world.url}/metadata/instance", Metadata="true")
        assert (status, json.loads(body)["newest-versions"][0]) == (400, "2025-04-07")


def test_any_vm_of_the_scope_but_no_other_may_approve() -> None:
    with World() as world:
        read(world)
        world.restart()
        body = start_requests(read(world))
        assert call(events_url(world, prefix="/as/db-0"), body, Metadata="true")[0] == 400
        assert not is_started(world)
        assert call(events_url(world, prefix="/as/web-1"), body, Metadata="true")[0] == 200
        assert is_started(world)


def test_signed_proxy_request_gets_the_vms_document() -> None:
    """As OpenStack's metadata proxy does: with an id, a signature, and X-Forwarded-For."""
    key = b"a shared secret"
    with World(Config(identify=(Identify.PROXY,)), proxy_key=key) as world:
        signature = hmac.digest(key, b"id-web-0", "sha256").hex()
        for value, status in ((signature, 200), ("0" * 64, 403)):
            headers = {
                "Metadata": "true",
                "X_Instance_ID": "id-web-0",
                "X_Instance_ID_Signature": value,
            }
            assert call(events_url(world), None, **headers, X_Forwarded_For="10.0.0.1")[0] == status
        assert call(events_url(world), Metadata="true")[0] == 403


def test_request_with_x_forwarded_for_is_rejected() -> None:
    with World() as world:
        status, body = call(events_url(world), Metadata="true", X_Forwarded_For="10.0.0.1")
        assert (status, list(json.loads(body))) == (400, ["error"])


WEB_2, WEB_3 = "6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f10", "6f1c0c1e-6d0b-5a7e-9d5c-0a4e5c2b7f11"


def signed_poll(secret: str, vm_id: str = WEB_2, **more: str) -> bytes:
    """A relayed poll, as a host daemon sends it."""
    key = hashlib.sha256(secret.encode()).hexdigest().encode()
    now = int(time.time())
    headers = {
        "X-Forewarn-Host": "kvm-1",
        "X-Instance-ID": vm_id,
        "X-Forewarn-Time": str(now),
        "X-Instance-ID-Signature": hmac.digest(key, f"{vm_id} {now}".encode(), "sha256").hex(),
    } | {name.replace("_", "-"): value for name, value in more.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return POLL.replace(b"\r\n\r\n", f"\r\n{lines}\r\n".encode())


def add_daemon(world: World) -> None:
    """A daemon on host-1, with `web-2` and `web-3`."""
    world.run(world.tokens.create("root", Role.ADMIN, secret="a" * 64, by="test"))
    world.run(world.tokens.create("kvm-1", Role.HOST, secret="b" * 64, by="test", host="host-1"))
    world.enrol("web-2", Vm(name="web-2", id=WEB_2, host="host-1", address="127.0.0.1"))
    world.enrol("web-3", Vm(name="web-3", id=WEB_3, host="host-1"))


def test_relayed_polls_of_several_vms_share_a_connection_and_the_fast_path() -> None:
    """A daemon keeps few connections; each request says for which VM it is."""
    with World(Config(identify=(Identify.ADDRESS,))) as world, world.connect() as client:
        add_daemon(world)
        world.submit(Evict(vm="web-3", event_id=EVENT_ID), "web-3")
        for _ in range(3):
            for vm_id, count in ((WEB_2, 0), (WEB_3, 1)):
                client.send(signed_poll("b" * 64, vm_id))
                assert len(json.loads(client.response().body)["Events"]) == count
        assert len(world.called) == 2  # the first poll of each scope is recorded


@pytest.mark.parametrize(
    "request_",
    [
        signed_poll("c" * 64),
        signed_poll("b" * 64, X_Instance_ID="id-web-0"),
        signed_poll("b" * 64, X_Forewarn_Host="root"),
        signed_poll("b" * 64, X_Forewarn_Host="kvm-2"),
        signed_poll("b" * 64, X_Instance_ID_Signature=""),
        signed_poll("b" * 64).replace(b"\r\n\r\n", b"\r\nX-Instance-ID: id-web-0\r\n\r\n"),
    ],
)
def test_forged_headers_of_a_host_daemon_are_forbidden(request_: bytes) -> None:
    """A guest that reaches the server directly can send any header, but not sign one."""
    with World(Config(identify=(Identify.ADDRESS,))) as world:
        add_daemon(world)
        assert world.ask(signed_poll("b" * 64)).status == 200
        for _ in range(2):
            response = world.ask(request_)
            assert response.status == 403
            assert b"\n" not in response.body
