"""A VM's request, read once into a value, and the rules about its parts. Pure, and shared by the
quick and the careful way.

Nothing here looks at the board: who is calling is in `callers.py`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from forewarn.errors import Invalid
from forewarn.web.settings import Settings
from forewarn.wire import versions
from forewarn.wire.versions import BY_NAME, INSTANCE_VERSIONS, Version

EVENTS = "/metadata/scheduledevents"
EVENTS_LEGACY = "/metadata/latest/scheduledevents"
INSTANCE = "/metadata/instance"
VERSIONS = "/metadata/versions"
LEGACY_VERSION = versions.VERSIONS[0]

PARAMETERS_MAX = 100
_AS = "/as/"
_WAIT = re.compile(r'\s*wait\s*=\s*(?:"([0-9]{1,9})"|([0-9]{1,9}))\s*(?:;.*)?', re.IGNORECASE)


class BadVersion(Invalid):
    """No api-version, or none that we know.

    The body is not the usual one: clients call like this on purpose, to read it.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__("api-version is invalid or was not specified")
        self.body = body


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, and from which address. Header names are in lower case; the values of a
    repeated one are joined.

    `vm` is the VM that the path names, where paths may do so; `path` is what follows.
    """

    method: str
    vm: str
    path: str
    query: bytes
    headers: Mapping[bytes, bytes]
    address: str

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


def join(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    joined: dict[bytes, bytes] = {}
    repeated: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in joined:
            repeated.setdefault(name, [joined[name]]).append(value)
        else:
            joined[name] = value
    joined.update((name, b", ".join(values)) for name, values in repeated.items())
    return joined


def split(path: str) -> tuple[str, str]:
    """The VM that a path names (`/as/{vm}/…`) and the path without it; no name if it names none."""
    if path[: len(_AS)].lower() != _AS:
        return "", path
    name, slash, rest = path[len(_AS) :].partition("/")
    return name, slash + rest


def route(path: str) -> str:
    """The path as routes are compared: in any case of letters, with or without a slash at the end."""
    return path.lower().removesuffix("/")


def parameters(query: bytes) -> dict[str, str]:
    """The query, decoded; names in any case of letters.

    A name that stands twice is refused, as the protocol says (1.3).
    """
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=PARAMETERS_MAX
        )
    except ValueError as error:
        raise Invalid(f"Bad request. Expected at most {PARAMETERS_MAX} query parameters") from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name.lower() in found:
            raise Invalid(
                f"Bad request. Query parameter {name!r} stands twice; expected it once",
                parameter=name,
            )
        found[name.lower()] = value
    return found


def events_version(request: Request, settings: Settings) -> Version:
    """The api-version of a Scheduled Events request, whose header rule is kept.

    Only one version waives the header.
    """
    name = parameters(request.query).get("api-version", "")
    version = BY_NAME.get(name) or (
        versions.find_lenient(name) if settings.lenient_versions else None
    )
    if settings.legacy_path and route(request.path) == EVENTS_LEGACY:
        version = LEGACY_VERSION
    if version is None or version.requires_header:
        require_header(request)
    if version is None:
        raise BadVersion(versions.bad_version_body())
    return version


def instance_version(request: Request, asked: Mapping[str, str]) -> str:
    """The api-version of an instance request: another list, and the header is always asked for."""
    require_header(request)
    name = asked.get("api-version", "")
    if name not in INSTANCE_VERSIONS:
        raise BadVersion(versions.bad_instance_version_body())
    return name


def require_header(request: Request) -> None:
    """`Metadata: true` shows that the caller means it: what tricks a program into fetching a URL
    can seldom set a header.
    """
    if request.headers.get(b"metadata", b"").strip().lower() != b"true":
        raise Invalid("Bad request. Required metadata header not specified")


def wait_seconds(request: Request, settings: Settings) -> int:
    """How long the caller prefers to wait for a change (RFC 7240), within our limit.

    What cannot be read is no preference.
    """
    for preference in request.header(b"prefer").split(","):
        found = _WAIT.fullmatch(preference)
        if found:
            return min(int(found[1] or found[2]), int(settings.wait_seconds_max))
    return 0
