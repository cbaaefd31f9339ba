"""The client of the control API that the commands use."""

import inspect
import json
import ssl
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote

import typer

from forewarn import errors
from forewarn.cli.exit_codes import Usage, needs_extra
from forewarn.cli.lookup import explain
from forewarn.cli.options import ClientConfig, Json, read_client_config
from forewarn.cli.output import SERVICE_TIME, shorten, show_json
from forewarn.errors import Error, Invalid, Unavailable

if TYPE_CHECKING:
    import httpx

TIMEOUT_SECONDS = 60
CONNECT_SECONDS = 5.0
"""Where there is another server to try."""
NEXT_SECONDS = 10.0
"""How long a server may be silent if there is another one to try."""
STREAM_FACTOR = 3
"""For a stream, NEXT_SECONDS times this: twice the time between its heartbeats."""
COMPLETION_SECONDS = 1.0
RESPONSE_BYTES_MAX = 256 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
PAGE_MAX = 1000

Path = tuple[str, ...]
Query = Mapping[str, Any] | None
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class NoAnswer(Exception):
    """A server did not carry out a request, or may have done so without a response.

    `error` is what the command reports if no other server responds. `is_unsent`: the server cannot
    have seen the request. `stale_url` is that of a server with a response that may be old.
    """

    def __init__(self, error: Error, *, is_unsent: bool, stale_url: str = "") -> None:
        super().__init__(error.message)
        self.error, self.is_unsent, self.stale_url = error, is_unsent, stale_url


def print_warning(message: str) -> None:
    print(f"forewarn: {message}", file=sys.stderr)


class ControlClient:
    """Calls the service. An error response is raised as the Error that the service raised.

    If a server does not respond, or responds with a status of 500 or more, the next URL is used,
    and stays in use. A request that the server may have carried out is repeated only if that is
    harmless: a GET, or a POST with an Idempotency-Key, which every server of the service honors.

    What a server reads while it is cut off from its store has an Age. It is used only if no other
    server has a response without one, and then the user is warned.

    `options` has the flag or the argument for each field of a body. A value that the service does
    not accept is then Usage, with that flag.
    """

    def __init__(
        self,
        config: ClientConfig,
        timeout: float = TIMEOUT_SECONDS,
        next_seconds: float = NEXT_SECONDS,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        with needs_extra("vm", "cli"):
            import httpx  # slow to import, and not every command needs it

        if not (config.token.isascii() and config.token.isprintable()):
            raise Usage(
                "token: contains a character that tokens do not have; "
                "expected the text that `forewarn token create` printed"
            )
        for url in config.control_url:
            check_host(url)
        headers = {"Accept": "application/json"}
        if config.token:
            headers["Authorization"] = f"Bearer {config.token}"
        self._urls = deque(config.control_url)  # the first one is in use
        self.options, self.is_failing, self._is_warned = dict[str, str](), False, False
        self._warn = warn
        self._time: datetime | None = None
        self._time_until = 0.0
        self.is_lab = False  # a command that only a lab has sets it, for its messages
        self._timeout, self._next_seconds = timeout, min(timeout, next_seconds)
        self._http = httpx.Client(
            headers=headers,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # the client is never closed
            verify=_ssl_context(config) if "https:" in str(config.control_url) else False,
        )

    @property
    def _has_others(self) -> bool:
        return len(self._urls) > 1

    def now(self) -> datetime:
        """The time of the service, which in a lab is not the real time. Read once a second."""
        if self._time is None or time.monotonic() > self._time_until:
            self._time = datetime.fromisoformat(self.get("session")["now"])
            self._time_until = time.monotonic() + 1
        return self._time

    def get(self, *path: str, query: Query = None) -> Any:
        return self._request("GET", path, query)[0]

    def get_tagged(self, *path: str) -> tuple[Any, str]:
        """A resource and its ETag, which a later `put` can require."""
        return self._request("GET", path)

    def list(self, kind: str, limit: int, query: Query = None) -> Any:
        """Up to `limit` items as one response. A page may be empty when filters match little."""
        items: list[Any] = []
        paging: dict[str, Any] = {"limit": min(limit, PAGE_MAX)}
        while True:  # ends: every page begins after the one before
            page = self.get(kind, query={**(query or {}), **paging})
            items += page[kind]
            if not page["next"] or len(items) >= limit:
                return {**page, kind: items}
            paging = {"limit": min(limit - len(items), PAGE_MAX), "cursor": page["next"]}

    def post(self, *path: str, body: Query = None, may_repeat: bool = True) -> Any:
        """Set `may_repeat` to False where the service ignores an Idempotency-Key."""
        given = _without_none(body)
        headers = {"Content-Type": "application/json"} if given else {}
        if may_repeat and self._has_others:
            headers["Idempotency-Key"] = str(uuid.uuid4())
        content = json.dumps(given).encode() if given else b""
        return self._request("POST", path, body=content, headers=headers)[0]

    def put(self, *path: str, body: bytes, query: Query = None, tag: str = "") -> Any:
        return self._request("PUT", path, query, body, {"If-Match": tag} if tag else {})[0]

    def delete(self, *path: str, query: Query = None) -> Any:
        return self._request("DELETE", path, query)[0]

    def lines(self, *path: str, query: Query = None) -> Iterator[bytes]:
        """A streamed response, line by line, until the service ends it or is silent too long."""
        try:
            with ExitStack() as stack:
                response = self._try_each(
                    lambda others: stack.enter_context(
                        self._open("GET", path, query, others=others, factor=STREAM_FACTOR)
                    ),
                    may_repeat=True,
                )
                if response.status_code != 200:
                    self._decode(response)
                yield from self._split(response)
        except NoAnswer as problem:  # in the middle of the stream
            self.use_next_server()
            raise problem.error from problem

    def use_next_server(self) -> None:
        """Where a stream has ended, or has no message. Other requests do this by themselves."""
        self._urls.rotate(-1)

    def _split(self, response: "httpx.Response") -> Iterator[bytes]:
        rest = b""
        for chunk in response.iter_bytes():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > LINE_BYTES_MAX:
                raise Unavailable(f"{self._urls[0]} sent a line of over {LINE_BYTES_MAX} bytes")

    def _request(
        self,
        method: str,
        path: Path,
        query: Query = None,
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> tuple[Any, str]:
        def attempt(others: int) -> tuple[Any, str]:
            with self._open(method, path, query, body, headers, others=others) as response:
                return self._decode(response), response.headers.get("ETag", "")

        may_repeat = method == "GET" or "Idempotency-Key" in headers
        return self._try_each(attempt, may_repeat=may_repeat)

    def _try_each(self, attempt: Callable[[int], Result], *, may_repeat: bool) -> Result:
        """The result of the first server that responds, beginning with the one in use.

        `attempt` is told how many others there are to try after it. If no server responds, the
        error is that of the first one that may have seen the request.
        """
        problems: list[NoAnswer] = []
        for others in reversed(range(len(self._urls))):
            try:
                return attempt(others if may_repeat else 0)
            except NoAnswer as problem:
                problems.append(problem)
                if not (problem.is_unsent or may_repeat):
                    break
                self._urls.rotate(-1)
        if stale_url := next((each.stale_url for each in problems if each.stale_url), ""):
            self._urls.rotate(-self._urls.index(stale_url))
            with suppress(NoAnswer):
                return attempt(0)
        first = next((each for each in problems if not each.is_unsent), problems[-1])
        raise first.error from first

    @contextmanager
    def _open(
        self,
        method: str,
        path: Path,
        query: Query = None,
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        others: int,
        factor: int = 1,
    ) -> Iterator["httpx.Response"]:
        """Send a request to the server in use. Whatever fails until the response has been read,
        a status of 500 or more, and, if there are others to try, an Age become NoAnswer.
        """
        import httpx

        check_text(path, query)
        url = "/".join([f"{self._urls[0]}/api/v1", *(quote(part, safe="") for part in path)])
        timeout = httpx.Timeout(
            self._timeout,
            connect=min(self._timeout, CONNECT_SECONDS) if self._has_others else self._timeout,
            read=min(self._timeout, self._next_seconds * factor) if others else self._timeout,
        )
        params, has_begun = _without_none(query) or None, False
        try:
            with self._http.stream(
                method,
                url,
                params=params,
                content=body or None,
                headers=dict(headers),
                timeout=timeout,
            ) as response:
                has_begun = True
                if response.status_code >= 500:
                    self._raise_server_error(response)
                if method == "GET":
                    self._check_age(response.headers.get("Age", ""), others)
                yield response
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise NoAnswer(self._describe_unreachable(error), is_unsent=True) from error
            url, reason = self._urls[0], str(error) or type(error).__name__
            message = f"{url} did not respond: {reason}"
            if has_begun:
                message = f"the connection to {url} was lost: {reason}"
            if method != "GET":
                message += "; the request may have been carried out"
            raise NoAnswer(Unavailable(message), is_unsent=False) from error
        except httpx.InvalidURL as error:
            raise Usage(f"cannot request a URL of {len(url)} characters: {error}") from error

    def _check_age(self, age: str, others: int) -> None:
        url = self._urls[0]
        message = (
            f"{url} has had no contact with its store for up to {age}s; what it shows may be old"
        )
        if age and others:
            raise NoAnswer(Unavailable(message), is_unsent=False, stale_url=url)
        if age and not self._is_warned:
            self._warn(message)
        self._is_warned = bool(age)

    def _raise_server_error(self, response: "httpx.Response") -> NoReturn:
        try:
            self._decode(response)
        except Error as error:
            raise NoAnswer(error, is_unsent=False) from error
        raise AssertionError("a status of 500 or more is an error")

    def _describe_unreachable(self, error: "httpx.HTTPError") -> Unavailable:
        """`brief` is the message for a command that tries again, without advice."""
        reason = str(error).partition("] ")[2] or str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return Unavailable(
                f"the certificate of {self._urls[0]} is not trusted: {reason}; "
                "FOREWARN_CA names a file with the certificates to verify it with"
            )
        what, command = ("lab", "lab serve") if self.is_lab else ("service", "demo")
        brief = f"no {what} is reachable at {' or '.join(sorted(self._urls))}: {reason}"
        advice = f"set FOREWARN_CONTROL to its URL, or start one with `forewarn {command}`"
        return Unavailable(f"{brief}; {advice}", brief=brief)

    def _decode(self, response: "httpx.Response") -> Any:
        text = bytearray()
        for chunk in response.iter_bytes():
            text += chunk
            if len(text) > RESPONSE_BYTES_MAX:
                raise Unavailable(f"{self._urls[0]} sent more than {RESPONSE_BYTES_MAX} bytes")
        try:
            payload = json.loads(text)
            if response.is_success:
                return payload
            error_class = ERRORS.get(payload["error"], Error)
            if error_class is Error and is_temporary(response.status_code):
                error_class = Unavailable
            error = error_class(self._name_flags(str(payload["message"])), **payload["facts"])
        except (ValueError, TypeError, LookupError) as problem:
            raise Unavailable(
                f"{self._urls[0]} is not a Forewarn control API (status {response.status_code})"
            ) from problem
        field = str(error.facts.get("field", ""))
        option = self.options.get(field.partition("[")[0])
        if option and isinstance(error, Invalid):
            message = error.message.removeprefix("body.").removeprefix(f"{field}: ")
            raise Usage(f"{option}: {message}")
        raise explain(self, error)

    def _name_flags(self, message: str) -> str:
        """A parameter that the service names, such as `fail_impacts`, as the flag to type."""
        for field, flag in self.options.items():
            message = message.replace(f"`{field}`", flag)
        return message


def api_command(
    app: typer.Typer, show: Callable[[Any], None], *, name: str = "", help_: str = ""
) -> Callable[[Function], Function]:
    """Register a function as a command: it gets a client and returns the response.

    The command prints the response with `show`, or with --json as JSON.
    """

    def register(function: Function) -> Function:
        _, *own = inspect.signature(function).parameters.values()

        def run(context: typer.Context, **given: Any) -> None:
            as_json = given.pop("as_json")
            response = function(connect(context), **given)
            (show_json if as_json else show)(response)

        first, _ = inspect.signature(run).parameters.values()
        flag = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
        )
        run.__signature__ = inspect.Signature([first, *own, flag])  # type: ignore[attr-defined]
        app.command(name or function.__name__, help=help_ or function.__doc__)(run)
        return function

    return register


def connect(context: typer.Context) -> ControlClient:
    """A client of the service that the flags, the variables or the config file name."""
    client = ControlClient(read_client_config(context).config)
    client.is_lab = "lab" in context.command_path.split()
    for typed in (each.opts[0] for each in context.command.params):
        field = typed.strip("-").replace("-", "_")
        client.options[field] = typed if typed.startswith("-") else typed.upper()
    SERVICE_TIME.set(client.now)
    return client


def complete_names(kind: str) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Shell completion of names or ids that the service knows. Typer selects what fits."""

    def find(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        try:
            config = read_client_config(context).config
            seconds = COMPLETION_SECONDS / len(config.control_url)
            client = ControlClient(config, seconds, warn=lambda message: None)
            return [_describe(item) for item in client.list(kind, PAGE_MAX)[kind]]
        except Error:
            return []

    return find


def _describe(item: Mapping[str, Any]) -> tuple[str, str]:
    """What is typed, and a word about it for shells that show one."""
    if "type" in item:  # an event or a campaign
        return shorten(item["id"]), item.get("name") or f"{item['type']} in {item.get('scope')}"
    return item["name"], item.get("scope", "")


def connect_to(context: typer.Context, url: str) -> ControlClient:
    """The same for a service at another URL."""
    return ControlClient(read_client_config(context, control_url=("--control", [url])).config)


def _ssl_context(config: ClientConfig) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise Usage(
            f"ca_file: {config.ca_file} has no readable certificates: {error.strerror or error}"
        ) from error


def check_host(url: str) -> None:
    """Refuse what can be no host's name, before httpx or the resolver fails on it."""
    import httpx

    try:
        httpx.URL(url).host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise Usage(
            f"control_url: the host in {url[:80]!r} is not a valid name: {error}; "
            "expected http://HOST:PORT"
        ) from error


def check_text(path: Path, query: Query) -> None:
    """Refuse names that cannot be sent, or would change the path: it would be that of a list."""
    for text in (*path, *(value for value in (query or {}).values() if isinstance(value, str))):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Usage(f"expected a name in UTF-8, got {text[:80]!r}") from error
    for part in path[1:]:
        if part in ("", ".", ".."):
            noun = path[0].removesuffix("s").replace("vm", "VM")
            raise Usage(f"expected the name of a {noun}, got {part!r}")


def is_temporary(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in (408, 429) or status >= 500


def _without_none(values: Query) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if value is not None}


ERRORS = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Error)
}
