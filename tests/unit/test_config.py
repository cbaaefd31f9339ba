"""Options: declared once, taken from the right place, and refused in one line that helps."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from forewarn.cli.config import BEGIN, END, reference
from forewarn.config import (
    WEBHOOK_CHANGES,
    Address,
    ClientConfig,
    Config,
    Identify,
    LogLevel,
    Resolved,
    find_file,
    resolve,
)
from forewarn.config_platform import EVENT_TYPES
from forewarn.core.change import ChangeKind
from forewarn.core.event import EventType
from forewarn.errors import Invalid

DOCS = Path(__file__).parents[2] / "docs"


def config(
    tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: Any
) -> Resolved[Config]:
    """What these flags, variables and this file come to."""
    return resolve(Config, flags=flags, environ=environ or {}, file=written(tmp_path, toml))


def written(tmp_path: Path, toml: str) -> Path:
    path = tmp_path / "forewarn.toml"
    path.write_text(toml)
    return path


def refusal(
    tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: Any
) -> str:
    with pytest.raises(Invalid) as raised:
        config(tmp_path, toml, environ, **flags)
    assert "\n" not in raised.value.message
    return raised.value.message.replace(str(tmp_path), "DIR")


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    """The nearer to the command that was typed, the more it is meant."""
    toml, environ = (
        "rate = 2\nimpacts_max = 3\nlog_level = 'debug'",
        {"FOREWARN_RATE": "4", "FOREWARN_IMPACTS_MAX": "5"},
    )

    found = config(tmp_path, toml, environ, rate="6")

    assert (found.config.rate, found.config.impacts_max, found.config.log_level) == (
        6.0,
        5,
        LogLevel.DEBUG,
    )
    assert found.config.idle_seconds == 75.0


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    """`forewarn config --show` answers the question that a surprised operator asks first."""
    found = config(tmp_path, "log_level = 'debug'", {"FOREWARN_IMPACTS_MAX": "5"}, rate="6")

    assert found.origins["rate"] == "--rate"
    assert found.origins["impacts_max"] == "FOREWARN_IMPACTS_MAX"
    assert found.origins["log_level"] == f"log_level in {tmp_path / 'forewarn.toml'}"
    assert found.origins["store"] == "default"


def test_an_empty_variable_is_no_value(tmp_path: Path) -> None:
    """Unit files and compose files set variables to nothing when they mean that they are not set."""
    assert config(tmp_path, environ={"FOREWARN_RATE": ""}).config.rate == 1.0


def test_a_command_may_have_its_own_defaults(tmp_path: Path) -> None:
    """`demo` is `serve` with another fleet, store and pace; a flag still beats them."""
    found = resolve(
        Config,
        flags={"rate": "2"},
        environ={},
        file=written(tmp_path, ""),
        defaults={"rate": 60.0, "store": "memory"},
    )

    assert (found.config.rate, found.config.store, found.origins["store"]) == (
        2.0,
        "memory",
        "default",
    )


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"identify": ["address", "path"]}, "flag"),
        ({"FOREWARN_IDENTIFY": "address,path"}, "variable"),
        ({}, "file"),
    ],
)
def test_a_repeatable_option_takes_several_values_everywhere(
    tmp_path: Path, given: dict[str, list[str]], where: str
) -> None:
    """A flag is repeated, a variable has commas, a file has a list."""
    toml = "identify = ['address', 'path']" if where == "file" else ""
    environ = {name: str(value) for name, value in given.items()} if where == "variable" else {}

    found = config(tmp_path, toml, environ, **(given if where == "flag" else {}))

    assert found.config.identify == (Identify.ADDRESS, Identify.PATH)


def test_values_are_read_into_what_they_are(tmp_path: Path) -> None:
    """Parsed at the edge, once: no part of the service reads text again."""
    toml = "legacy_path = true\nsimulate_duration = ['Freeze=30s', 'Reboot=1.5m']\nmetadata = '[::1]:80'\nfleet = 'fleet.yaml'"

    found = config(tmp_path, toml, {"FOREWARN_LENIENT_VERSIONS": "yes"}).config

    assert found.legacy_path is True
    assert found.lenient_versions is True
    assert found.simulate_duration == (
        ("Freeze", timedelta(seconds=30)),
        ("Reboot", timedelta(seconds=90)),
    )
    assert found.metadata == Address("::1", 80)
    assert str(found.metadata) == "[::1]:80"
    assert found.fleet == Path("fleet.yaml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rate": "0"}, "rate (from --rate): expected a number from 0.001 to 100000, got '0'"),
        (
            {"rate": "100001"},
            "rate (from --rate): expected a number from 0.001 to 100000, got '100001'",
        ),
        ({"rate": "nan"}, "rate (from --rate): expected a number from 0.001 to 100000, got 'nan'"),
        (
            {"rate": "fast"},
            "rate (from --rate): expected a number from 0.001 to 100000, got 'fast'",
        ),
        (
            {"impacts_max": "1.5"},
            "impacts_max (from --impacts-max): expected a whole number from 1 to 100000, got '1.5'",
        ),
        (
            {"impacts_max": "0"},
            "impacts_max (from --impacts-max): expected a whole number from 1 to 100000, got '0'",
        ),
        ({"metadata": "8080"}, "metadata (from --metadata): expected HOST:PORT, got '8080'"),
        ({"metadata": "a:b:1"}, "metadata (from --metadata): expected HOST:PORT, got 'a:b:1'"),
        (
            {"metadata": "127.0.0.1:65536"},
            "metadata (from --metadata): expected HOST:PORT, got '127.0.0.1:65536'",
        ),
        ({"metadata": "[::1:80"}, "metadata (from --metadata): expected HOST:PORT, got '[::1:80'"),
        (
            {"identify": ["name"]},
            "identify (from --identify): expected address, path or proxy, got ['name']",
        ),
        (
            {"identify": ["proxy"]},
            "identify (from --identify): proxy needs proxy_key_file, which is not given",
        ),
        (
            {"webhook": ["http://h/"]},
            "webhook (from --webhook): needs webhook_secret_file, which is not given",
        ),
        (
            {"webhook": ["ftp://h/"]},
            "webhook (from --webhook): expected http://HOST/PATH or https://HOST/PATH, got ['ftp://h/']",
        ),
        (
            {"log_format": "xml"},
            "log_format (from --log-format): expected human or json, got 'xml'",
        ),
        (
            {"store": "sqlite://"},
            "store (from --store): expected memory, sqlite:///relative.db or sqlite:////absolute/path.db, got 'sqlite://'",
        ),
        (
            {"simulate_duration": ["Sleep=1s"]},
            (
                "simulate_duration (from --simulate-duration): expected TYPE=DURATION such as Freeze=30s (types Freeze, Reboot, "
                "Redeploy, Preempt, Terminate; units ms, s, m, h; at most 24h), got ['Sleep=1s']"
            ),
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_origin_and_what_was_expected(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    """Whoever typed it should not need the manual."""
    assert refusal(tmp_path, **flags) == message


def test_a_wrong_value_of_a_wrong_type_in_the_file_is_refused(tmp_path: Path) -> None:
    """TOML has dates and tables; an option has neither."""
    assert refusal(tmp_path, "rate = {a = 1}") == (
        "rate (from rate in DIR/forewarn.toml): expected a number from 0.001 to 100000, got {'a': 1}"
    )
    assert refusal(tmp_path, "rate = true").endswith(
        "expected a number from 0.001 to 100000, got True"
    )


@pytest.mark.parametrize(
    "address", ["127.3.4.5:81", "localhost:8081", "[::1]:8081", "0.0.0.0:8081", "example.org:8081"]
)
def test_any_address_may_be_named_for_the_control_api(tmp_path: Path, address: str) -> None:
    """Whether it may be opened there depends on the tokens in the store, which a config does not
    look at.
    """
    assert str(config(tmp_path, control=address).config.control) == address


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("control_key_file", "control_certificate_file"),
        ("control_certificate_file", "control_key_file"),
    ],
)
def test_a_certificate_needs_its_key_and_a_key_its_certificate(
    tmp_path: Path, given: str, missing: str
) -> None:
    """One of them alone would mean: no TLS, in silence."""
    assert (
        refusal(tmp_path, f"{given} = 'x.pem'")
        == f"{missing} is not given; TLS needs both a certificate and its key"
    )


def test_the_health_command_of_campaigns_is_split_into_words_as_a_shell_would(
    tmp_path: Path,
) -> None:
    """It runs without a shell, so what stands in quotes is one word."""
    found = config(
        tmp_path, """campaign_health_command = "/usr/bin/check 'all disks' {host}" """
    ).config

    assert found.campaign_health_command is not None
    assert found.campaign_health_command.words == ("/usr/bin/check", "all disks", "{host}")
    assert str(found.campaign_health_command) == "/usr/bin/check 'all disks' '{host}'"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("'", "expected a command such as '/usr/local/bin/is-healthy {host}'"),
        ("check {vm}", "{name} may be one of host, event_type, and not in the program's own path"),
        (
            "{host} check",
            "{name} may be one of host, event_type, and not in the program's own path",
        ),
    ],
)
def test_a_health_command_that_cannot_be_run_is_refused(
    tmp_path: Path, command: str, why: str
) -> None:
    """At the start of the service, not in the middle of a campaign at night."""
    message = refusal(tmp_path, campaign_health_command=command)

    assert message.startswith("campaign_health_command (from --campaign-health-command): ")
    assert why in message


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """A misspelt key that is ignored is an option that silently does not work."""
    assert (
        refusal(tmp_path, "idle_second = 5")
        == "DIR/forewarn.toml: unknown key 'idle_second'; did you mean 'idle_seconds'?"
    )
    assert refusal(tmp_path, "xyzzy = 5") == "DIR/forewarn.toml: unknown key 'xyzzy'"


def test_the_client_and_the_service_share_one_file(tmp_path: Path) -> None:
    """The same folder often runs both; neither may refuse the other's keys."""
    toml = "control_url = 'http://127.0.0.1:9/'\nrate = 5"

    found = resolve(ClientConfig, flags={}, environ={}, file=written(tmp_path, toml))

    assert found.config.control_url == "http://127.0.0.1:9"
    assert config(tmp_path, toml).config.rate == 5.0


def test_the_services_control_address_has_its_own_variable(tmp_path: Path) -> None:
    """FOREWARN_CONTROL is the client's URL; on a machine with both it must not become the
    listener's address.
    """
    environ = {"FOREWARN_CONTROL": "http://127.0.0.1:9", "FOREWARN_CONTROL_LISTEN": "127.0.0.1:7"}

    assert config(tmp_path, environ=environ).config.control.port == 7


@pytest.mark.parametrize("content", [b"rate =", b"\xff\xfe", b"rate = 1\nrate = 2"])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    """The line should lead to the file, and never to a traceback."""
    path = tmp_path / "forewarn.toml"
    path.write_bytes(content)

    with pytest.raises(Invalid, match=r"forewarn\.toml: is not TOML: ") as raised:
        resolve(Config, flags={}, environ={}, file=path)
    assert "\n" not in raised.value.message


def test_a_file_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    """Only the one in the current folder may be absent: nobody asked for it."""
    absent = tmp_path / "absent.toml"

    with pytest.raises(Invalid, match=r"absent\.toml: cannot be read: No such file or directory"):
        resolve(Config, flags={}, environ={"FOREWARN_CONFIG": str(absent)})
    assert (
        find_file({"FOREWARN_CONFIG": str(absent)}, tmp_path / "flag.toml")
        == tmp_path / "flag.toml"
    )


def test_a_wrong_secret_is_not_repeated(tmp_path: Path) -> None:
    """Error lines end up in logs and tickets."""
    with pytest.raises(Invalid) as raised:
        resolve(
            ClientConfig,
            flags={},
            environ={"FOREWARN_TOKEN": "hunter2\n"},
            file=written(tmp_path, ""),
        )

    assert (
        raised.value.message == "token (from FOREWARN_TOKEN): expected a token, got something else"
    )


def test_a_refused_url_with_a_password_is_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in refusal(tmp_path, webhook=["https://u:hunter2@h/x"])


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8081", "ftp://127.0.0.1", "http://", "http://a/?q=1", "http://a:0", "http://a b"],
)
def test_the_services_url_is_http_and_nothing_but_an_address(tmp_path: Path, url: str) -> None:
    """What is asked is appended to it."""
    with pytest.raises(Invalid, match=r"expected http://HOST:PORT, got"):
        resolve(ClientConfig, flags={"control_url": url}, environ={}, file=written(tmp_path, ""))


def test_the_reference_page_holds_the_table_of_options_as_it_is() -> None:
    """Written once, in config.py.

    To renew the page: python -m forewarn.cli.config docs/configuration.md
    """
    page = (DOCS / "configuration.md").read_text()

    assert page.partition(BEGIN)[2].partition(END)[0].strip() == reference().strip()


def test_the_event_types_named_here_are_those_of_the_rules() -> None:
    """Config stands beside core and may not import it."""
    assert tuple(EventType) == EVENT_TYPES


def test_the_changes_that_webhooks_are_told_of_are_changes() -> None:
    """A config knows no rules; this is where the two must agree."""
    assert set(WEBHOOK_CHANGES) <= set(ChangeKind)
