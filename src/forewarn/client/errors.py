"""What can go wrong between a guest and its endpoint. A watch tells each of these and goes on.

Problem                     (forewarn.errors)
└── EndpointProblem
    ├── NoAnswer            nobody is there, the connection was lost, or the time is up
    ├── BadAnswer           what came is not HTTP, was cut off, is too large, or is of a wrong kind
    │   ├── BadDocument     it came whole and is no document that we understand: nothing is
    concluded from it
    │   └── Redirected      the protocol knows no redirects, and whoever this one names is a
    stranger
    └── Declined            an error status, with the endpoint's own words
        └── TryLater        404, 408, 410, 429, 5xx: those that pass by themselves
"""

from forewarn.errors import Error


class EndpointError(Error):
    code = "endpoint_problem"


class ConnectionFailed(EndpointError):
    code = "no_answer"


class InvalidResponse(EndpointError):
    code = "bad_answer"


class InvalidDocument(InvalidResponse):
    code = "bad_document"


class RedirectRefused(InvalidResponse):
    code = "redirected"


class HttpError(EndpointError):
    """`retry_after_seconds` is what the endpoint asked for; None if it asked for nothing."""

    code = "declined"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        retry_after_seconds: float | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message, status=status, retry_after_seconds=retry_after_seconds, **facts)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class RetryableError(HttpError):
    code = "try_later"


def brief(value: object) -> str:
    """A value as a message shows it: enough to recognise it, never all of it."""
    shown = repr(value[:80] if isinstance(value, str | bytes) else value)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."
