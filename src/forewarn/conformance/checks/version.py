"""The api-versions: which are served, and what is said to the others."""

import re

from forewarn.conformance.check import Level, check, check_each, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.document import Document
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import BAD_VERSION, NEWEST, VERSIONS

MUST, SHOULD = Level.MUST, Level.SHOULD
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
NEWEST_COUNT = 3


def newest_three(said: object, what: str) -> list[str]:
    """What `newest-versions` must be: three dates, the newest first."""
    is_list = isinstance(said, list) and all(
        isinstance(one, str) and DATE.fullmatch(one) for one in said
    )
    holds(is_list, f"{what} to be a list of dates", said)
    assert isinstance(said, list)
    holds(
        len(said) == NEWEST_COUNT and sorted(set(said), reverse=True) == said,
        f"{what} to be three, newest first",
        said,
    )
    return said


@check_each(VERSIONS, MUST, "PROTOCOL 1.1")
def version_is_served(stage: Stage, version: str) -> None:
    """Clients pin the version they were written for, and never change it."""
    stage.document(version)


@check(SHOULD, "PROTOCOL 1.1: one counter")
def version_changes_no_number(stage: Stage) -> None:
    """Pacemaker's agent reads with one version and approves with another, and compares numbers."""
    numbers = {version: stage.document(version).number for version in VERSIONS}
    if len(set(numbers.values())) > 1:  # something may have happened meanwhile
        numbers = {version: stage.document(version).number for version in VERSIONS}
    holds(len(set(numbers.values())) == 1, "one DocumentIncarnation in all versions", numbers)


@check(MUST, "PROTOCOL 1.3")
def version_missing_is_400(stage: Stage) -> None:
    """A client that forgot it must learn so, not get a version by chance."""
    status(stage.get(version=None), 400)


@check(MUST, "PROTOCOL 1.3")
def version_empty_is_400(stage: Stage) -> None:
    """An unset variable in a script gives an empty value, which is no version."""
    status(stage.get(version=""), 400)


@check(MUST, "PROTOCOL 1.3")
def version_unknown_is_400(stage: Stage) -> None:
    """What was never published has no meaning that a client could rely on."""
    for version in ("2016-01-01", "2017-3-1", "1", "preview"):
        status(stage.get(version=version), 400)


@check(MUST, "PROTOCOL 1.1: {latest} is unsupported since 2017")
def version_latest_is_400(stage: Stage) -> None:
    """A client that takes whatever is newest breaks on the day something is newer."""
    for version in ("latest", "{latest}"):
        status(stage.get(version=version), 400)


@check(SHOULD, "PROTOCOL 1.3: strict by default")
def version_of_instance_only_is_400(stage: Stage) -> None:
    """The instance tree has versions of its own: 2021-12-13 is none of the document's."""
    status(stage.get(version="2021-12-13"), 400)


@check(SHOULD, "PROTOCOL 1.3: text of the 400 (IMDS)")
def version_missing_is_told_in_the_documented_words(stage: Stage) -> None:
    """People search for this sentence, and it says where to read on."""
    said = stage.get(version=None).object()
    same("the error", said["error"], BAD_VERSION)


@check(SHOULD, "PROTOCOL 1.3: newest-versions (MSAL, OHAI)")
def version_missing_names_the_newest(stage: Stage) -> None:
    """MSAL and Ohai call without a version on purpose, to read the newest ones from the refusal."""
    for version in (None, "2016-01-01"):
        newest_three(stage.get(version=version).object()["newest-versions"], "newest-versions")


@check(SHOULD, "PROTOCOL 1.3: the three newest of Scheduled Events")
def version_named_as_newest_is_served(stage: Stage) -> None:
    """Whoever reads the list calls again with its first entry."""
    named = newest_three(stage.get(version=None).object()["newest-versions"], "newest-versions")
    for version in named:
        stage.document(version)


@check(MUST, "PROTOCOL 1.3: duplicate query parameters are rejected (IMDS)")
def query_name_twice_is_refused(stage: Stage) -> None:
    """Of two values nobody knows which is meant, and two servers may take different ones."""
    for second in (NEWEST, VERSIONS[1]):
        answer = stage.get(query=f"api-version={second}")
        holds(400 <= answer.status < 500, "a refusal (4xx)", answer)


@check(SHOULD, "PROTOCOL 1.3: 400")
def query_name_twice_is_400(stage: Stage) -> None:
    """It is a mistake in the request, told like the other mistakes."""
    status(stage.get(query=f"api-version={NEWEST}"), 400)


@check(SHOULD, "PROTOCOL 3: the document has no format=text")
def query_format_changes_nothing(stage: Stage) -> None:
    """A script that asks everything with format=text still gets the document as JSON."""
    Document.of(stage.get(query="format=text"))
