"""History entries as Azure Event Grid delivers Scheduled Events (protocol 11). Pure.

A body is a list of one event. Its id is that of the entry, so a repeated delivery has the same.
"""

from email.utils import format_datetime

import msgspec

from forewarn.core.event import USER_CAUSES, Source
from forewarn.core.fleet import Scope
from forewarn.engine.entry import Entry
from forewarn.wire.instance import event_resource, find_member
from forewarn.wire.versions import NEWEST

HEADERS = {"content-type": "application/json; charset=utf-8", "aeg-event-type": "Notification"}
EVENT_TYPE = "Microsoft.ResourceNotifications.MaintenanceResources.ScheduledEventEmitted"
KIND = "microsoft.maintenance/scheduledevents"
STATUS = {what: what.capitalize() for what in ("scheduled", "started", "completed", "canceled")}
STATUS |= {"extended": "Scheduled", "failed": "Completed"}
"""The changes that Azure reports. It has no status for an impact that failed."""


def is_event(entry: Entry) -> bool:
    """Whether Azure would report it. An operation without an event has no duration."""
    return entry.what in STATUS and entry.duration_seconds is not None


def encode(message_id: str, entry: Entry, scope: Scope | None) -> bytes:
    """`scope` is that of the event; None if it was deleted with its only VM."""
    scope, vm = scope or Scope(entry.scope), entry.resources[0]
    subject = f"{event_resource(scope, vm)}/providers/{KIND}/{entry.event}"
    not_before = format_datetime(entry.not_before, usegmt=True) if entry.not_before else ""
    what = {"EventId": entry.event, "EventStatus": STATUS[entry.what], "EventType": entry.type}
    whom = {"ResourceType": "VirtualMachine", "Resources": entry.resources}
    when = {"NotBefore": not_before, "DurationInSeconds": entry.duration_seconds}
    source = Source.USER if entry.cause in USER_CAUSES else Source.PLATFORM
    why = {"Description": entry.description, "EventSource": source}
    properties = what | whom | when | why | {"ScheduledEventApiVersion": NEWEST.name}
    location = find_member(scope, vm).instance.location
    info = {"id": subject, "name": entry.event, "type": KIND, "location": location}
    data = {"resourceInfo": info | {"properties": properties}, "apiVersion": "2024-07-01"}
    about = {"topic": subject.partition("/resourceGroups/")[0], "subject": subject, "data": data}
    types = {"eventType": EVENT_TYPE, "dataVersion": "3.0", "metadataVersion": "1"}
    return msgspec.json.encode([{"id": message_id} | about | types | {"eventTime": entry.at}])
