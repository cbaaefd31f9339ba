"""The client of the control API that the commands use."""

import inspect
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
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
COMPLETION_SECONDS = 1.0
RESPONSE_BYTES_MAX = 256 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
PAGE_MAX = 1000

Path = tuple[str, ...]
Query = Mapping[str, Any] | None
Function = TypeVar("Function", bound=Callable[..., Any])


class ControlClient:
    """Calls the service. An error response is raised as the Error that the service raised.

    `options` has the flag or the argument for each field of a body. A value that the service does
    not accept is then Usage, with that flag.
    """

    def __init__(self, config: ClientConfig, timeout: float = TIMEOUT_SECONDS) -> None:
        with needs_extra("vm", "cli"):
            import httpx  # slow to import, and not every command needs it

        if not (config.token.isascii() and config.token.isprintable()):
            raise Usage(
                "token: contains a character that tokens do not have; "
                "expected the text that `forewarn token create` printed"
            )
        headers = {"Accept": "application/json"}
        if config.token:
            headers["Authorization"] = f"Bearer {config.token}"
        self._url, self.options, self.is_failing = config.control_url, dict[str, str](), False
        self._time: datetime | None = None
        self._time_until = 0.0
        self.is_lab = False  # a command that only a lab has sets it, for its messages
        self._http = httpx.Client(
            headers=headers,
            timeout=timeout,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # the client is never closed
            verify=_ssl_context(config) if self._url.startswith("https:") else False,
        )

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

    def post(self, *path: str, body: Query = None) -> Any:
        given = _without_none(body)
        return self._request("POST", path, body=json.dumps(given).encode() if given else b"")[0]

    def put(self, *path: str, body: bytes, query: Query = None, tag: str = "") -> Any:
        return self._request("PUT", path, query, body, tag)[0]

    def delete(self, *path: str, query: Query = None) -> Any:
        return self._request("DELETE", path, query)[0]

    def lines(self, *path: str, query: Query = None) -> Iterator[bytes]:
        """A streamed response, line by line, until the service ends it or is silent too long."""
        with self._open("GET", path, query) as response:
            if response.status_code != 200:
                self._decode(response)
            rest = b""
            for chunk in response.iter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                if len(rest) > LINE_BYTES_MAX:
                    raise Unavailable(f"{self._url} sent a line of over {LINE_BYTES_MAX} bytes")

    def _request(
        self, method: str, path: Path, query: Query = None, body: bytes = b"", tag: str = ""
    ) -> tuple[Any, str]:
        with self._open(method, path, query, body, tag) as response:
            return self._decode(response), response.headers.get("ETag", "")

    @contextmanager
    def _open(
        self, method: str, path: Path, query: Query = None, body: bytes = b"", tag: str = ""
    ) -> Iterator["httpx.Response"]:
        """Send a request. Whatever fails until the response has been read becomes an Error."""
        import httpx

        headers = {"If-Match": tag} if tag else {}
        if method == "POST" and body:
            headers["Content-Type"] = "application/json"
        url = "/".join([f"{self._url}/api/v1", *(quote(part, safe="") for part in path)])
        params = _without_none(query) or None
        try:
            with self._http.stream(
                method, url, params=params, content=body or None, headers=headers
            ) as response:
                yield response
        except httpx.HTTPError as error:
            reason = str(error).partition("] ")[2] or str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise Unavailable(
                    f"the certificate of {self._url} is not trusted: {reason}; "
                    "FOREWARN_CA names a file with the certificates to verify it with"
                ) from error
            raise Unavailable(
                f"no {'lab' if self.is_lab else 'service'} is reachable at {self._url}: {reason};"
                " set FOREWARN_CONTROL to its URL, or start one with"
                f" `forewarn {'lab serve' if self.is_lab else 'demo'}`"
            ) from error

    def _decode(self, response: "httpx.Response") -> Any:
        text = bytearray()
        for chunk in response.iter_bytes():
            text += chunk
            if len(text) > RESPONSE_BYTES_MAX:
                raise Unavailable(f"{self._url} sent more than {RESPONSE_BYTES_MAX} bytes")
        try:
            payload = json.loads(text)
            if response.is_success:
                return payload
            error_class = ERRORS.get(payload["error"], Error)
            error = error_class(str(payload["message"]), **payload["facts"])
        except (ValueError, TypeError, LookupError) as problem:
            raise Unavailable(
                f"{self._url} is not a Forewarn control API (status {response.status_code})"
            ) from problem
        field = str(error.facts.get("field", ""))
        option = self.options.get(field.partition("[")[0])
        if option and isinstance(error, Invalid):
            message = error.message.removeprefix("body.").removeprefix(f"{field}: ")
            raise Usage(f"{option}: {message}")
        raise explain(self, error)


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
            client = ControlClient(read_client_config(context).config, COMPLETION_SECONDS)
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
    return ControlClient(read_client_config(context, control_url=("--control", url)).config)


def _ssl_context(config: ClientConfig) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise Usage(
            f"ca_file: {config.ca_file} has no readable certificates: {error.strerror or error}"
        ) from error


def _without_none(values: Query) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if value is not None}


ERRORS = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Error)
}
