"""The header rule: who must say `Metadata: true`, and who may not call at all."""

from forewarn.conformance.check import Level, Need, check, check_each, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.document import Document
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import (
    INSTANCE,
    INSTANCE_VERSION,
    NO_HEADER,
    OLDEST,
    VERSIONS,
    VERSIONS_PATH,
)

MUST, SHOULD = Level.MUST, Level.SHOULD
FORWARDED = {"Metadata": "true", "X-Forwarded-For": "10.0.0.1"}


@check_each(VERSIONS[1:], MUST, "PROTOCOL 3: Metadata header, from 2017-08-01 on")
def header_required_in(stage: Stage, version: str) -> None:
    """The header shows that the caller means it: what tricks a program into fetching a URL can
    seldom set one.
    """
    status(stage.get(version=version, headers={}), 400)


@check(SHOULD, "PROTOCOL 3 and 10: 2017-03-01 does not enforce it")
def header_not_required_in_2017_03_01(stage: Stage) -> None:
    """Clients of the preview do not send it."""
    Document.of(stage.get(version=OLDEST, headers={}))


@check(MUST, "PROTOCOL 3: header name")
def header_name_in_any_case(stage: Stage) -> None:
    """Microsoft's Python sample sends it as metadata, and HTTP libraries rewrite names as they
    like.
    """
    for name in ("metadata", "METADATA"):
        Document.of(stage.get(headers={name: "true"}))


@check(MUST, "PROTOCOL 3: header value (IMDS prints Metadata:True)")
def header_value_in_any_case(stage: Stage) -> None:
    """PowerShell users send True, as an example of the documents does."""
    for value in ("True", "TRUE"):
        Document.of(stage.get(headers={"Metadata": value}))


@check(SHOULD, "PROTOCOL 3: other values")
def header_value_false_is_400(stage: Stage) -> None:
    """Whoever says false does not mean the metadata service."""
    status(stage.get(headers={"Metadata": "false"}), 400)


@check(MUST, "PROTOCOL 3: body for a missing header (IMDS)")
def header_missing_is_told_in_the_documented_words(stage: Stage) -> None:
    """People search for this very sentence, and it stands in the FAQ."""
    same("the body", stage.get(headers={}).json(), NO_HEADER)


@check(MUST, "PROTOCOL 8.1, IMDS")
def header_required_by_instance(stage: Stage) -> None:
    """The instance tree tells more about a VM than the document does, so the rule holds there too."""
    status(stage.get(INSTANCE, INSTANCE_VERSION, headers={}), 400)


@check(SHOULD, "PROTOCOL 8.1: by the general rule")
def header_required_by_versions(stage: Stage) -> None:
    """One rule for all paths is one that nobody has to look up."""
    status(stage.get(VERSIONS_PATH, None, headers={}), 400)


@check(MUST, "PROTOCOL 3: X-Forwarded-For is rejected")
def header_forwarded_is_refused(stage: Stage) -> None:
    """A request that was passed on came from nobody knows where: an open proxy must not reach the
    endpoint.
    """
    answer = stage.get(headers=FORWARDED)
    holds(400 <= answer.status < 500, "a refusal (4xx)", answer)


@check(SHOULD, "PROTOCOL 10: X-Forwarded-For gives 400")
def header_forwarded_is_400(stage: Stage) -> None:
    """It is a mistake in the request, told like the other mistakes."""
    status(stage.get(headers=FORWARDED), 400)


@check(MUST, "PROTOCOL 3: X-Forwarded-For is rejected")
def header_forwarded_is_refused_by_instance(stage: Stage) -> None:
    """What a VM may read of itself is no more for strangers than its events are."""
    answer = stage.get(INSTANCE, INSTANCE_VERSION, FORWARDED)
    holds(400 <= answer.status < 500, "a refusal (4xx)", answer)


@check(MUST, "PROTOCOL 3: Accept is ignored")
def header_accept_changes_nothing(stage: Stage) -> None:
    """Browsers and PowerShell accept HTML first, and still want the document."""
    for accept in ("text/html", "application/xml;q=1", "*/*"):
        Document.of(stage.get(headers={"Metadata": "true", "Accept": accept}))


@check(MUST, "PROTOCOL 3: User-Agent has no rule")
def header_user_agent_changes_nothing(stage: Stage) -> None:
    """Pacemaker's agent sends a name of its own, a shell script sends none."""
    for agent in ({}, {"User-Agent": "Pacemaker-ResourceAgent/4.10 SLES"}):
        Document.of(stage.get(headers={"Metadata": "true", **agent}))


@check(MUST, "PROTOCOL 7: clients call by any name")
def header_host_changes_nothing(stage: Stage) -> None:
    """Unmodified clients say Host: 169.254.169.254, wherever a DNAT rule takes them."""
    for host in ("169.254.169.254", "localhost"):
        Document.of(stage.get(headers={"Metadata": "true", "Host": host}))


@check(MUST, "PROTOCOL 3: required on POST", Need.APPROVE)
def header_required_to_approve(stage: Stage) -> None:
    """A page in a browser on the VM can send a POST, but not with this header."""
    status(stage.post(b'{"StartRequests":[]}', headers={}), 400)
    same("the body", stage.post(b'{"StartRequests":[]}', headers={}).json(), NO_HEADER)
