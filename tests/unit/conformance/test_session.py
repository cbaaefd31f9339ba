"""Before the first check: the endpoint's URL, and reasons not to start a run."""

from collections.abc import Mapping
from typing import Any

import pytest

from forewarn.client.http1 import Endpoint
from forewarn.conformance.calls import parse_endpoint
from forewarn.conformance.checks import CHECKS
from forewarn.conformance.session import Session
from forewarn.errors import AlreadyPending, UnknownVm
from tests.unit.conformance.scripted_endpoint import CLOCK, reading_session, serving

ERROR = b'HTTP/1.1 %b\r\nContent-Length: 14\r\n\r\n{"error":"no"}'
NAME = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nweb-0"


class ControlDouble:
    """A control API that knows some VMs, each with its events."""

    def __init__(self, **vms: list[str]) -> None:
        self.vms = {name.replace("_", "-"): events for name, events in vms.items()}

    def get(self, *path: str, query: str = "") -> Any:
        _, name = path
        if name not in self.vms:
            raise UnknownVm(f"there is no VM {name!r}")
        return {"name": name, "events": self.vms[name]}

    def post(self, *path: str, body: Mapping[str, object] | None = None) -> Any:
        raise AssertionError(path)


def preflight(control: ControlDouble, *names: str, check: str = "event-id-is-a-guid") -> None:
    with serving(*([] if names else [NAME])) as endpoint:
        session = Session(
            endpoint=endpoint, names=names, control_api=control, may_approve=False, clock=CLOCK
        )
        session.preflight([CHECKS["etag-is-sent"], CHECKS[check]])


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://169.254.169.254", Endpoint("169.254.169.254", 80, "")),
        ("http://[::1]:8080/lab/", Endpoint("::1", 8080, "/lab")),
        ("http://h/metadata/scheduledEvents", Endpoint("h", 80, "")),
        ("http://h/lab/Metadata/scheduledevents/", Endpoint("h", 80, "/lab")),
    ],
)
def test_endpoint_url_may_include_the_path_of_the_document(url: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(url) == endpoint


def test_vm_unknown_to_the_control_api_stops_the_run() -> None:
    """Every check would fail, and none would say why."""
    preflight(ControlDouble(web_0=[], web_1=[]), "web-0", "web-1")

    with pytest.raises(UnknownVm, match="there is no VM 'nope'"):
        preflight(ControlDouble(web_0=[]), "web-0", "nope")


@pytest.mark.parametrize("names", [("web-0",), ()])
@pytest.mark.parametrize("check", ["event-id-is-a-guid", "events-may-overlap"])
def test_existing_event_stops_a_run_that_creates_events(check: str, names: tuple[str, ...]) -> None:
    """A second one of its type cannot be created, so most checks would not run."""
    expected = r"web-0 already has an event \(E1\);.* or leave out --control"
    with pytest.raises(AlreadyPending, match=expected):
        preflight(ControlDouble(web_0=["E1"]), *names, check=check)


def test_existing_event_is_fine_if_no_check_creates_one() -> None:
    preflight(ControlDouble(web_0=["E1"]), "web-0", check="path-in-any-case")


def test_existing_event_of_another_vm_is_fine() -> None:
    """Events are created for the first VM only."""
    preflight(ControlDouble(web_0=[], web_1=["E1"]), "web-0", "web-1")


@pytest.mark.parametrize("status", [b"403 Forbidden", b"404 Not Found"])
def test_vm_unknown_to_the_endpoint_stops_the_run(status: bytes) -> None:
    """Without a control API too."""
    with (
        serving(NAME, ERROR % status) as endpoint,
        pytest.raises(UnknownVm, match=rf"nope.*{status[:3].decode()}"),
    ):
        reading_session(endpoint, "web-0", "nope").reach()


def test_error_without_a_named_vm_is_left_to_the_checks() -> None:
    with serving(ERROR % b"403 Forbidden") as endpoint:
        reading_session(endpoint).reach()
