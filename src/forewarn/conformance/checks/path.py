"""The request line: paths and methods."""

from forewarn.conformance.check import Level, check, holds, same
from forewarn.conformance.document import Document
from forewarn.conformance.raw_http import Answer
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import EVENTS

MUST, SHOULD = Level.MUST, Level.SHOULD


def status(answer: Answer, *wanted: int) -> None:
    holds(answer.status in wanted, "status " + " or ".join(map(str, wanted)), answer)


@check(MUST, "PROTOCOL 3: no redirect")
def path_answers_without_redirect(stage: Stage) -> None:
    """curl and other clients of the documents do not follow redirects."""
    answer = stage.get()
    holds(not 300 <= answer.status < 400, "an answer that is no redirect", answer)


@check(MUST, "PROTOCOL 3: no auth")
def path_answers_without_login(stage: Stage) -> None:
    """No client sends credentials: who is calling is known by where the call comes from."""
    answer = stage.get()
    holds(answer.status not in (401, 407), "an answer that asks for no login", answer)


@check(SHOULD, "PROTOCOL 3: path case (DISC)")
def path_in_any_case(stage: Stage) -> None:
    """Microsoft's C# sample asks for /metadata/scheduledEvents."""
    Document.of(stage.get("/metadata/scheduledEvents"))
    Document.of(stage.get("/Metadata/ScheduledEvents"))


@check(SHOULD, "PROTOCOL 3: trailing slash")
def path_with_slash_at_the_end(stage: Stage) -> None:
    """Clients that join base URLs and paths often leave a slash at the end."""
    Document.of(stage.get(EVENTS + "/"))


@check(MUST, "PROTOCOL 5: 404")
def path_unknown_is_404(stage: Stage) -> None:
    """A client that looks for a path learns from 404 that it is not there; cloud-init tries again
    on that.
    """
    status(stage.get("/metadata/no-such-thing"), 404)


@check(SHOULD, "PROTOCOL 5: 404")
def path_below_the_document_is_404(stage: Stage) -> None:
    """The document has no parts to walk into, so nothing is found below it."""
    status(stage.get(EVENTS + "/no-such-part"), 404)


@check(MUST, "PROTOCOL 5: 405")
def method_put_is_405(stage: Stage) -> None:
    """Only GET and POST are documented; anything else is a mistake that must show."""
    status(stage.get(method="PUT"), 405)


@check(MUST, "PROTOCOL 5: 405")
def method_delete_is_405(stage: Stage) -> None:
    """There is no call that takes an event back, and a client must not believe that there is."""
    status(stage.get(method="DELETE"), 405)


@check(SHOULD, "PROTOCOL 10: 405 with Allow")
def method_refused_names_those_allowed(stage: Stage) -> None:
    """HTTP promises the allowed methods with every 405."""
    answer = stage.get(method="PUT")
    allowed = {name.strip() for name in (answer.header("allow") or "").split(",")}
    holds({"GET", "POST"} <= allowed, "an Allow header with GET and POST", answer.header("allow"))


@check(SHOULD, "RFC 9110 9.3.2")
def method_head_tells_the_length(stage: Stage) -> None:
    """Health checks send HEAD, and read the connection on as if no body came."""
    with stage.line() as line:
        line.send(stage.request(method="HEAD") + stage.request())
        head, document = line.answer(has_body=False), line.answer()
    same("the status of HEAD to be that of GET,", head.status, document.status)
    same(
        "the Content-Length of HEAD to be that of GET,",
        head.header("content-length"),
        document.header("content-length"),
    )
