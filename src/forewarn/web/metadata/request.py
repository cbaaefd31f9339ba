"""A VM's request, parsed once into a value, and the rules about its parts.

Pure, and shared by the fast path and the application. Who sends it is in `client_identity.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

import msgspec

from forewarn.config import Config
from forewarn.errors import Invalid, NotFound
from forewarn.web.http.message import preferred_seconds
from forewarn.web.http_status import WrongMethod
from forewarn.wire import versions
from forewarn.wire.versions import BY_NAME, INSTANCE_VERSIONS, Version

ROOT = "/metadata"
EVENTS = "/metadata/scheduledevents"
EVENTS_LEGACY = "/metadata/latest/scheduledevents"
INSTANCE = "/metadata/instance"
TOKEN = "/metadata/identity/oauth2/token"  # noqa: S105
VERSIONS = "/metadata/versions"
LEGACY_VERSION = versions.VERSIONS[0]

NO_HEADER = "Required metadata header not specified"
PARAMETERS_MAX = 100
_AS = "/as/"


class BodyError(Invalid):
    """An error with a body of its own: clients send such requests on purpose, to read it."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body.decode())
        self.body = body


@dataclass(frozen=True, slots=True)
class MetadataRequest:
    """Header names are in lower case; the values of a repeated header are joined.

    `vm` is the VM named in the path, where that is allowed; `path` is the rest of it.
    """

    method: str
    vm: str
    path: str
    query: bytes
    headers: Mapping[bytes, bytes]
    address: str

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


def split(path: str) -> tuple[str, str]:
    """The VM named in a path (`/as/{vm}/…`), or "", and the path without it."""
    if path[: len(_AS)].lower() != _AS:
        return "", path
    name, slash, rest = path[len(_AS) :].partition("/")
    return name, slash + rest


def normalize(path: str) -> str:
    """The path as routes are compared: case-insensitive, with or without a trailing slash."""
    return path.lower().removesuffix("/")


def parse_query(query: bytes) -> dict[str, str]:
    """The decoded query, names in lower case; a duplicate name is an error (protocol 1.3)."""
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=PARAMETERS_MAX
        )
    except ValueError as error:
        raise Invalid(f"Bad request. Expected at most {PARAMETERS_MAX} query parameters") from error
    parsed: dict[str, str] = {}
    for name, value in pairs:
        if name.lower() in parsed:
            raise Invalid(f"Bad request. Duplicate query parameter {name!r}")
        parsed[name.lower()] = value
    return parsed


def events_version(request: MetadataRequest, config: Config) -> Version:
    """The api-version of a Scheduled Events request. Only one version waives the header.

    A date that is not served is a 404: clients that try a newer version first rely on that.
    """
    name = parse_query(request.query).get("api-version", "")
    version = BY_NAME.get(name)
    if version is None and config.lenient_versions:
        version = versions.find_lenient(name)
    if config.legacy_path and normalize(request.path) == EVENTS_LEGACY:
        version = LEGACY_VERSION
    if version is None or version.requires_header:
        require_header(request)
    if version is None and versions.is_date(name):
        raise NotFound("Not found. Invalid version requested")
    if version is None:
        raise BodyError(versions.bad_version_body([*BY_NAME]))
    return version


def instance_version(request: MetadataRequest, query: Mapping[str, str]) -> str:
    """The api-version of an instance request: another list, and the header is always required."""
    require_header(request)
    name = query.get("api-version", "")
    if name not in INSTANCE_VERSIONS:
        raise BodyError(versions.bad_version_body(INSTANCE_VERSIONS))
    return name


def require_method(request: MetadataRequest, *methods: str) -> None:
    if request.method not in methods:
        allow = ", ".join(methods)
        raise WrongMethod(
            f"Method not allowed. Got {request.method}, expected {allow}", allow=allow
        )


def require_header(request: MetadataRequest) -> None:
    """`Metadata: true` protects against SSRF: an attacker who controls the URL can rarely set
    headers.
    """
    if not has_header(request):
        raise Invalid(f"Bad request. {NO_HEADER}")


def has_header(request: MetadataRequest) -> bool:
    return request.headers.get(b"metadata", b"").strip().lower() == b"true"


def no_identity(request: MetadataRequest) -> BodyError:
    """No VM has an identity. Azure's libraries stop at this error; they would retry a 404."""
    reason = "Identity not found" if has_header(request) else NO_HEADER
    body = {"error": "invalid_request", "error_description": reason}
    return BodyError(msgspec.json.encode(body))


def wait_seconds(request: MetadataRequest, config: Config) -> int:
    """How long the client wants to wait for a change, within our limit."""
    return min(preferred_seconds(request.header(b"prefer")), int(config.wait_seconds_max))
