"""Dates as endpoints write them. Pure.

The wire says RFC 1123 (`Mon, 17 Apr 2017 18:40:06 GMT`), its documents say ISO 8601, and clients in
the field read RFC 822 and 850 too (protocol 2.3). The weekday is not looked at: published examples
have it wrong. Without a zone it is UTC.
"""

import re
from datetime import UTC, datetime, timedelta, timezone

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ZONE_HOURS = {"": 0, "z": 0, "ut": 0, "utc": 0, "gmt": 0}
_ZONE_HOURS |= {
    "est": -5,
    "edt": -4,
    "cst": -6,
    "cdt": -5,
    "mst": -7,
    "mdt": -6,
    "pst": -8,
    "pdt": -7,
}  # RFC 822

_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(:(?P<second>\d\d)([.,](?P<fraction>\d{1,12}))?)?"
_ZONE = r"\s*(?P<zone>[a-z]{0,3}|[+-]\d\d:?\d\d)"
_ISO = re.compile(
    rf"(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[t ]{_CLOCK}{_ZONE}", re.ASCII | re.IGNORECASE
)
_MAIL = re.compile(
    rf"([a-z]+,?\s+)?(?P<day>\d{{1,2}})[\s-](?P<month>[a-z]{{3,9}})[\s-](?P<year>\d{{4}}|\d\d)\s+{_CLOCK}{_ZONE}",
    re.ASCII | re.IGNORECASE,
)


def parse(text: str) -> datetime:
    """The moment, in UTC. ValueError for what is no date in any known form."""
    found = _ISO.fullmatch(text.strip()) or _MAIL.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"no date: {text[:80]!r}")
    part = found.groupdict(default="")
    try:
        moment = datetime(
            _year(part["year"]),
            _month(part["month"]),
            int(part["day"]),
            int(part["hour"]),
            int(part["minute"]),
            59 if part["second"] == "60" else int(part["second"] or 0),  # a leap second
            int(part["fraction"].ljust(6, "0")[:6]),
            _zone(part["zone"].lower()),
        )
        return moment.astimezone(UTC)
    except (LookupError, OverflowError) as error:
        raise ValueError(f"no date: {text[:80]!r}") from error


def _year(digits: str) -> int:
    """Two digits as POSIX reads them: 69 is 1969, 68 is 2068."""
    if len(digits) == 4:
        return int(digits)
    return int(digits) + (1900 if digits >= "69" else 2000)


def _month(name: str) -> int:
    return int(name) if name.isdecimal() else _MONTHS.index(name[:3].lower()) + 1


def _zone(name: str) -> timezone:
    if name[:1] not in ("+", "-"):
        return timezone(timedelta(hours=_ZONE_HOURS[name]))
    minutes = int(name[1:3]) * 60 + int(name[-2:])
    return timezone(timedelta(minutes=-minutes if name[0] == "-" else minutes))
