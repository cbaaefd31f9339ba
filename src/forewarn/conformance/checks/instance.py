"""The other paths that clients of Scheduled Events call: the instance tree and its versions."""

from collections.abc import Iterator
from typing import Any

from forewarn.conformance.check import MUST, SHOULD, NotRun, check, expect, expect_equal, rule
from forewarn.conformance.checks.request import UNKNOWN_ELEMENT
from forewarn.conformance.checks.version import DATE, newest_versions
from forewarn.conformance.expectation import gives, media_type, sends, status
from forewarn.conformance.raw_http import TREE, VERSION_LIST, JsonObject, instance_text, is_list_of
from forewarn.conformance.session import Session
from forewarn.conformance.spec import COMPUTE_ALWAYS, COMPUTE_LATER, INSTANCE_VERSION_OLD, JSON

NAME_AS_TEXT = instance_text("/compute/name")
NAME = NAME_AS_TEXT._replace(query="")
WITHOUT_VERSION = TREE._replace(version=None)
TOKEN = TREE._replace(path="/metadata/identity/oauth2/token", version="2018-02-01")
NO_IDENTITY = {"error": "invalid_request", "error_description": "Identity not found"}


def _tree(session: Session, version: str | None = TREE.version) -> JsonObject:
    return session.send(TREE._replace(version=version), status(200)).object()


def _versions(session: Session) -> list[str]:
    versions = session.send(VERSION_LIST, status(200)).object()["apiVersions"]
    expect(is_list_of(str, versions), "apiVersions to be a list of strings", versions)
    return list(versions)


def _walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every node with its path."""
    yield path, node
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _walk(child, f"{path}/{name}")


@rule(SHOULD, "PROTOCOL 11", sends(newest_versions, WITHOUT_VERSION._replace(path="/metadata")))
def root_names_the_newest_versions() -> None:
    """A probe for the metadata service learns from the error which versions there are."""


@check(MUST, "PROTOCOL 11: 400 without an identity")
def identity_not_found_is_400(session: Session) -> None:
    """azure-identity stops at this error at once, and retries a 404 for about 20 seconds."""
    response = session.send(TOKEN)
    if response.status == 200:
        raise NotRun("the VM has an identity")
    status(400)(response)
    expect_equal("the body", response.json(), NO_IDENTITY)


@check(MUST, "PROTOCOL 8.1: /metadata/versions")
def versions_are_listed(session: Session) -> None:
    """Clients call this first, without an api-version, to learn which versions there are."""
    versions = _versions(session)
    expect(versions and all(map(DATE.fullmatch, versions)), "a list of dates", versions)


@check(MUST, "PROTOCOL 8.1: ascending")
def versions_are_ascending(session: Session) -> None:
    """Clients take the last one as the newest."""
    versions = _versions(session)
    expect(versions == sorted(set(versions)), "each version once, oldest first", versions)


@check(MUST, "PROTOCOL 8.1")
def versions_listed_are_served(session: Session) -> None:
    """A version in the list must work."""
    for version in _versions(session):
        session.send(TREE._replace(version=version), status(200))


@check(MUST, "PROTOCOL 8.1")
def instance_is_a_tree_of_compute_and_network(session: Session) -> None:
    """Pacemaker's agent, WDO, giantswarm and others read their own name and address from it."""
    tree = _tree(session)
    interfaces = tree["network"]["interface"]
    is_tree = isinstance(tree["compute"], JsonObject) and isinstance(interfaces, list)
    expect(is_tree, "compute, and network with a list of interfaces", tree)


@rule(MUST, "PROTOCOL 3: Content-Type", sends(media_type(JSON), TREE))
def instance_is_application_json() -> None:
    """aiohttp and PowerShell parse JSON only with this Content-Type."""


@check(MUST, "PROTOCOL 8.1: all primitives are strings")
def instance_values_are_strings(session: Session) -> None:
    """Typed clients decode strings, also for numbers, and an empty one for an unknown value."""
    nodes = _walk(_tree(session))
    wrong = [path for path, value in nodes if not isinstance(value, str | dict | list)]
    expect(not wrong, "values that are all strings", wrong)


@check(MUST, "PROTOCOL 8.1: alphabetical (SWG)")
def instance_members_are_in_alphabetical_order(session: Session) -> None:
    """All examples of the specification are, and people compare by eye."""
    objects = [(path, node) for path, node in _walk(_tree(session)) if isinstance(node, dict)]
    wrong = [path or "/" for path, node in objects if list(node) != sorted(node, key=str.lower)]
    expect(not wrong, "members in alphabetical order", f"another order at {', '.join(wrong)}")


@check(MUST, "PROTOCOL 8.1: members of compute")
def instance_compute_has_the_oldest_members(session: Session) -> None:
    """These are as old as the instance tree itself."""
    compute = _tree(session)["compute"]
    expect(set(compute) >= COMPUTE_ALWAYS, ", ".join(sorted(COMPUTE_ALWAYS)), list(compute))


@check(MUST, "PROTOCOL 8.1: first versions")
def instance_compute_has_no_newer_members(session: Session) -> None:
    """A strict client of 2017 rejects members of 2021."""
    newer = COMPUTE_LATER.intersection(_tree(session, INSTANCE_VERSION_OLD)["compute"])
    expect(not newer, f"no newer members in {INSTANCE_VERSION_OLD}", sorted(newer))


@check(MUST, "PROTOCOL 8.1: plan and publicKeys")
def instance_compute_has_plan_and_public_keys(session: Session) -> None:
    """insights-core reads the plan, and cloud-init the keys, of every VM."""
    compute = _tree(session)["compute"]
    expect(set(compute["plan"]) == {"name", "product", "publisher"}, "a plan", compute["plan"])
    expect(is_list_of(JsonObject, compute["publicKeys"]), "a list of keys", compute["publicKeys"])


@check(MUST, "PROTOCOL 8.1: format=text, no newline (DRAIN)")
def instance_leaf_as_text_is_bare(session: Session) -> None:
    """drainsafe compares the raw bytes with Resources: a newline or a quote breaks it."""
    name = str(_tree(session)["compute"]["name"]).encode()
    expect_equal("the name as text to be", session.send(NAME_AS_TEXT).body, name)


@rule(SHOULD, "PROTOCOL 8.1: text", sends(media_type("text/plain"), NAME_AS_TEXT))
def instance_leaf_as_text_is_text_plain() -> None:
    """PowerShell parses a JSON Content-Type, and a bare name is not JSON."""


@rule(MUST, "PROTOCOL 8.1: a leaf needs format=text", gives(400, NAME))
def instance_leaf_without_format_is_400() -> None:
    """A bare value is not a JSON document; this is documented."""


@check(MUST, "PROTOCOL 8.1: route walking")
def instance_path_can_be_walked(session: Session) -> None:
    """Scripts request only the part that they need."""
    tree = _tree(session)
    parts = {"/compute": tree["compute"], "/network/interface": tree["network"]["interface"]}
    for path, part in parts.items():
        actual = session.send(TREE._replace(path=TREE.path + path)).json()
        expect_equal(f"{path} to be as in the whole tree,", actual, part)


@check(MUST, "PROTOCOL 8.1: route walking by number")
def instance_path_can_be_walked_by_index(session: Session) -> None:
    """The documented example is curl … /network/interface/0/ipv4/ipAddress/0/privateIpAddress."""
    nodes = _walk(_tree(session)["network"], "/network")
    addresses = [(path, value) for path, value in nodes if path.endswith("/privateIpAddress")]
    if not addresses:
        raise NotRun("the VM has no address in the instance tree")
    for path, value in addresses:
        text = session.send(instance_text(path)).body
        expect_equal(f"{path} as text to be", text, str(value).encode())


@check(MUST, "PROTOCOL 8.1: text of a node")
def instance_node_as_text_names_its_children(session: Session) -> None:
    """Shell scripts walk the tree by these names; a slash at the end means that there is more."""
    compute = _tree(session)["compute"]
    wanted = sorted(f"{name}{'' if isinstance(compute[name], str) else '/'}" for name in compute)
    for path, children in (("/compute", wanted), ("", ["compute/", "network/"])):
        names = sorted(session.send(instance_text(path)).body.decode().split())
        expect_equal(f"the children of {path or '/'} to be", names, children)


@rule(MUST, "PROTOCOL 5: 404", gives(404, UNKNOWN_ELEMENT))
def instance_unknown_element_is_404() -> None:
    """A client that looks for a member of a later version learns that it is missing."""


@rule(MUST, "PROTOCOL 1.3 (IMDS)", gives(400, WITHOUT_VERSION))
def instance_version_missing_is_400() -> None:
    """Ohai and MSAL send this on purpose, and read the error."""


@check(MUST, "PROTOCOL 1.3: newest-versions (MSAL, OHAI)")
def instance_version_missing_names_the_newest(session: Session) -> None:
    """Ohai chooses its version from this list."""
    newest = newest_versions(session.send(WITHOUT_VERSION))
    expect_equal("the three newest of /metadata/versions,", newest, _versions(session)[-3:][::-1])
