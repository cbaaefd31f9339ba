"""What is looked at before the first check: a run that cannot say anything does not begin."""

from collections.abc import Mapping
from typing import Any

import pytest

from forewarn.conformance import checks as topic
from forewarn.conformance.check import CHECKS
from forewarn.conformance.session import Stage
from forewarn.errors import AlreadyPending, UnknownVm
from tests.unit.conformance.canned import TIME, saying, stage

NO = b'HTTP/1.1 %b\r\nContent-Length: 14\r\n\r\n{"error":"no"}'
NAME = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nweb-0"
assert topic.TOPICS


class Known:
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


def survey(control: Known, *names: str, check: str = "event-id-is-a-guid") -> None:
    with saying(*([] if names else [NAME])) as endpoint:
        at = Stage(endpoint, names=names, control=control, may_approve=False, time=TIME)
        at.survey([CHECKS["etag-is-sent"], CHECKS[check]])


def test_a_vm_that_the_control_api_does_not_know_is_told_before_the_first_check() -> None:
    """Every check would fail, and none would say why."""
    survey(Known(web_0=[], web_1=[]), "web-0", "web-1")

    with pytest.raises(UnknownVm, match="there is no VM 'nope'"):
        survey(Known(web_0=[]), "web-0", "nope")


@pytest.mark.parametrize("names", [("web-0",), ()])
@pytest.mark.parametrize("check", ["event-id-is-a-guid", "events-overlap"])
def test_an_event_that_is_there_already_is_told_before_the_first_check(
    check: str, names: tuple[str, ...]
) -> None:
    """A second of its kind cannot be made, so most checks would not be run, and the whole look
    well.
    """
    with pytest.raises(
        AlreadyPending, match=r"web-0 has an event already \(E1\);.* or leave out --control"
    ):
        survey(Known(web_0=["E1"]), *names, check=check)


def test_an_event_that_is_there_is_in_nobodys_way_where_none_is_made() -> None:
    survey(Known(web_0=["E1"]), "web-0", check="path-in-any-case")


def test_an_event_of_another_vm_is_in_nobodys_way() -> None:
    """Events are made for the first VM only."""
    survey(Known(web_0=[], web_1=["E1"]), "web-0", "web-1")


@pytest.mark.parametrize("status", [b"403 Forbidden", b"404 Not Found"])
def test_an_endpoint_that_does_not_know_a_vm_is_asked_nothing_more(status: bytes) -> None:
    """Without a control API too."""
    with (
        saying(NAME, NO % status) as endpoint,
        pytest.raises(UnknownVm, match=rf"nope.*{status[:3].decode()}"),
    ):
        stage(endpoint, "web-0", "nope").reach()


def test_a_refusal_where_no_vm_was_named_is_for_the_checks_to_judge() -> None:
    with saying(NO % b"403 Forbidden") as endpoint:
        stage(endpoint).reach()
