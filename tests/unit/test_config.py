"""Options: how their text is parsed, and how a wrong value is rejected."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from forewarn.config import WEBHOOK_CHANGES, Config
from forewarn.core.change import ChangeKind
from forewarn.errors import Invalid
from forewarn.option_kind import Address, SimulatedDuration
from tests.unit.config_of import config_of


def rejection(**flags: Any) -> str:
    with pytest.raises(Invalid) as raised:
        config_of(**flags)
    assert "\n" not in raised.value.message
    return raised.value.message


def test_text_is_parsed_into_types() -> None:
    """Parsed at the edge, once: no part of the service parses text again."""
    config = config_of(
        legacy_path="true",
        lenient_versions="yes",
        simulate_duration=["Freeze=30s", "Reboot=1.5m", "Redeploy=100ms"],
        metadata="[::1]:80",
        fleet="fleet.yaml",
    )

    assert config.legacy_path is True
    assert config.lenient_versions is True
    assert config.simulate_duration == (
        SimulatedDuration("Freeze", timedelta(seconds=30)),
        SimulatedDuration("Reboot", timedelta(seconds=90)),
        SimulatedDuration("Redeploy", timedelta(milliseconds=100)),
    )
    assert config.metadata == Address("::1", 80)
    assert str(config.metadata) == "[::1]:80"
    assert config.fleet == Path("fleet.yaml")


RATE = "rate (from --rate): expected a number from 0.001 to 100000, got"
IMPACTS = "impacts_max (from --impacts-max): expected a whole number from 1 to 100000, got"
METADATA = "metadata (from --metadata): expected HOST:PORT, got"
WEBHOOK = "webhook (from --webhook): expected http://HOST/PATH or https://HOST/PATH, got"
STORE = (
    "store (from --store): expected memory, sqlite:///relative.db, sqlite:////absolute/path.db or"
    " etcd://HOST:PORT,HOST:PORT/PREFIX,"
    " got"
)
SIMULATED = "simulate_duration (from --simulate-duration): expected TYPE=DURATION such as"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rate": "0"}, f"{RATE} '0'"),
        ({"rate": "100001"}, f"{RATE} '100001'"),
        ({"rate": "nan"}, f"{RATE} 'nan'"),
        ({"rate": "fast"}, f"{RATE} 'fast'"),
        ({"impacts_max": "1.5"}, f"{IMPACTS} '1.5'"),
        ({"impacts_max": "0"}, f"{IMPACTS} '0'"),
        ({"metadata": "8080"}, f"{METADATA} '8080'"),
        ({"metadata": "a:b:1"}, f"{METADATA} 'a:b:1'"),
        ({"metadata": "127.0.0.1:65536"}, f"{METADATA} '127.0.0.1:65536'"),
        ({"metadata": "[::1:80"}, f"{METADATA} '[::1:80'"),
        (
            {"identify": ["name"]},
            "identify (from --identify): expected address, path or proxy, got 'name'",
        ),
        (
            {"webhook": ["ftp://h/"]},
            f"{WEBHOOK} 'ftp://h/'",
        ),
        (
            {"log_format": "xml"},
            "log_format (from --log-format): expected human or json, got 'xml'",
        ),
        (
            {"store": "sqlite://"},
            f"{STORE} 'sqlite://'",
        ),
        (
            {"simulate_duration": ["Freeze=25h"]},
            f"{SIMULATED} Freeze=30s (at most 24h), got 'Freeze=25h'",
        ),
    ],
)
def test_wrong_value_is_rejected_with_source_and_expectation(
    flags: dict[str, Any], message: str
) -> None:
    """The message alone should be enough to fix it."""
    assert rejection(**flags) == message


def test_an_option_that_needs_another_is_rejected_without_it() -> None:
    """Found at startup, not at the first request or webhook."""
    assert rejection(identify=["proxy"]) == (
        "identify proxy needs proxy_key_file, which is not set;"
        " expected --proxy-key-file or FOREWARN_PROXY_KEY_FILE"
    )
    assert rejection(webhook=["http://h/"]) == (
        "webhook needs webhook_secret_file, which is not set;"
        " expected --webhook-secret-file or FOREWARN_WEBHOOK_SECRET_FILE"
    )


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("control_key_file", "control_certificate_file"),
        ("control_certificate_file", "control_key_file"),
    ],
)
def test_certificate_and_key_need_each_other(given: str, missing: str) -> None:
    """One of them alone would silently mean: no TLS."""
    message = f"{given} needs {missing}, which is not set; expected --control-"
    assert rejection(**{given: "x.pem"}).startswith(message)


@pytest.mark.parametrize(
    "address", ["127.3.4.5:81", "localhost:8081", "[::1]:8081", "0.0.0.0:8081", "example.org:8081"]
)
def test_any_control_address_is_accepted(address: str) -> None:
    """Whether it may be served depends on the tokens in the store, which a config does not see."""
    assert str(config_of(control=address).control) == address


def test_health_command_is_split_as_a_shell_would() -> None:
    """It runs without a shell, so a quoted part is one word."""
    command = config_of(
        campaign_health_command="/usr/bin/check 'all disks' {host}"
    ).campaign_health_command

    assert command is not None
    assert command.words == ("/usr/bin/check", "all disks", "{host}")
    assert str(command) == "/usr/bin/check 'all disks' '{host}'"


PLACEHOLDERS = "{name} may be one of host, event_type, and not in the program's own path"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("'", "expected a command such as '/usr/local/bin/is-healthy {host}'"),
        ("check {vm}", PLACEHOLDERS),
        ("{host} check", PLACEHOLDERS),
    ],
)
def test_health_command_that_cannot_run_is_rejected(command: str, reason: str) -> None:
    """At startup, not in the middle of a campaign at night."""
    message = rejection(campaign_health_command=command)

    assert message.startswith("campaign_health_command (from --campaign-health-command): ")
    assert reason in message


def test_rejected_url_with_a_password_is_not_repeated() -> None:
    """Error messages end up in logs and tickets."""
    assert "hunter2" not in rejection(webhook=["https://u:hunter2@h/x"])


def test_default_webhook_changes_exist() -> None:
    """The config does not import the rules; the server validates what an operator sets."""
    assert set(WEBHOOK_CHANGES) <= set(ChangeKind)


@pytest.mark.parametrize("option", ["metadata", "control"])
def test_shared_port_must_be_a_fixed_one(option: str) -> None:
    """Each server would get another free port, and nobody would notice that nothing is shared."""
    assert rejection(reuse_port="true", **{option: "127.0.0.1:0"}) == (
        f"{option} is 127.0.0.1:0, but with reuse_port each server would take another free port; "
        "expected a port from 1 to 65535"
    )


def test_the_default_config_is_valid() -> None:
    """Nothing needs to be configured to start."""
    Config().check()
