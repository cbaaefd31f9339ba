"""One HTTP call from a step: bounded, verified, not redirected, and past any proxy unless one is
wanted.
"""

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from forewarn.agent.step import Occasion
from forewarn.agent.steps.spec import Spec
from forewarn.agent.steps.wait import within

TRY_SECONDS = 10.0
LEAST_SECONDS = 0.01  # to a socket, 0 means something else
AGAIN = (408, 429, 500, 502, 503, 504)


class NoAnswer(Exception):
    """Nobody is there, the time for one try is over, or what came is no HTTP.

    It may be another way in a moment.
    """

    def __init__(self, reason: str, *, is_cut_short: bool = False) -> None:
        super().__init__(reason)
        self.is_cut_short = is_cut_short

    def reason(self, before: str) -> str:
        """Why there is no answer.

        A try that the end of the step cut short says less than the one before it.
        """
        return before if before and self.is_cut_short else str(self)


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    ca_file: str = ""
    by_proxy: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def send(call: Call, occasion: Occasion, *, bytes_max: int) -> Answer:
    """One try. Of the body at most `bytes_max` are read."""
    seconds = min(TRY_SECONDS, max(occasion.seconds_left, LEAST_SECONDS))
    try:
        return within(occasion, seconds, lambda: _exchange(call, seconds, bytes_max))
    except urllib.error.URLError as error:
        raise NoAnswer(str(error.reason), is_cut_short=occasion.seconds_left <= 0) from error
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
    ) as error:  # ValueError: a host whose name cannot be one
        raise NoAnswer(
            str(error) or type(error).__name__, is_cut_short=occasion.seconds_left <= 0
        ) from error


def check_url(spec: Spec, name: str, url: str) -> str:
    try:
        split = urlsplit(url)
        is_good = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        is_good = False
    if not is_good or "@" in split.netloc or any(not "!" <= letter <= "~" for letter in url):
        raise spec.refused(name, "a URL with http:// or https:// and without a password")
    return url


def _exchange(call: Call, seconds: float, bytes_max: int) -> Answer:
    proxies = urllib.request.ProxyHandler(None if call.by_proxy else {})
    tls = (
        [urllib.request.HTTPSHandler(context=_trusting(call.ca_file))]
        if call.url.startswith("https:")
        else []
    )
    opener = urllib.request.build_opener(proxies, _NoRedirect, *tls)
    headers = {"User-Agent": "forewarn-agent", **call.headers}
    request = urllib.request.Request(call.url, call.body, headers, method=call.method)
    try:
        with opener.open(request, timeout=seconds) as answer:
            return Answer(answer.status, dict(answer.headers.items()), answer.read(bytes_max))
    except urllib.error.HTTPError as answer:
        with answer:
            return Answer(answer.code, dict(answer.headers.items()), answer.read(bytes_max))


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise NoAnswer(
            f"the authorities in {ca_file} cannot be read: {error.strerror or error}"
        ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without its body, and whoever it goes to was not named in the
    settings.
    """

    def redirect_request(self, *_: object) -> None:
        return None
