"""Durations as people write them."""

from datetime import timedelta

import msgspec
import pytest

from forewarn.duration import Duration, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("1h30m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("500ms", timedelta(milliseconds=500)),
        ("1d2h3m4s5ms", timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5)),
        ("0s", timedelta(0)),
    ],
)
def test_duration_is_parsed(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected
    assert msgspec.convert(text, Duration) == text


@pytest.mark.parametrize(
    "text", ["", "90", "s", ".5h", "1.h", "-1s", "30m1h", "1h ", "1h\n", "1s1s", "999999999s", "1w"]
)
def test_other_text_is_rejected_by_type_and_parser(text: str) -> None:
    """The JSON Schema of a file and the parser must agree."""
    with pytest.raises(ValueError, match="such as 90s, 15m, 2h"):
        parse_duration(text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, Duration)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0s"),
        (0.25, "0.2s"),
        (59, "59s"),
        (60, "1m"),
        (80.1, "1m20.1s"),
        (3600, "1h"),
        (86400, "24h"),
        (90061, "25h1m1s"),
        (604800, "7d"),
        (176401, "2d1h1s"),
        (-5, "-5s"),
        (-3605, "-1h5s"),
        (-0.01, "0s"),
    ],
)
def test_duration_is_formatted_as_files_write_it(seconds: float, words: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == words
