"""Errors between a guest and its endpoint. A watch reports each of them and continues.

Error                           (forewarn.errors)
└── EndpointError
    ├── ConnectionFailed        cannot connect, connection lost, or timeout
    ├── InvalidResponse         not HTTP, cut off, too large, or of an unexpected kind
    │   ├── InvalidDocument     complete, but not a document we understand; it changes nothing
    │   └── RedirectRefused     the protocol has no redirects, and the target is not our endpoint
    └── HttpError               an error status, with the endpoint's own message
        └── RetryableError      404, 408, 410, 429, 5xx: expected to pass
"""

from forewarn.errors import Error


class EndpointError(Error, code="endpoint_problem"):
    """A request to the endpoint failed."""


class ConnectionFailed(EndpointError, code="no_answer"):
    """Cannot connect, connection lost, or timeout."""


class InvalidResponse(EndpointError, code="bad_answer"):
    """Not HTTP, cut off, too large, or of an unexpected kind."""


class InvalidDocument(InvalidResponse, code="bad_document"):
    """Complete, but not a document we understand."""


class RedirectRefused(InvalidResponse, code="redirected"):
    """The protocol has no redirects, and the target is not our endpoint."""


class HttpError(EndpointError, code="declined"):
    """`retry_after_seconds` is None if the endpoint sent no valid Retry-After."""

    def __init__(
        self, message: str, *, status: int, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, status=status, retry_after_seconds=retry_after_seconds)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class RetryableError(HttpError, code="try_later"):
    """Expected to pass."""


def brief(value: object) -> str:
    """A value for an error message: enough to recognise it, never all of it."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."
