"""Dates in every form that endpoints, their documents and their clients have used."""

from datetime import UTC, datetime

import pytest

from forewarn.client.dates import parse

MOMENT = datetime(2017, 4, 17, 18, 40, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 17 Apr 2017 18:40:06 GMT",
        "Sat, 17 Apr 2017 18:40:06 GMT",  # a wrong weekday
        "mon, 17 apr 2017 18:40:06 gmt",
        "17 Apr 2017 18:40:06 GMT",
        "Mon, 17 April 2017 18:40:06 UTC",
        "  Mon, 17 Apr 2017 18:40:06 GMT ",
        "Mon, 17 Apr 2017 20:40:06 +0200",
        "Mon, 17 Apr 2017 14:40:06 EDT",
        "Mon, 17 Apr 17 18:40:06 UT",
        "Monday, 17-Apr-17 18:40:06 GMT",
        "Monday, 17-Apr-17 10:40:06 PST",
        "2017-04-17T18:40:06Z",
        "2017-04-17t18:40:06z",
        "2017-04-17T18:40:06",
        "2017-04-17 18:40:06",
        "2017-04-17T20:40:06+02:00",
        "2017-04-17T10:40:06-0800",
        "2017-04-17T18:40:06.0000000Z",  # seven digits, as .NET prints them
    ],
)
def test_a_date_is_read_in_every_form_seen_in_the_field(text: str) -> None:
    """A date that one endpoint writes and we cannot read would leave its guests without a deadline."""
    assert parse(text) == MOMENT
    assert parse(text).tzinfo is UTC


def test_a_date_without_seconds_is_the_full_minute() -> None:
    """RFC 822 allows it, and a client in the field reads it."""
    assert parse("17 Apr 17 18:40 -0000") == MOMENT.replace(second=0)
    assert parse("2017-04-17T18:40Z") == MOMENT.replace(second=0)


def test_a_fraction_of_a_second_is_kept() -> None:
    assert parse("2017-04-17T18:40:06.25Z") == MOMENT.replace(microsecond=250_000)
    assert parse("2017-04-17T18:40:06,1234567+00:00") == MOMENT.replace(microsecond=123_456)


def test_a_leap_second_is_a_moment_too() -> None:
    assert parse("Sat, 31 Dec 2016 23:59:60 GMT") == datetime(2016, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_a_year_of_two_digits_is_of_this_century_up_to_68() -> None:
    assert parse("17 Apr 68 18:40 GMT").year == 2068
    assert parse("17 Apr 69 18:40 GMT").year == 1969


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "tomorrow, 17 Apr 2017 18:40:06 GMT or so",
        "2017-04-17",
        "1492454406",
        "Mon, 31 Feb 2017 18:40:06 GMT",
        "Mon, 17 Foo 2017 18:40:06 GMT",
        "Mon, 17 Apr 2017 25:40:06 GMT",
        "Mon, 17 Apr 2017 18:40:61 GMT",
        # a zone of no standard: an hour's guess is an hour's error
        "Mon, 17 Apr 2017 18:40:06 CET",
        "2017-04-17T18:40:06+99:99",
        "0001-01-01T00:00:00+05:00",  # before the first year of UTC
        "٢٠١٧-04-17T18:40:06Z",
        "04/17/2017 18:40:06",
    ],
)
def test_what_is_no_date_is_never_guessed(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)
