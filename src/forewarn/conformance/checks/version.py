"""api-versions: which are served, and the errors for others."""

import re

from forewarn.conformance.check import MUST, SHOULD, check, expect, expect_equal
from forewarn.conformance.raw_http import (
    RawResponse,
    expect_document,
    expect_rejected,
    expect_status,
)
from forewarn.conformance.session import Session
from forewarn.conformance.spec import BAD_VERSION, NEWEST, VERSIONS

DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
NEWEST_COUNT = 3


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
    expect(False, "one DocumentIncarnation in all versions", incarnations)  # noqa: FBT003


@check(MUST, "PROTOCOL 1.3")
def version_missing_is_400(session: Session) -> None:
    """A client that forgot it must learn so, not get an arbitrary version."""
    expect_status(session.get(version=None), 400)


@check(MUST, "PROTOCOL 1.3")
def version_empty_is_400(session: Session) -> None:
    """An unset variable in a script gives an empty value, which is not a version."""
    expect_status(session.get(version=""), 400)


@check(MUST, "PROTOCOL 1.3")
def version_unknown_is_400(session: Session) -> None:
    """A version that was never published has no meaning that a client could rely on."""
    for version in ("2016-01-01", "2017-3-1", "1", "preview"):
        expect_status(session.get(version=version), 400)


@check(MUST, "PROTOCOL 1.1: {latest} is unsupported since 2017")
def version_latest_is_400(session: Session) -> None:
    """A client that uses the latest version breaks on the day of the next one."""
    for version in ("latest", "{latest}"):
        expect_status(session.get(version=version), 400)


@check(SHOULD, "PROTOCOL 1.3: strict by default")
def version_of_instance_only_is_400(session: Session) -> None:
    """The instance tree has its own versions: 2021-12-13 is not one of the document's."""
    expect_status(session.get(version="2021-12-13"), 400)


@check(SHOULD, "PROTOCOL 1.3: text of the 400 (IMDS)")
def version_missing_has_the_documented_message(session: Session) -> None:
    """People search for this sentence, and it links to the documentation."""
    expect_equal("the error", session.get(version=None).object()["error"], BAD_VERSION)


@check(SHOULD, "PROTOCOL 1.3: newest-versions (MSAL, OHAI)")
def version_missing_names_the_newest(session: Session) -> None:
    """MSAL and Ohai omit the version on purpose, to read the newest ones from the error."""
    for version in (None, "2016-01-01"):
        newest_versions(session.get(version=version))


@check(SHOULD, "PROTOCOL 1.3: the three newest of Scheduled Events")
def version_named_as_newest_is_served(session: Session) -> None:
    """A client that reads the list calls again with its first entry."""
    for version in newest_versions(session.get(version=None)):
        session.document(version)


@check(MUST, "PROTOCOL 1.3: duplicate query parameters are rejected (IMDS)")
def query_duplicate_is_rejected(session: Session) -> None:
    """Two servers may choose different values of the two."""
    for second in (NEWEST, VERSIONS[1]):
        expect_rejected(session.get(query=f"api-version={second}"))


@check(SHOULD, "PROTOCOL 1.3: 400")
def query_duplicate_is_400(session: Session) -> None:
    """It is a mistake in the request, reported like the other mistakes."""
    expect_status(session.get(query=f"api-version={NEWEST}"), 400)


@check(SHOULD, "PROTOCOL 3: the document has no format=text")
def query_format_changes_nothing(session: Session) -> None:
    """A script that sends format=text with every request still gets the document as JSON."""
    expect_document(session.get(query="format=text"))
