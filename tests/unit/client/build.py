"""Builders for documents and events as a guest reads them."""

from datetime import UTC, datetime, timedelta

from forewarn.client import Document, Event

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SOON = NOON + timedelta(minutes=15)


def reboot(
    id: str = "E1",
    *,
    status: str = "Scheduled",
    not_before: datetime | None = SOON,
    description: str = "",
) -> Event:
    return Event(
        id=id,
        type="Reboot",
        status=status,
        resources=("web-0",),
        not_before=not_before,
        description=description,
    )


def started(id: str = "E1") -> Event:
    return reboot(id, status="Started", not_before=None)


def page(incarnation: int, *events: Event) -> Document:
    return Document(incarnation, events, f'"{incarnation}"')
