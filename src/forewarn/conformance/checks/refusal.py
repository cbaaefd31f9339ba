"""What a refusal looks like."""

from forewarn.conformance.check import Level, check, holds, same
from forewarn.conformance.raw_http import Answer
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import INSTANCE, INSTANCE_VERSION

MUST, SHOULD = Level.MUST, Level.SHOULD


def is_refusal(answer: Answer, status: int) -> None:
    """Of this status, with a body `{"error": "…"}`."""
    holds(answer.status == status, f"status {status}", answer)
    error = answer.object()["error"]
    holds(isinstance(error, str) and error != "", "an error in words", answer)


@check(MUST, "PROTOCOL 3: error body (SWG)")
def refusal_400_has_an_error(stage: Stage) -> None:
    """SDKs made from the specification read the member `error` of every refusal."""
    is_refusal(stage.get(headers={}), 400)
    is_refusal(stage.get(version="2016-01-01"), 400)


@check(MUST, "PROTOCOL 3: error body (SWG)")
def refusal_404_has_an_error(stage: Stage) -> None:
    """SDKs made from the specification read the member `error` of every refusal."""
    is_refusal(
        stage.get(INSTANCE + "/compute/noSuchThing", INSTANCE_VERSION, query="format=text"), 404
    )


@check(SHOULD, "PROTOCOL 10: error bodies")
def refusal_405_has_an_error(stage: Stage) -> None:
    """One form for all refusals is one that a client can read."""
    is_refusal(stage.get(method="PUT"), 405)


@check(SHOULD, "PROTOCOL 10: error bodies")
def refusal_of_a_forwarded_request_has_an_error(stage: Stage) -> None:
    """Whoever put a proxy in between must read why it does not work."""
    is_refusal(stage.get(headers={"Metadata": "true", "X-Forwarded-For": "10.0.0.1"}), 400)


@check(MUST, "PROTOCOL 3: Content-Type")
def refusal_is_application_json(stage: Stage) -> None:
    """aiohttp reads the error only where it is called JSON."""
    for answer in (stage.get(headers={}), stage.get("/metadata/no-such-thing")):
        same(
            "the Content-Type",
            (answer.header("content-type") or "").partition(";")[0].lower(),
            "application/json",
        )


@check(SHOULD, "PROTOCOL 10")
def refusal_changes_nothing(stage: Stage) -> None:
    """A wrong request is nobody's change: the next poll reads what the last one did."""
    before = stage.document()
    stage.get(headers={})
    stage.get(version="2016-01-01")
    after = stage.document()
    holds(
        before.number == after.number or before.events != after.events,
        f"DocumentIncarnation {before.number} again",
        after,
    )
