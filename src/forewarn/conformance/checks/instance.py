"""The siblings that clients of Scheduled Events call: the instance tree, and the list of its
versions.
"""

from collections.abc import Iterator
from typing import Any

from forewarn.conformance.check import Level, NotRun, check, holds, same
from forewarn.conformance.checks.path import status
from forewarn.conformance.checks.version import DATE, newest_three
from forewarn.conformance.document import Entry
from forewarn.conformance.session import Stage
from forewarn.conformance.spec import (
    COMPUTE_ALWAYS,
    COMPUTE_LATER,
    INSTANCE,
    INSTANCE_VERSION_OLD,
    VERSIONS_PATH,
)

MUST, SHOULD = Level.MUST, Level.SHOULD
TEXT = "format=text"


def tree(stage: Stage, version: str = "") -> Any:
    answer = stage.instance(version=version) if version else stage.instance()
    holds(answer.status == 200, "status 200 and the instance tree", answer)
    return answer.object()


def versions(stage: Stage) -> list[str]:
    answer = stage.get(VERSIONS_PATH, None)
    holds(answer.status == 200, "status 200 and the versions", answer)
    told = answer.object()["apiVersions"]
    holds(
        isinstance(told, list) and all(isinstance(one, str) for one in told),
        "apiVersions that are a list of strings",
        told,
    )
    return list(told)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no list and no object, with the path to it."""
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(child, f"{path}/{name}")
    else:
        yield path, node


def nodes(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object, with the path to it."""
    if isinstance(node, dict):
        yield path, node
    for name, child in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        yield from nodes(child, f"{path}/{name}")


@check(MUST, "PROTOCOL 8.1: /metadata/versions")
def versions_are_listed(stage: Stage) -> None:
    """Clients that want to know what they may ask call this first, without an api-version."""
    told = versions(stage)
    holds(bool(told) and all(DATE.fullmatch(one) for one in told), "a list of dates", told)


@check(MUST, "PROTOCOL 8.1: ascending")
def versions_are_ascending(stage: Stage) -> None:
    """Clients take the last one for the newest."""
    told = versions(stage)
    holds(told == sorted(set(told)), "each version once, oldest first", told)


@check(MUST, "PROTOCOL 8.1")
def versions_listed_are_served(stage: Stage) -> None:
    """What is listed must work."""
    for version in versions(stage):
        status(stage.instance(version=version), 200)


@check(MUST, "PROTOCOL 8.1")
def instance_is_a_tree_of_compute_and_network(stage: Stage) -> None:
    """Pacemaker's agent, WDO, giantswarm and others read their own name and address from here."""
    told = tree(stage)
    holds(
        isinstance(told["compute"], Entry) and isinstance(told["network"], Entry),
        "compute and network",
        told,
    )
    holds(isinstance(told["network"]["interface"], list), "a list of interfaces", told["network"])


@check(MUST, "PROTOCOL 3: Content-Type")
def instance_is_application_json(stage: Stage) -> None:
    """aiohttp and PowerShell read JSON only where it is called so."""
    same(
        "the Content-Type",
        (stage.instance().header("content-type") or "").partition(";")[0].lower(),
        "application/json",
    )


@check(MUST, "PROTOCOL 8.1: all primitives are strings")
def instance_values_are_strings(stage: Stage) -> None:
    """Typed clients read strings, also for numbers, and the empty one where nothing is known."""
    odd = [path for path, value in leaves(tree(stage)) if not isinstance(value, str)]
    holds(not odd, "values that are all strings", odd)


@check(MUST, "PROTOCOL 8.1: alphabetical (SWG)")
def instance_members_are_in_alphabetical_order(stage: Stage) -> None:
    """So do all the examples of the specification, and people compare by eye."""
    odd = [path for path, node in nodes(tree(stage)) if list(node) != sorted(node, key=str.lower)]
    holds(
        not odd,
        "members in alphabetical order",
        f"another order at {', '.join(path or '/' for path in odd)}",
    )


@check(MUST, "PROTOCOL 8.1: members of compute")
def instance_compute_has_what_is_always_there(stage: Stage) -> None:
    """These are as old as the instance tree itself."""
    compute = tree(stage)["compute"]
    holds(set(COMPUTE_ALWAYS) <= set(compute), f"{', '.join(COMPUTE_ALWAYS)}", list(compute))


@check(MUST, "PROTOCOL 8.1: first versions")
def instance_compute_has_nothing_before_its_time(stage: Stage) -> None:
    """A client of 2017 that reads strictly refuses members of 2021."""
    told = tree(stage, INSTANCE_VERSION_OLD)["compute"]
    early = [name for name in told if name in COMPUTE_LATER]
    holds(not early, f"none of the later members in {INSTANCE_VERSION_OLD}", early)


@check(MUST, "PROTOCOL 8.1: format=text, no newline (DRAIN)")
def instance_leaf_as_text_is_bare(stage: Stage) -> None:
    """drainsafe compares the raw bytes with Resources: a newline, a quote or a space and nothing
    ever matches.
    """
    name = tree(stage)["compute"]["name"]
    same(
        "the name as text to be",
        stage.instance("/compute/name", query=TEXT).body,
        str(name).encode(),
    )


@check(SHOULD, "PROTOCOL 8.1: text")
def instance_leaf_as_text_is_text_plain(stage: Stage) -> None:
    """PowerShell parses what is called JSON, and a bare name is none."""
    said = stage.instance("/compute/name", query=TEXT).header("content-type") or ""
    same("the Content-Type", said.partition(";")[0].lower(), "text/plain")


@check(MUST, "PROTOCOL 8.1: a leaf needs format=text")
def instance_leaf_without_format_is_400(stage: Stage) -> None:
    """A bare value is no JSON document, and the documents say so."""
    status(stage.instance("/compute/name"), 400)


@check(MUST, "PROTOCOL 8.1: route walking")
def instance_may_be_walked(stage: Stage) -> None:
    """Scripts ask for the part that they need."""
    whole = tree(stage)
    for path, part in (
        ("/compute", whole["compute"]),
        ("/network/interface", whole["network"]["interface"]),
    ):
        same(f"{path} to be the same as in the whole tree,", stage.instance(path).json(), part)


@check(MUST, "PROTOCOL 8.1: route walking by number")
def instance_may_be_walked_by_number(stage: Stage) -> None:
    """curl … /network/interface/0/ipv4/ipAddress/0/privateIpAddress is the documents' own example."""
    found = [
        (path, value)
        for path, value in leaves(tree(stage)["network"], "/network")
        if path.endswith("/privateIpAddress")
    ]
    if not found:
        raise NotRun("the VM has no address in the instance tree")
    for path, value in found:
        same(f"{path} as text to be", stage.instance(path, query=TEXT).body, str(value).encode())


@check(MUST, "PROTOCOL 8.1: text of a node")
def instance_node_as_text_names_its_children(stage: Stage) -> None:
    """Shell scripts walk the tree by these names; a slash at the end says that there is more below."""
    whole = tree(stage)
    wanted = sorted(
        name if isinstance(child, str) else f"{name}/" for name, child in whole["compute"].items()
    )
    same(
        "the children of /compute to be",
        sorted(stage.instance("/compute", query=TEXT).body.decode().split()),
        wanted,
    )
    root = sorted(stage.instance(query=TEXT).body.decode().split())
    same("the children of the root to be", root, ["compute/", "network/"])


@check(MUST, "PROTOCOL 5: 404")
def instance_unknown_element_is_404(stage: Stage) -> None:
    """A client that looks for a member of a later version learns that it is not there."""
    status(stage.instance("/compute/noSuchThing", query=TEXT), 404)


@check(MUST, "PROTOCOL 1.3 (IMDS)")
def instance_version_missing_is_400(stage: Stage) -> None:
    """Ohai and MSAL ask like this on purpose, and read the answer."""
    status(stage.get(INSTANCE, None), 400)


@check(MUST, "PROTOCOL 1.3: newest-versions (MSAL, OHAI)")
def instance_version_missing_names_the_newest(stage: Stage) -> None:
    """Ohai picks its version from this list."""
    named = newest_three(stage.get(INSTANCE, None).object()["newest-versions"], "newest-versions")
    same("the three newest of /metadata/versions,", named, versions(stage)[-3:][::-1])
