"""Times as people type and read them."""

from datetime import UTC, datetime

import pytest

from forewarn.cli.exit_codes import Usage
from forewarn.cli.times import FUTURE, PAST, format_relative, parse_time

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected", "time"),
    [
        ("+15m", FUTURE, "2030-01-31T12:15:00Z"),
        ("15m", FUTURE, "2030-01-31T12:15:00Z"),
        (" 1h30m ", FUTURE, "2030-01-31T13:30:00Z"),
        ("2h", PAST, "2030-01-31T10:00:00Z"),
        ("2h ago", PAST, "2030-01-31T10:00:00Z"),
        ("-90s", PAST, "2030-01-31T11:58:30Z"),
        ("+5m", PAST, "2030-01-31T12:05:00Z"),
        ("15m ago", FUTURE, "2030-01-31T11:45:00Z"),
        ("2030-01-31T12:00:00Z", FUTURE, "2030-01-31T12:00:00Z"),
        ("2030-01-31 14:00+02:00", PAST, "2030-01-31 14:00+02:00"),
        (None, PAST, None),
    ],
)
def test_time_may_be_a_duration_from_now(text: str | None, expected: str, time: str | None) -> None:
    """From the service's now. Without a sign it is in the direction that the option is about."""
    assert parse_time("--since", text, lambda: NOON, expected) == time


@pytest.mark.parametrize(
    "text", ["noon", "", "15", "+", "2030-01-31", "2030-01-31T12:00:00", "ago"]
)
def test_other_text_is_refused_with_the_option(text: str) -> None:
    """A time without a zone is not a time."""
    with pytest.raises(Usage) as refused:
        parse_time("--not-before", text, lambda: NOON)

    assert refused.value.message == (
        f"--not-before: expected a time such as +15m, 2h or 2030-01-31T12:00:00Z, got {text!r}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2030-01-31T12:14:59Z", "in 14m"),
        ("2030-01-31T12:00:30.25Z", "in 30s"),
        ("2030-01-31T12:00:00.1Z", "now"),
        ("2030-01-31T11:57:00Z", "3m ago"),
        ("2030-01-30T12:30:00Z", "23h ago"),
        ("2030-02-03T13:00:00Z", "in 3d"),
    ],
)
def test_relative_time_is_in_the_largest_unit(text: str, expected: str) -> None:
    assert format_relative(text, NOON) == expected
