"""Finds events and campaigns by the start of their id or by name, and says what to type instead."""

import difflib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from forewarn import errors
from forewarn.cli.exit_codes import Usage
from forewarn.cli.output import GUID, shorten

if TYPE_CHECKING:
    from forewarn.cli.api import ControlClient

LOOKED_AT_MAX = 1000
EVENTS_MAX = 100_000
PREFIX_LENGTH_MIN = 4
NOT_A_LAB = (
    "this service is not a lab; start one with `forewarn lab serve`, and set FOREWARN_CONTROL if it"
    " is elsewhere"
)
NAMED = {f"unknown_{noun}": noun for noun in ("vm", "host", "scope")}


def find_event(client: "ControlClient", text: str) -> str:
    """The id of the event that a text begins. An event that has ended is found in the history."""
    if GUID.fullmatch(text):
        return text
    if len(text) < PREFIX_LENGTH_MIN:
        raise Usage(
            f"expected at least the first {PREFIX_LENGTH_MIN} characters of an event id,"
            f" got {text!r}"
        )
    for kind, member in (("events", "id"), ("history", "event")):
        listed = client.list(kind, EVENTS_MAX if kind == "events" else LOOKED_AT_MAX)
        ids = dict.fromkeys(item[member] for item in listed[kind])
        matching = [event_id for event_id in ids if event_id.startswith(text.upper())]
        if matching:
            return _only("event", text, matching)
    raise errors.UnknownEvent(f"there is no event {text!r}{_suggest('event', text, [])}")


def find_campaign(client: "ControlClient", text: str) -> str:
    """The id of a campaign by its id, its name, or the start of its id."""
    if not text:
        raise Usage("expected the id or the name of a campaign, got ''")
    found, wanted = client.list("campaigns", LOOKED_AT_MAX)["campaigns"], text.lower()
    matching = [each["id"] for each in found if wanted in (each["id"], each["name"].lower())]
    live = [each["id"] for each in found if each["id"] in matching and not each["ended_at"]]
    matching = live[:1] if len(live) == 1 else matching
    matching = matching or [each["id"] for each in found if each["id"].startswith(wanted)]
    if not matching:
        hint = _suggest("campaign", text, [each["name"] for each in found])
        raise errors.UnknownCampaign(f"there is no campaign {text!r}{hint}")
    return _only("campaign", text, matching)


def _only(noun: str, text: str, ids: Sequence[str]) -> str:
    if len(ids) > 1:
        raise Usage(f"{text!r} could be {len(ids)} {noun}s; type one of {', '.join(ids[:10])}")
    return ids[0]


def explain(client: "ControlClient", error: errors.Error) -> errors.Error:
    """An error of the service, with short ids and what to type next."""
    message, noun = shorten(error.message), NAMED.get(error.code)
    if isinstance(error, errors.Unauthorized):
        message = message.partition(";")[0]
        message += "; set FOREWARN_TOKEN to a token that `forewarn token create` has printed"
    elif isinstance(error, errors.AlreadyPending):
        message += f"; `forewarn history --event {shorten(str(error.facts['event']))}` shows it"
    elif client.is_lab and message.startswith("no such path"):
        message = NOT_A_LAB
    elif noun is not None and not client.is_failing:
        client.is_failing = True  # whatever the next response is, it is not explained
        with suppress(errors.Error):
            items = client.list(f"{noun}s", LOOKED_AT_MAX)[f"{noun}s"]
            message += _suggest(noun, str(error.facts[noun]), [item["name"] for item in items])
    return type(error)(message, **error.facts)


def _suggest(noun: str, text: str, names: Sequence[str]) -> str:
    return did_you_mean(text, names) or f"; `forewarn {noun} list` lists them"


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """The end of a message about a mistyped name; empty if no other name is like it."""
    others = [name for name in names if name != text]  # it may exist, and not be what is needed
    near = " or ".join(map(repr, sorted(difflib.get_close_matches(text, others))))
    return f"; did you mean {near}?" if near else ""
