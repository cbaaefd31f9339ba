"""api-versions: which are served, and the errors for others."""

import re

from forewarn.conformance.check import MUST, SHOULD, check, expect, expect_equal, fail, rule
from forewarn.conformance.expectation import a_rejection, an_error, gives, sends, served
from forewarn.conformance.raw_http import RawResponse, Request
from forewarn.conformance.session import Session
from forewarn.conformance.spec import BAD_VERSION, NEWEST, TEXT, VERSIONS

DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
NEWEST_COUNT = 3

MISSING, EMPTY = Request(version=None), Request(version="")
UNKNOWN = [Request(version=version) for version in ("2017-3-1", "1", "preview", "2020-13-01")]
UNKNOWN_DATES = [Request(version=version) for version in ("2021-12-13", "2016-01-01")]
LATEST = [Request(version=version) for version in ("latest", "{latest}")]
DUPLICATE = [Request(query=f"api-version={second}") for second in (NEWEST, VERSIONS[1])]
INVALID = (MISSING, UNKNOWN[0])
DUPLICATES = "PROTOCOL 1.3: duplicate query parameters are rejected (IMDS)"


def newest_versions(response: RawResponse) -> list[str]:
    """The member `newest-versions`: three dates, the newest first."""
    versions = response.object()["newest-versions"]
    is_list = isinstance(versions, list) and all(DATE.fullmatch(str(each)) for each in versions)
    expect(is_list, "newest-versions to be a list of dates", versions)
    is_sorted = len(versions) == NEWEST_COUNT and sorted(set(versions), reverse=True) == versions
    expect(is_sorted, "newest-versions to be three, newest first", versions)
    return list(versions)


@check(MUST, "PROTOCOL 1.1", each=VERSIONS)
def version_is_served(version: str, session: Session) -> None:
    """Clients pin the version they were written for, and never change it."""
    session.document(version)


@check(SHOULD, "PROTOCOL 1.1: one counter")
def version_does_not_change_the_incarnation(session: Session) -> None:
    """Pacemaker's agent reads with one version, approves with another, and compares the two."""
    for _ in range(2):  # the first time, something may have changed meanwhile
        incarnations = {version: session.document(version).incarnation for version in VERSIONS}
        if len(set(incarnations.values())) == 1:
            return
    fail("one DocumentIncarnation in all versions", incarnations)


@rule(MUST, "PROTOCOL 1.3", gives(400, MISSING))
def version_missing_is_400() -> None:
    """A client that forgot it must learn so, not get an arbitrary version."""


@rule(MUST, "PROTOCOL 1.3", gives(400, EMPTY))
def version_empty_is_400() -> None:
    """An unset variable in a script gives an empty value, which is not a version."""


@rule(MUST, "PROTOCOL 1.3", gives(400, *UNKNOWN))
def version_unknown_is_400() -> None:
    """What is not a date was never a version, so the client learns which ones there are."""


@rule(MUST, "PROTOCOL 1.1: {latest} is unsupported since 2017", gives(400, *LATEST))
def version_latest_is_400() -> None:
    """A client that uses the latest version breaks on the day of the next one."""


@rule(MUST, "PROTOCOL 11: 404 (OpenShift)", sends(an_error(404), *UNKNOWN_DATES))
def version_with_an_unknown_date_is_404() -> None:
    """OpenShift's handler requests a newer version first, and panics unless it gets 200 or 404."""


@check(SHOULD, "PROTOCOL 1.3: text of the 400 (IMDS)")
def version_missing_has_the_documented_message(session: Session) -> None:
    """People search for this sentence, and it links to the documentation."""
    expect_equal("the error", session.send(MISSING).object()["error"], BAD_VERSION)


@rule(SHOULD, "PROTOCOL 1.3: newest-versions (MSAL, OHAI)", sends(newest_versions, *INVALID))
def version_missing_names_the_newest() -> None:
    """MSAL and Ohai omit the version on purpose, to read the newest ones from the error."""


@check(SHOULD, "PROTOCOL 1.3: the three newest of Scheduled Events")
def version_named_as_newest_is_served(session: Session) -> None:
    """A client that reads the list calls again with its first entry."""
    for version in newest_versions(session.send(MISSING)):
        session.document(version)


@rule(MUST, DUPLICATES, sends(a_rejection, *DUPLICATE))
def query_duplicate_is_rejected() -> None:
    """Two servers may choose different values of the two."""


@rule(SHOULD, "PROTOCOL 1.3: 400", gives(400, DUPLICATE[0]))
def query_duplicate_is_400() -> None:
    """It is a mistake in the request, reported like the other mistakes."""


@rule(SHOULD, "PROTOCOL 3: the document has no format=text", served(Request(query=TEXT)))
def query_format_changes_nothing() -> None:
    """A script that sends format=text with every request still gets the document as JSON."""
