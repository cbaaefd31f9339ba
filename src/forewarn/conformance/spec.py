"""The protocol as tables, written from Microsoft's articles and captures, not from a server."""

import re

EVENTS = "/metadata/scheduledevents"
INSTANCE = "/metadata/instance"
VERSIONS_PATH = "/metadata/versions"
JSON = "application/json"
TEXT = "format=text"
"""A query of the instance tree (8.1)."""

# fmt: off
VERSIONS = (
    "2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01",
    "2020-07-01",
)
# fmt: on
"""The api-versions of Scheduled Events, oldest first (1.1)."""
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
INSTANCE_VERSION = "2021-02-01"
"""One that instance clients really use (8.2); it has all members but the newest."""
INSTANCE_VERSION_OLD = "2017-12-01"

FIELDS = (
    ("EventId", OLDEST),
    ("EventStatus", OLDEST),
    ("EventType", OLDEST),
    ("ResourceType", OLDEST),
    ("Resources", OLDEST),
    ("NotBefore", OLDEST),
    ("Description", "2019-04-01"),
    ("EventSource", "2019-08-01"),
    ("DurationInSeconds", "2020-07-01"),
)
"""The members of an event in wire order, each with its first version (1.1, 2.1)."""

TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
HTTP_DATE = re.compile(
    r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d{2} (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) "
    r"\d{4} \d{2}:\d{2}:\d{2} GMT"
)
"""RFC 1123, as in the Date header and in NotBefore (2.3)."""

NO_HEADER = {"error": "Bad request. Required metadata header not specified"}
BAD_VERSION = (
    "Bad request. api-version is invalid or was not specified in the request. "
    "For more information refer to aka.ms/azureimds"
)

# fmt: off
COMPUTE_ALWAYS = {
    "location", "name", "offer", "osType", "platformFaultDomain", "platformUpdateDomain",
    "publisher", "sku", "version", "vmId", "vmSize",
}
"""The members of `compute` that every version has (8.1)."""

COMPUTE_LATER = {
    "azEnvironment", "evictionPolicy", "licenseType", "osProfile", "plan", "priority", "provider",
    "publicKeys", "resourceId", "securityProfile", "storageProfile", "tagsList", "userData",
    "virtualMachineScaleSet",
}
"""Members of `compute` that are newer than INSTANCE_VERSION_OLD (8.1)."""
# fmt: on


def fields(version: str) -> list[str]:
    """The members of an event in a version, in wire order."""
    return [name for name, since in FIELDS if since <= version]
