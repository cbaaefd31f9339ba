"""What can be seen of an agent from outside."""

import json
import re
from dataclasses import replace

import pytest

from forewarn.agent.status import to_json, to_line, to_prometheus, to_text
from tests.unit.agent.agent_status import OF_A_PEER, REBOOT, STARTED, agent_status, workflow

METRIC = re.compile(r'forewarn_agent_[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+-]+')


def test_vm_is_drained_while_it_has_an_event() -> None:
    """A load balancer must send no new work to it."""
    assert not agent_status().is_drained
    assert agent_status(workflow(REBOOT)).is_drained
    assert agent_status(workflow(STARTED)).is_drained


def test_event_of_a_peer_does_not_drain_this_vm() -> None:
    """Otherwise one reboot would take the whole scope out of service."""
    assert not agent_status(workflow(OF_A_PEER)).is_drained


@pytest.mark.parametrize(
    ("contact_seconds", "problem", "unready"),
    [
        (70.0, "", ""),
        (70.1, "", "no recent response from the endpoint"),
        (None, "", "no recent response from the endpoint"),
        (None, "timed out", "timed out"),
        (5.0, "timed out", ""),
        (-3600.0, "", ""),
    ],
)
def test_agent_is_ready_after_a_recent_response(
    contact_seconds: float, problem: str, unready: str
) -> None:
    """One lost response, or a clock that was set back, is no reason for an alarm."""
    assert agent_status(contact_seconds=contact_seconds, last_problem=problem).unready == unready


def test_agent_with_a_rejected_file_is_not_ready() -> None:
    """Its old rules apply, but the operator expects the new ones."""
    assert (
        agent_status(config_error="agent.toml:3: rule: wrong").unready
        == "agent.toml:3: rule: wrong"
    )


def test_metrics_are_valid_and_have_no_event_labels() -> None:
    """The number of events has no bound."""
    text = to_prometheus(agent_status(workflow(REBOOT, phase="prepare"), workflow(OF_A_PEER)))
    samples = [line for line in text.splitlines() if not line.startswith("# ")]

    assert [line for line in samples if not METRIC.fullmatch(line)] == []
    assert text.endswith("\n")
    assert "E1" not in text
    assert 'forewarn_agent_workflows{phase="prepare"} 1' in samples
    assert 'forewarn_agent_workflows{phase="waiting"} 1' in samples
    assert "forewarn_agent_next_deadline_seconds 812.34" in samples
    assert "forewarn_agent_contact_age_seconds 1.5" in samples


def test_every_metric_family_has_one_type() -> None:
    """Prometheus rejects a page with two."""
    text = to_prometheus(agent_status(workflow()))
    typed = re.findall(r"# TYPE (\S+) (?:counter|gauge)", text)

    assert sorted(typed) == sorted(
        {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line[0] != "#"}
    )
    assert "# TYPE forewarn_agent_steps_total counter" in text


def test_unknown_values_are_left_out_of_the_metrics() -> None:
    """A zero would look like good news."""
    text = to_prometheus(agent_status(contact_seconds=None))

    assert "contact_age" not in text
    assert "next_deadline" not in text


def test_status_is_json_and_has_a_text_form() -> None:
    status = json.loads(
        json.dumps(
            to_json(agent_status(workflow(phase="prepare", step="run x"), workflow(STARTED)))
        )
    )

    assert list(to_text(status)) == [
        "web-0, forewarn agent 0.3.0",
        "endpoint: http://127.0.0.1, last response 1.5 s ago",
        "rules: all",
        "applications: db",
        "Reboot E1 of web-0: prepare, run x, 812.3 s left (rule all)",
        "Freeze E2 of web-0: started (rule all)",
    ]


HOSTILE = replace(
    REBOOT, id="E1\nno events", type="Re\x1b[2Jboot", resources=("web-0", "web\r1\x07\u202e\ud800")
)


def test_status_escapes_values_of_the_endpoint() -> None:
    """They are printed on an administrator's terminal."""
    status = to_json(
        agent_status(workflow(HOSTILE), last_problem="bad\x1b]0;title\x07\nall is well")
    )
    text = list(to_text(status))

    assert text[-1] == (
        r"Re\x1b[2Jboot E1\nno events of web-0 web\r1\x07\u202e\ud800: waiting, "
        "812.3 s left (rule all)"
    )
    assert [line for line in text if not line.isprintable()] == []


def test_status_line_for_systemd_is_printable() -> None:
    """`systemctl status` shows it as it is."""
    assert to_line(agent_status(workflow(HOSTILE))) == r"web-0: Re\x1b[2Jboot waiting"


def test_status_shows_why_the_agent_is_not_ready() -> None:
    status = to_json(agent_status(contact_seconds=None, last_problem="timed out"))

    assert "unready: timed out" in list(to_text(status))
    assert "no events" in list(to_text(status))


@pytest.mark.parametrize(
    ("is_prepared", "is_approved", "expected"),
    [(False, False, "waiting"), (True, False, "prepared"), (True, True, "approved")],
)
def test_line_for_systemd_shows_the_state_of_an_event(
    is_prepared: bool, is_approved: bool, expected: str
) -> None:
    seen = agent_status(workflow(is_prepared=is_prepared, is_approved=is_approved))

    assert to_line(seen) == f"web-0: Reboot {expected}"


@pytest.mark.parametrize("count", [0, 999_999, 1_000_001, 12_345_678])
def test_counters_are_never_rounded(count: int) -> None:
    """A rate is computed from differences."""
    text = to_prometheus(replace(agent_status(), counters={"forewarn_agent_late_total": count}))

    assert f"\nforewarn_agent_late_total {count}\n" in text


def test_status_with_a_long_description_stays_small() -> None:
    status = to_json(agent_status(workflow(replace(REBOOT, description="x" * 300_000))))

    assert len(json.dumps(status)) < 10_000
