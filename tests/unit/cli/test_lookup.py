"""Events and campaigns by the start of their id or by name; hints for what does not exist."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from forewarn.cli.api import ControlClient
from forewarn.cli.exit_codes import Exit, Usage, exit_of
from forewarn.cli.lookup import find_campaign, find_event
from forewarn.cli.options import ClientConfig
from forewarn.errors import AlreadyPending, Error, NotFound, Unauthorized
from tests.unit.cli.test_api import serving

ONE = "1B2C3D4E-0F33-41B9-B7D1-9390A9009A3E"
TWO = "1B2C9999-0F33-41B9-B7D1-9390A9009A3E"
OVER = "77777777-0F33-41B9-B7D1-9390A9009A3E"
LISTS = {
    "events": [{"id": ONE}, {"id": TWO}],
    "history": [{"event": OVER}, {"event": ""}, {"event": OVER}],
    "campaigns": [
        {"id": "c11", "name": "Kernel 7", "ended_at": None},
        {"id": "c10", "name": "firmware", "ended_at": None},
        {"id": "c9", "name": "firmware", "ended_at": "2030-01-31T12:00:00Z"},
        {"id": "c1", "name": "bios", "ended_at": None},
        {"id": "c2", "name": "bios", "ended_at": None},
    ],
    "vms": [{"name": "web-0"}, {"name": "database"}],
    "hosts": [{"name": "host-a"}],
    "scopes": [{"name": "web"}],
}


@contextmanager
def service(refusal: dict[str, Any] | None = None) -> Iterator[ControlClient]:
    """A service with these lists, which refuses everything else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind = unquote(urlsplit(self.path).path.rpartition("/")[2])
            items: Any = LISTS.get(kind)
            body = {kind: items, "total": 9, "next": None} if items else refusal
            content = json.dumps(body).encode()
            self.send_response(200 if items else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        yield ControlClient(ClientConfig(control_url=(url,)))


@pytest.mark.parametrize(
    ("text", "event_id"),
    [("1b2c3", ONE), ("1B2C9999", TWO), ("7777", OVER), (ONE.lower(), ONE.lower())],
)
def test_event_is_found_by_the_start_of_its_id(text: str, event_id: str) -> None:
    """In any case, also if it ended: then the service says how."""
    with service() as client:
        assert find_event(client, text) == event_id


@pytest.mark.parametrize(
    ("text", "campaign_id"),
    [("c1", "c1"), ("C11", "c11"), ("kernel 7", "c11"), ("c9", "c9"), ("firmware", "c10")],
)
def test_campaign_is_found_by_id_and_by_name(text: str, campaign_id: str) -> None:
    """A whole id comes before the start of another; a name means the campaign that still runs."""
    with service() as client:
        assert find_campaign(client, text) == campaign_id


def test_ambiguous_text_lists_the_candidates() -> None:
    """It is a wrong command line: nothing is guessed."""
    with service() as client:
        with pytest.raises(Usage) as event:
            find_event(client, "1B2C")
        with pytest.raises(Usage) as campaign:
            find_campaign(client, "bios")

    assert event.value.message == f"'1B2C' could be 2 events; type one of {ONE}, {TWO}"
    assert campaign.value.message == "'bios' could be 2 campaigns; type one of c1, c2"


@pytest.mark.parametrize(
    ("find", "text"), [(find_event, ""), (find_event, "1B2"), (find_campaign, "")]
)
def test_unset_variable_never_means_the_only_one(find: Any, text: str) -> None:
    """`forewarn event cancel "$EVENT"` must not cancel the only event there is."""
    with service() as client, pytest.raises(Usage, match=r"^expected (at least|the id)"):
        find(client, text)


@pytest.mark.parametrize(
    ("find", "text", "message"),
    [
        (find_event, "zzzz", "there is no event 'zzzz'; `forewarn event list` lists them"),
        (find_campaign, "kernal 7", "there is no campaign 'kernal 7'; did you mean 'Kernel 7'?"),
        (find_campaign, "zz", "there is no campaign 'zz'; `forewarn campaign list` lists them"),
    ],
)
def test_unknown_text_gets_the_next_command(find: Any, text: str, message: str) -> None:
    with service() as client, pytest.raises(NotFound) as unknown:
        find(client, text)

    assert unknown.value.message == message
    assert exit_of(unknown.value) is Exit.NOT_FOUND


@pytest.mark.parametrize(
    ("noun", "name", "hint"),
    [
        ("vm", "wbe-0", "did you mean 'web-0'?"),
        ("host", "hostA", "did you mean 'host-a'?"),
        ("scope", "wep", "did you mean 'web'?"),
        ("vm", "x", "`forewarn vm list` lists them"),
    ],
)
def test_mistyped_name_gets_a_suggestion(noun: str, name: str, hint: str) -> None:
    """Most of them are one letter away."""
    refusal = {"error": f"unknown_{noun}", "message": "there is no such", "facts": {noun: name}}
    with service(refusal) as client, pytest.raises(NotFound) as unknown:
        client.get(f"{noun}s", name)

    assert unknown.value.message == f"there is no such; {hint}"


def test_typed_name_is_not_suggested() -> None:
    """The host exists, but not a daemon of it."""
    message = "there is no host 'host-a' with a daemon"
    refusal = {"error": "unknown_host", "message": message, "facts": {"host": "host-a"}}
    with service(refusal) as client, pytest.raises(NotFound) as unknown:
        client.delete("hosts", "host-a", "daemon")

    assert unknown.value.message == f"{message}; `forewarn host list` lists them"


@pytest.mark.parametrize(
    ("code", "message", "facts", "kind", "expected"),
    [
        (
            "unauthorized",
            "this request needs a token; expected the header x",
            {},
            Unauthorized,
            (
                "this request needs a token; "
                "set FOREWARN_TOKEN to a token that `forewarn token create` has printed"
            ),
        ),
        (
            "already_pending",
            f"web-0 has a Reboot pending already: {ONE}",
            {"event": ONE},
            AlreadyPending,
            (
                "web-0 has a Reboot pending already: 1B2C3D4E; "
                "`forewarn history --event 1B2C3D4E` shows it"
            ),
        ),
    ],
)
def test_refusal_names_the_variable_or_the_next_command(
    code: str, message: str, facts: dict[str, str], kind: type[Error], expected: str
) -> None:
    """Nobody who types a command sends headers."""
    refusal = {"error": code, "message": message, "facts": facts}
    with service(refusal) as client, pytest.raises(kind) as refused:
        client.post("vms", "web-0", "restart")

    assert refused.value.message == expected


def test_value_that_the_service_refuses_is_named_by_its_flag() -> None:
    """A path in a body means nothing to who has typed a flag."""
    facts = {"field": "hosts[0]"}
    refusal = {"error": "invalid", "message": "body.hosts[0]: expected x, got ''", "facts": facts}
    with service(refusal) as client:
        client.options = {"hosts": "--hosts"}
        with pytest.raises(Usage) as refused:
            client.post("nothing")

    assert refused.value.message == "--hosts: expected x, got ''"
