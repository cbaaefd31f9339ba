"""Lengths of time as people write them."""

from datetime import timedelta

import msgspec
import pytest

from forewarn.duration import Duration, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("1h30m", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("1d2h3m4s", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("0s", timedelta(0)),
    ],
)
def test_a_length_of_time_is_read(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected
    assert msgspec.convert(text, Duration) == text


@pytest.mark.parametrize(
    "text", ["", "90", "s", "1.5h", "-1s", "30m1h", "1h ", "1h\n", "1s1s", "999999999s", "1w"]
)
def test_what_is_no_length_of_time_is_refused_by_the_type_and_by_the_reader(text: str) -> None:
    with pytest.raises(ValueError, match="such as 90s, 15m, 2h"):
        parse_duration(text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, Duration)
