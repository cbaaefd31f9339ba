"""The scenario file: its parser, its errors, its schema and the library."""

from datetime import UTC, datetime
from importlib import resources
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from forewarn.errors import Invalid
from forewarn.fleetfile.yaml_source import SourceText
from forewarn.lab.scenario.schema import (
    SCHEMA,
    list_library,
    list_vms,
    load_from_library,
    parse_scenario,
)
from forewarn.lab.scenario.steps import MaintainStep

WHOLE = """\
name: host-reboot
seed: 7
clock: {start: 2031-01-01T00:00:00Z}
fleet:
  scopes:
    - name: web
      kind: availability-set
      vms:
        - {name: web-0, host: host-a}
        - {name: web-1, host: host-b, update_domain: 1}
guests:
  - {vms: [web-0, web-1], poll: 1s, approve: 20s}
faults:
  - {fault: status, code: 500, vms: [web-0], from: 5m, for: 2m}
steps:
  - {at: 1m, do: maintain, host: host-a, type: Reboot, as: patch}
  - {when: web-0 approved patch, after: 10s, do: cancel, event: patch}
expectations:
  - {expect: approval, of: patch, by: web-0, within: 60s}
until: 40m
"""


def refused(before: str, after: str) -> str:
    """Return the error for the file with one line changed."""
    assert before in WHOLE
    with pytest.raises(Invalid) as caught:
        parse_scenario(WHOLE.replace(before, after).encode(), "scenario.yaml")
    return caught.value.message


def test_file_is_parsed() -> None:
    scenario = parse_scenario(WHOLE.encode(), "scenario.yaml")

    assert list(scenario.guests) == ["web-0", "web-1"]
    assert scenario.file.clock.start == datetime(2031, 1, 1, tzinfo=UTC)
    assert scenario.file.steps[0] == MaintainStep(
        at="1m", host="host-a", type="Reboot", as_="patch"
    )
    assert list(scenario.conditions) == [2]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "until: 40m",
            "until: soon",
            (
                "scenario.yaml:20: until: expected a duration such as 90s, 15m, 2h, 1h30m or 7d,"
                " got 'soon'"
            ),
        ),
        ("until: 40m", "until: 400d", "scenario.yaml:20: until: expected at most 366d, got '400d'"),
        ("seed: 7", "sead: 7", "scenario.yaml:2: sead: unknown member; did you mean 'seed'?"),
        (
            "host: host-b,",
            "hots: host-b,",
            "scenario.yaml:10: fleet.scopes[0].vms[1].hots: unknown member; did you mean 'host'?",
        ),
        (
            "{name: web-1, host",
            "{name: WEB-0, host",
            (
                "scenario.yaml:10: fleet.scopes[0].vms[1].name: expected a VM name not used by"
                " scopes[0].vms[0].name, got 'WEB-0'"
            ),
        ),
        (
            "do: maintain",
            "do: mantain",
            "scenario.yaml:16: steps[0].do: expected one of restart, redeploy, evict, delete,",
        ),
        (
            "type: Reboot, as",
            "type: Boot, as",
            "scenario.yaml:16: steps[0].type: expected one of Freeze, Reboot, Redeploy, got",
        ),
        (
            "host: host-a, type",
            "type",
            "scenario.yaml:16: steps[0].host: expected a name, or any: one without a pending event",
        ),
        (
            "host: host-a, type",
            "vm: web-0, type",
            "scenario.yaml:16: steps[0].vm: unknown member; expected one of",
        ),
        (
            "host: host-a, type",
            "host: host-z, type",
            (
                "scenario.yaml:16: steps[0].host: expected a host of the fleet: host-a, host-b,"
                " got 'host-z'"
            ),
        ),
        (
            "{at: 1m, do: maintain",
            "{do: maintain",
            "scenario.yaml:16: steps[0]: expected either `at` or `when`, got",
        ),
        (
            "{at: 1m, do",
            "{at: 1m, after: 1s, do",
            "scenario.yaml:16: steps[0].after: expected `after` only with `when`, got '1s'",
        ),
        (
            "{at: 1m, do",
            "{at: 41m, do",
            "scenario.yaml:16: steps[0].at: expected nothing later than `until`, which is 40m, got",
        ),
        (
            "as: patch}",
            "as: patch, repeat: {every: 10m, times: 5}}",
            (
                "scenario.yaml:16: steps[0].repeat: expected nothing later than `until`, which"
                " is 40m, got"
            ),
        ),
        (
            "as: patch}",
            "as: web-1}",
            "scenario.yaml:16: steps[0].as: expected a name that is not a VM's, got 'web-1'",
        ),
        (
            "event: patch}",
            "event: path}",
            (
                "scenario.yaml:17: steps[1].event: expected a name that a step gives with `as`:"
                " patch, got 'path'"
            ),
        ),
        (
            "{vms: [web-0, web-1]",
            "{vms: [web-0, web-0]",
            "scenario.yaml:12: guests[0].vms[1]: expected a VM that no guest above plays",
        ),
        (
            "poll: 1s",
            "poll: 0s",
            "scenario.yaml:12: guests[0].poll: expected a second or more, got '0s'",
        ),
        (
            "code: 500",
            "code: 501",
            "scenario.yaml:14: faults[0].code: expected one of 404, 410, 429, 500, 503, got 501",
        ),
        (
            "vms: [web-0], from",
            "vms: [web-7], from",
            "scenario.yaml:14: faults[0].vms[0]: expected a VM of the fleet: web-0, web-1",
        ),
        (
            "from: 5m",
            "from: 2030-02-31T00:00:00Z",
            "scenario.yaml:14: faults[0].from: expected a duration from now such as 90s",
        ),
        (
            "{at: 1m, do",
            "{at: 1x, do",
            (
                "scenario.yaml:16: steps[0].at: expected a duration such as 90s, 15m, 2h, 1h30m"
                " or 7d, got '1x'"
            ),
        ),
        (
            "as: patch}",
            "as: patch, repeat: {every: 1s, times: 1000000000}}",
            (
                "scenario.yaml:16: steps[0].repeat.times: expected a whole number from 1 to"
                " 100000, got 1000000000"
            ),
        ),
        (
            "as: patch}",
            "as: patch, repeat: 5}",
            "scenario.yaml:16: steps[0].repeat: expected a mapping with every, times, got 5",
        ),
        (
            "as: patch}",
            "as: patch, duration_seconds: -7}",
            (
                "scenario.yaml:16: steps[0].duration_seconds: expected a whole number of seconds"
                " from -1 (unknown) to 86400, got -7"
            ),
        ),
        (
            "within: 60s",
            "within: 5",
            (
                "scenario.yaml:19: expectations[0].within: expected a duration such as 90s, 15m,"
                " 2h, 1h30"
            ),
        ),
        (
            "{start: 2031-01-01T00:00:00Z}",
            "{rate: 1000000}",
            "scenario.yaml:3: clock.rate: expected a whole number from 1 to 100000",
        ),
        (
            "{start: 2031-01-01T00:00:00Z}",
            "{start: 2031-01-01T00:00:00Z, rate: 60}",
            (
                "scenario.yaml:3: clock.rate: expected no rate with `start`: the real clock"
                " starts now, got 60"
            ),
        ),
        (
            "start: 2031-01-01T00:00:00Z",
            "start: 8991-01-01T00:00:00Z",
            (
                "scenario.yaml:3: clock.start: expected a time in the years 1971 to 8990, got"
                " '8991-01-01T00:00:00Z'"
            ),
        ),
        (
            "start: 2031",
            "start: 1970",
            "scenario.yaml:3: clock.start: expected a time in the years 1971 to 8990, got '1970-",
        ),
        (
            "expect: approval",
            "expect: aproval",
            "scenario.yaml:19: expectations[0].expect: expected one of approval, no-approval,",
        ),
        (
            "by: web-0, within",
            "by: web-9, within",
            "scenario.yaml:19: expectations[0].by: expected a VM of the fleet: web-0, web-1",
        ),
    ],
)
def test_error_names_line_and_field(before: str, after: str, message: str) -> None:
    assert refused(before, after)[: len(message)] == message


@pytest.mark.parametrize(
    "wrong",
    [
        "web-9 approved",
        "web-0 approved path",
        "patch exploded",
        "web-0 sees Reboot",
        "web-0 sees Boot Started",
        "",
        "patch polled",
    ],
)
def test_invalid_condition_lists_the_valid_forms(wrong: str) -> None:
    message = refused("when: web-0 approved patch", f"when: {wrong!r}")

    assert message.startswith(
        "scenario.yaml:17: steps[1].when: expected one of: VM approved; VM approved NAME; VM"
        " polled;"
    )
    assert "with web-0, web-1 for VM and patch for NAME, got" in message


def test_fault_of_a_step_has_no_from() -> None:
    text = WHOLE.replace(
        "do: cancel, event: patch}", "do: fault, set: {fault: status, code: 500, from: 1m}}"
    )

    with pytest.raises(
        Invalid, match=r"steps\[1\]\.set\.from: expected a fault that begins with its step"
    ):
        parse_scenario(text.encode(), "scenario.yaml")


def test_jump_needs_at_and_no_repeat() -> None:
    text = WHOLE.replace("do: cancel, event: patch}", "do: jump, by: 1h}")

    with pytest.raises(
        Invalid, match=r"steps\[1\]: expected a jump with `at` and without `repeat`"
    ):
        parse_scenario(text.encode(), "scenario.yaml")


def test_steps_may_refer_to_vms_added_later() -> None:
    fleet = "{scopes: [{name: new, vms: [{name: new-0}]}]}"
    apply = f"  - {{at: 2m, do: apply, fleet: {fleet}}}\n"
    apply += "  - {at: 3m, do: restart, vm: new-0}\n"
    scenario = parse_scenario(
        WHOLE.replace("expectations:", f"{apply}expectations:").encode(), "scenario.yaml"
    )

    assert list_vms(*scenario.fleets) == ("web-0", "web-1", "new-0")
    assert scenario.fleets[1].scopes[0].name == "new"


def errors(values: Any) -> list[Any]:
    return list(Draft202012Validator(SCHEMA).iter_errors(values))


def test_schema_agrees_with_the_parser() -> None:
    values: Any = SourceText("scenario.yaml", WHOLE.encode()).load()

    Draft202012Validator.check_schema(SCHEMA)
    assert errors(values) == []
    assert errors({**values, "sead": 7}) != []
    assert errors({**values, "steps": [{"do": "dance", "at": "1m"}]}) != []
    assert errors({**values, "steps": [{"do": "restart", "at": "1m", "host": "host-a"}]}) != []
    assert errors({**values, "expectations": [{"expect": "approval"}]}) != []


@pytest.mark.parametrize("name", list_library())
def test_schema_accepts_the_library(name: str) -> None:
    text = (resources.files("forewarn.lab.scenario") / "library" / f"{name}.yaml").read_bytes()

    assert errors(yaml.safe_load(text)) == []


def test_library_is_complete() -> None:
    assert list_library() == (
        "bad-day",
        "cancelled-maintenance",
        "degraded-hardware",
        "hardware-failure",
        "host-reboot",
        "host-update",
        "live-migration",
        "long-day",
        "rolling-update",
        "scale-in-terminate",
        "spot-eviction",
        "user-redeploy",
        "user-restart",
    )


@pytest.mark.parametrize("name", list_library())
def test_library_scenario_has_name_about_and_expectations(name: str) -> None:
    file = load_from_library(name).file

    assert (file.name, bool(file.about), bool(file.expectations)) == (name, True, True)
