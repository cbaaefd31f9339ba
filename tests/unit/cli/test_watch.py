"""How the stream is read and told on a terminal."""

from datetime import UTC, datetime

from forewarn.cli.history import moment, row
from forewarn.cli.watch import Message, line, messages, query_of

ENTRY = {
    "number": 7,
    "at": "2030-01-31T12:00:00.123Z",
    "by": "server-6fb313d3-3282-4687-85dc-4143b404a61c",
    "what": "scheduled",
    "scope": "web",
    "event": "0123456789",
    "resources": ["web-0", "web-1"],
    "vm": "",
    "host": "host-a",
    "detail": "Reboot of web-0",
}


def test_messages_are_what_stands_between_empty_lines() -> None:
    """As the specification of server-sent events says it: comments are nothing, and an id stays."""
    stream = b"retry: 2000\nid: 6\n\n: still here\nid: 7\n\nid: 8\ndata: {}\r\n\r\nevent: gap\ndata: 1\n\ndata: cut off\n"

    assert list(messages(stream.splitlines(keepends=True))) == [
        Message("6", "", ""),
        Message("7", "", ""),
        Message("8", "", "{}"),
        Message("8", "gap", "1"),
    ]


def test_a_change_is_a_line_in_the_words_of_the_demo() -> None:
    assert line(ENTRY) == "12:00:00  web         Scheduled: Reboot of web-0  (01234567)"


def test_a_change_that_has_no_words_is_told_as_it_is() -> None:
    """What a newer service tells is not hidden."""
    assert (
        line(ENTRY | {"what": "claimed", "vm": "web-0", "event": "", "detail": "w1"})
        == "12:00:00  web         claimed web-0 w1"
    )


def test_a_long_detail_is_its_first_line_and_commands_nothing() -> None:
    """A driver's output may hold anything, and a terminal obeys what it reads."""
    told = line(
        ENTRY | {"what": "impact-failed", "vm": "web-0", "detail": "no {host}\x1b[2J\nand more"}
    )

    assert told == "12:00:00  web         web-0: no {host}�[2J  (01234567)"
    assert row(ENTRY | {"detail": "one\ntwo"})["detail"] == "one"


def test_a_row_of_the_table_names_whom_it_is_about_and_is_not_too_wide() -> None:
    shown = row(ENTRY)

    assert (shown["at"], shown["about"], shown["by"]) == (
        "2030-01-31T12:00:00Z",
        ["web-0", "web-1"],
        "server-6fb313d3-3282",
    )


def test_since_may_be_so_long_ago() -> None:
    now = datetime(2030, 1, 31, 12, tzinfo=UTC)

    assert moment("2h", now) == "2030-01-31T10:00:00Z"
    assert moment("7d", now) == "2030-01-24T12:00:00Z"
    assert moment("90s", now) == "2030-01-31T11:58:30Z"
    assert moment("2030-01-31T12:00:00Z", now) == "2030-01-31T12:00:00Z"
    assert moment("yesterday", now) == "yesterday"  # for the service to refuse, in its own words
    assert moment(None, now) is None


def test_a_question_holds_only_what_is_asked_and_is_safe_in_an_address() -> None:
    assert query_of({"vm": "a b&c", "scope": None, "limit": "5"}) == "vm=a+b%26c&limit=5"
