"""Ids, durations, estimates and records of a campaign."""

import json
from datetime import timedelta
from uuid import UUID

import pytest
from msgspec.structs import replace

from forewarn.campaign.model import (
    CAMPAIGN,
    CAMPAIGN_HOSTS,
    Campaign,
    CampaignSpec,
    CampaignState,
    DoneHost,
    EventRef,
    HostPhase,
    HostRun,
    SkippedHost,
    estimate_end,
    host_duration,
    operation_id_of,
)
from forewarn.core.event import EventType
from forewarn.core.fleet import Budget
from forewarn.errors import StoreUnusable
from tests.builders import MINUTE, NOON, SECOND, STANDARD


def campaign_of(hosts: int = 3, **spec: object) -> Campaign:
    wanted = replace(CampaignSpec(type=EventType.REBOOT, patterns=("h*",)), **spec)
    return Campaign(id="c1", spec=wanted, started_at=NOON, total=hosts, waves=hosts)


def test_operation_id_is_stable_and_unique_per_host_and_campaign() -> None:
    """Also if the store was replaced and counts from 1 again: guests remember event ids."""
    campaign = campaign_of()
    first = operation_id_of(campaign, "h1")
    other = operation_id_of(campaign, "h2")
    later = operation_id_of(replace(campaign, started_at=NOON + SECOND), "h1")

    assert UUID(first).version == 5
    assert first == operation_id_of(replace(campaign, state=CampaignState.PAUSED), "h1")
    assert len({first, other, later}) == 3


def test_estimate_follows_the_hosts_that_are_done() -> None:
    """Three waves of 15 and 10 minutes; then, with one done in five minutes, two of five."""
    campaign = campaign_of()

    assert estimate_end(campaign, NOON, STANDARD) == NOON + 75 * MINUTE
    one_done = replace(campaign, cursor=1, done=1, timed=1, spent=5 * MINUTE)
    assert estimate_end(one_done, NOON + 5 * MINUTE, STANDARD) == NOON + 15 * MINUTE
    assert estimate_end(replace(campaign, state=CampaignState.PAUSED), NOON, STANDARD) is None


def test_campaign_of_an_earlier_version_keeps_its_estimate() -> None:
    """Its record has the time that its hosts took, and not yet how many they were."""
    earlier = replace(campaign_of(), cursor=1, done=1, spent=5 * MINUTE)

    assert estimate_end(earlier, NOON + 5 * MINUTE, STANDARD) == NOON + 15 * MINUTE


def test_host_without_vms_does_not_shorten_the_estimate() -> None:
    """It was done at once; the two hosts after it have VMs that get their notice."""
    first_done = replace(campaign_of(), cursor=1, done=1)

    assert estimate_end(first_done, NOON, STANDARD) == NOON + 50 * MINUTE


@pytest.mark.parametrize(("seconds", "minutes"), [(None, 25), (-1, 25), (60, 25), (3600, 75)])
def test_requested_duration_counts_if_longer_than_usual(seconds: int | None, minutes: int) -> None:
    """It decides the estimated end, and how far ahead events of others count."""
    campaign = campaign_of(1, duration_seconds=seconds)

    assert host_duration(campaign.spec, STANDARD) == minutes * MINUTE
    assert estimate_end(campaign, NOON, STANDARD) == NOON + minutes * MINUTE


FULL = Campaign(
    id="c1",
    spec=CampaignSpec(
        type=EventType.FREEZE, patterns=("h*",), max_unavailable=Budget(25, is_percent=True)
    ),
    started_at=NOON,
    total=3,
    state=CampaignState.PAUSED,
    pause_reason="h2: broken",
    paused_by_failure=True,
    cursor=2,
    window=("h3",),
    in_progress=(
        HostRun("h1", NOON, HostPhase.CHECKING, (EventRef("web", "E1", 7),), "late", NOON),
    ),
    skipped_hosts=(SkippedHost("h2", "broken", is_failed=True),),
    operation_id="request-1",
    timed=1,
    spent=timedelta(minutes=5, microseconds=1),
    done_hosts=(DoneHost("h0", NOON),),
)


def test_record_is_read_back_as_it_was_written() -> None:
    """A campaign continues after a restart from nothing else."""
    assert CAMPAIGN.decode(CAMPAIGN.encode(FULL)) == FULL
    assert CAMPAIGN_HOSTS.decode(CAMPAIGN_HOSTS.encode(("h1", "h2"))) == ("h1", "h2")


def test_record_contains_every_default_of_the_spec() -> None:
    """A version with other defaults must not change a campaign that is running."""
    spec = json.loads(CAMPAIGN.encode(campaign_of()))["value"]["spec"]

    assert spec == {
        "type": "Reboot",
        "patterns": ["h*"],
        "name": "",
        "cause": "maintenance",
        "duration_seconds": None,
        "description": None,
        "max_hosts": 1,
        "max_unavailable": None,
        "pause_on_failure": True,
    }


def test_record_of_the_first_version_may_have_a_health_command() -> None:
    """It is read, and never run."""
    written = CAMPAIGN.encode(FULL)
    old = written.replace(b'"h*"]', b'"h*"],"health_command":"/bin/true","health_seconds_max":5')

    assert old != written
    assert CAMPAIGN.decode(old).spec.patterns == ("h*",)


@pytest.mark.parametrize("field", [b'"total":3', b'"type":"Freeze"', b'"host":"h1"'])
def test_record_with_an_unknown_field_is_rejected(field: bytes) -> None:
    """A newer server wrote it; writing it back would lose the field."""
    newer = CAMPAIGN.encode(FULL).replace(field, field + b',"colour":"red"')

    with pytest.raises(StoreUnusable, match="unknown field `colour`"):
        CAMPAIGN.decode(newer)
