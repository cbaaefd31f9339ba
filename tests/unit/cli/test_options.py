"""Where options come from: flag, variable, file, default. Driven through `forewarn config`."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forewarn.cli import options as options_module
from forewarn.cli.app import app
from forewarn.cli.config_file import format_value
from forewarn.cli.options import ClientConfig
from forewarn.config import options
from forewarn.errors import Invalid
from tests.unit.config_of import config_of
from tools.configuration_page import BEGIN, END, render_reference

DOCS = Path(__file__).parents[3] / "docs"


def show(
    tmp_path: Path,
    *flags: str,
    toml: str = "",
    env: dict[str, str] | None = None,
    root: tuple[str, ...] = (),
) -> dict[str, tuple[str, str]]:
    """Value and source of each option, as `forewarn config` shows them."""
    path = tmp_path / "forewarn.toml"
    path.write_text(toml)
    command = ["--config", str(path), *root, "config", "--json", *flags]
    result = CliRunner().invoke(app, command, env=env or {})
    if result.exception is not None:
        raise result.exception
    rows = json.loads(result.stdout)
    return {
        row["option"]: (row["value"], row["from"].replace(str(tmp_path), "DIR")) for row in rows
    }


def rejection(
    tmp_path: Path, *flags: str, toml: str = "", env: dict[str, str] | None = None
) -> str:
    with pytest.raises(Invalid) as raised:
        show(tmp_path, *flags, toml=toml, env=env)
    assert "\n" not in raised.value.message
    return raised.value.message.replace(str(tmp_path), "DIR")


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    """The nearer to the typed command, the stronger; and each value names its source."""
    shown = show(
        tmp_path,
        "--rate",
        "6",
        toml="rate = 2\nimpacts_max = 3\nlog_level = 'debug'",
        env={"FOREWARN_RATE": "4", "FOREWARN_IMPACTS_MAX": "5"},
    )

    assert shown["rate"] == ("6", "--rate")
    assert shown["impacts_max"] == ("5", "FOREWARN_IMPACTS_MAX")
    assert shown["log_level"] == ("debug", "log_level in DIR/forewarn.toml")
    assert shown["idle_seconds"] == ("75", "default")


def test_choices_are_accepted_in_any_case(tmp_path: Path) -> None:
    shown = show(tmp_path, "--log-level", "WARNING", env={"FOREWARN_PLATFORM": "Exec"})

    assert (shown["log_level"][0], shown["platform"][0]) == ("warning", "exec")


def test_an_empty_variable_is_not_a_value(tmp_path: Path) -> None:
    """Unit files and compose files set variables to nothing when they mean unset."""
    assert show(tmp_path, env={"FOREWARN_RATE": ""})["rate"] == ("1", "default")


def test_repeatable_option_takes_several_values_everywhere(tmp_path: Path) -> None:
    """A flag is repeated, a variable has commas, a file has a list. Values may contain spaces."""
    by_flag = show(tmp_path, "--identify", "address", "--identify", "path")
    by_variable = show(tmp_path, env={"FOREWARN_EXEC_COMMAND": "Reboot=a b,*=c"})
    by_file = show(tmp_path, toml="identify = ['address', 'path']")

    assert by_flag["identify"][0] == by_file["identify"][0] == "address,path"
    assert by_variable["exec_command"] == ("Reboot=a b,*=c", "FOREWARN_EXEC_COMMAND")


def test_booleans_come_from_flag_variable_and_file(tmp_path: Path) -> None:
    toml = "legacy_path = true\nlenient_versions = true"
    shown = show(tmp_path, "--no-lenient-versions", toml=toml)

    assert shown["legacy_path"] == ("true", "legacy_path in DIR/forewarn.toml")
    assert shown["lenient_versions"] == ("false", "--lenient-versions")
    assert show(tmp_path, env={"FOREWARN_LEGACY_PATH": "yes"})["legacy_path"][0] == "true"


def test_wrong_value_names_the_variable_or_the_key_it_came_from(tmp_path: Path) -> None:
    """A surprised operator asks first: who set this?"""
    expected = "expected a number from 0.001 to 100000"

    assert rejection(tmp_path, env={"FOREWARN_RATE": "fast"}) == (
        f"rate (from FOREWARN_RATE): {expected}, got 'fast'"
    )
    assert rejection(tmp_path, toml="rate = {a = 1}") == (
        f"rate (from rate in DIR/forewarn.toml): {expected}, got {{'a': 1}}"
    )
    assert rejection(tmp_path, toml="rate = true").endswith(f"{expected}, got 'true'")


def test_unknown_key_in_the_file_is_rejected_with_the_nearest(tmp_path: Path) -> None:
    """A misspelt key that is ignored is an option that silently does not work."""
    assert rejection(tmp_path, toml="idle_second = 5") == (
        "DIR/forewarn.toml: unknown key 'idle_second'; did you mean 'idle_seconds'?"
    )
    assert rejection(tmp_path, toml="xyzzy = 5") == "DIR/forewarn.toml: unknown key 'xyzzy'"


@pytest.mark.parametrize("content", ["rate =", "rate = 1\nrate = 2"])
def test_file_that_is_not_toml_is_rejected_by_name(tmp_path: Path, content: str) -> None:
    """The message leads to the file, and is never a traceback."""
    assert rejection(tmp_path, toml=content).startswith("DIR/forewarn.toml is not valid TOML: ")


def test_file_of_the_system_is_read_unless_the_current_folder_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that `config` and `fleet sync` show and do what the service does."""
    system = tmp_path / "etc.toml"
    system.write_text("rate = 5")
    monkeypatch.setattr(options_module, "SYSTEM_FILE", system)
    monkeypatch.chdir(tmp_path)

    assert f"rate in {system}" in CliRunner().invoke(app, ["config"]).stdout
    (tmp_path / "forewarn.toml").write_text("rate = 6")
    assert "rate in forewarn.toml" in CliRunner().invoke(app, ["config"]).stdout


def test_named_file_must_exist(tmp_path: Path) -> None:
    """Only the one in the current folder may be absent. A flag beats the variable."""
    absent, present = tmp_path / "absent.toml", tmp_path / "present.toml"
    present.write_text("rate = 5")
    env = {"FOREWARN_CONFIG": str(absent)}

    missing = CliRunner().invoke(app, ["config"], env=env).exception
    found = CliRunner().invoke(app, ["config", "--config", str(present)], env=env)

    assert isinstance(missing, Invalid)
    assert missing.message == f"cannot read {absent}: No such file or directory"
    assert f"rate in {present}" in found.stdout


def test_help_works_with_a_broken_file(tmp_path: Path) -> None:
    """Help is what one reads to repair the file."""
    (tmp_path / "forewarn.toml").write_text("rate =")
    result = CliRunner().invoke(
        app, ["--config", str(tmp_path / "forewarn.toml"), "serve", "--help"]
    )

    assert result.exit_code == 0


def test_client_and_service_share_one_file(tmp_path: Path) -> None:
    """The same folder often runs both; neither may reject the other's keys."""
    shown = show(tmp_path, toml="control_url = 'http://127.0.0.1:9/'\nrate = 5\ntoken = 'x'")

    assert shown["control_url"] == ("http://127.0.0.1:9", "control_url in DIR/forewarn.toml")
    assert shown["token"] == ("***", "token in DIR/forewarn.toml")
    assert shown["rate"][0] == "5"


@pytest.mark.parametrize(
    ("flags", "toml", "env"),
    [
        (("--control-url", "http://s1:1", "--control-url", "http://s2:2/"), "", {}),
        (("--control-url", "http://s1:1,http://s2:2"), "", {}),
        ((), "control_url = ['http://s1:1', 'http://s2:2']", {}),
        ((), "", {"FOREWARN_CONTROL": "http://s1:1, http://s2:2"}),
    ],
)
def test_service_may_have_several_control_urls(
    tmp_path: Path, flags: tuple[str, ...], toml: str, env: dict[str, str]
) -> None:
    shown = show(tmp_path, toml=toml, env=env, root=flags)

    assert shown["control_url"][0] == "http://s1:1,http://s2:2"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("control_url = []", "expected http://HOST:PORT, got []"),
        ("identify = []", "expected address, path or proxy, got []"),
    ],
)
def test_empty_list_is_refused_where_nothing_works_without_a_value(
    tmp_path: Path, toml: str, message: str
) -> None:
    name = toml.partition(" ")[0]
    assert rejection(tmp_path, toml=toml) == f"{name} (from {name} in DIR/forewarn.toml): {message}"


def test_list_that_is_empty_by_default_may_be_empty(tmp_path: Path) -> None:
    assert show(tmp_path, toml="webhook = []")["webhook"][0] == ""


def test_control_listener_has_its_own_variable(tmp_path: Path) -> None:
    """FOREWARN_CONTROL is the client's URL; it must not become the address of the listener."""
    env = {"FOREWARN_CONTROL": "http://127.0.0.1:9", "FOREWARN_CONTROL_LISTEN": "127.0.0.1:7"}

    assert show(tmp_path, env=env)["control"] == ("127.0.0.1:7", "FOREWARN_CONTROL_LISTEN")


@pytest.mark.parametrize(
    ("flags", "env", "source"),
    [
        (("--store", "sqlite:///x.db"), {}, "--store"),
        ((), {"FOREWARN_STORE": "sqlite:///x.db"}, "FOREWARN_STORE"),
    ],
)
def test_service_refuses_another_kind_of_store_than_its_file(
    tmp_path: Path, flags: tuple[str, ...], env: dict[str, str], source: str
) -> None:
    """Three servers of one etcd that a flag starts on SQLite would be three services."""
    wrong = ("--fleet", "/nope")  # so that a server that is not refused does not run here
    toml = 'store = "etcd://h1:2379/forewarn"'
    error = serve_error(tmp_path, *flags, *wrong, toml=toml, env=env)

    assert isinstance(error, Invalid)
    assert str(error).replace(str(tmp_path), "DIR") == (
        f"the kind of store is sqlite (from {source}), but etcd (store in DIR/forewarn.toml): "
        "servers with different kinds of store are different services; expected one kind"
    )


@pytest.mark.parametrize(
    ("toml", "env", "found"),
    [
        (
            'store = "sqlite:///prod.db"',
            {},
            "sqlite:///prod.db (from store in DIR/forewarn.toml)",
        ),
        (
            "",
            {"FOREWARN_STORE": "etcd://h1:2379/forewarn"},
            "etcd://h1:2379/forewarn (from FOREWARN_STORE)",
        ),
    ],
)
def test_demo_refuses_the_store_of_a_service(
    tmp_path: Path, toml: str, env: dict[str, str], found: str
) -> None:
    """It deleted the fleet of the service in whose folder it was typed."""
    error = demo_error(tmp_path, toml=toml, env=env)

    assert isinstance(error, Invalid)
    assert str(error).replace(str(tmp_path), "DIR") == (
        f"store is {found}: the demo would replace the fleet in it; "
        "expected --store memory, or another value of that flag"
    )


def test_demo_refuses_the_platform_of_a_service(tmp_path: Path) -> None:
    """What it suggests to try would restart a real VM."""
    error = demo_error(tmp_path, toml='platform = "libvirt"')

    assert isinstance(error, Invalid)
    assert str(error).replace(str(tmp_path), "DIR") == (
        "platform is libvirt (from platform in DIR/forewarn.toml): the demo would act on real VMs; "
        "expected --platform simulated, or another value of that flag"
    )


def test_demo_uses_the_store_that_its_flag_names(tmp_path: Path) -> None:
    """Who types it wants to keep the demo. `memory` harms nothing, wherever it comes from."""
    absent = "cannot read the fleet file /nope: No such file or directory"
    toml = 'store = "sqlite:///prod.db"'
    typed = demo_error(tmp_path, "--store", f"sqlite:///{tmp_path}/x.db", toml=toml)
    in_memory = demo_error(tmp_path, toml='store = "memory"')

    assert (str(typed), str(in_memory)) == (absent, absent)


@pytest.mark.parametrize(
    "command", [("create", "ann", "--role", "admin"), ("list",), ("revoke", "ann")]
)
def test_token_command_refuses_another_kind_of_store_than_the_file_has(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It would create a second store, with a token that no server knows."""
    config, database = tmp_path / "forewarn.toml", tmp_path / "t.db"
    config.write_text('store = "etcd://h1:2379/forewarn"')
    if command[0] != "create":
        database.touch()  # else the command ends because there is no such store
    flags = ["--config", str(config), "token", *command, "--store", f"sqlite:///{database}"]
    result = CliRunner().invoke(app, flags)

    assert isinstance(result.exception, Invalid)
    assert (
        str(result.exception)
        .replace(str(tmp_path), "DIR")
        .startswith(
            "the kind of store is sqlite (from --store), but etcd (store in DIR/forewarn.toml): "
        )
    )
    assert "creating" not in result.output
    assert not database.exists() or database.stat().st_size == 0


def test_password_in_the_store_of_the_file_is_not_repeated(tmp_path: Path) -> None:
    """No store URL has one, but operators try: a flag is checked before this, the file is not."""
    toml = 'store = "etcd://u:hunter2@h/forewarn"'
    error = serve_error(tmp_path, "--store", "sqlite:///x.db", "--fleet", "/nope", toml=toml)

    assert isinstance(error, Invalid)
    assert "but etcd (store in" in str(error)
    assert "hunter2" not in f"{error} {error.facts}"


@pytest.mark.parametrize("toml", ["", 'store = "sqlite:////var/lib/forewarn/forewarn.db"'])
def test_flag_may_name_another_store_of_the_same_kind(tmp_path: Path, toml: str) -> None:
    store = f"sqlite:///{tmp_path}/x.db"
    error = serve_error(tmp_path, "--store", store, "--fleet", "/nope", toml=toml)

    assert str(error) == "cannot read the fleet file /nope: No such file or directory"


@pytest.mark.parametrize(
    ("flags", "content"),
    [
        (("--fleet",), None),
        (("--fleet",), "scopes: 7"),
        (("--proxy-key-file",), None),
        (("--webhook", "http://h/x", "--webhook-secret-file"), None),
        (("--webhook", "http://h/x", "--webhook-secret-file"), ""),
    ],
)
def test_service_with_a_wrong_file_leaves_no_store_behind(
    tmp_path: Path, flags: tuple[str, ...], content: str | None
) -> None:
    """A typo in an option must not create a database in the current folder."""
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    error = serve_error(tmp_path, "--store", f"sqlite:///{tmp_path}/x.db", *flags, str(file))

    assert isinstance(error, Invalid)
    assert str(file) in str(error)
    assert {path.name for path in tmp_path.iterdir()} <= {"forewarn.toml", "file"}


def serve_error(
    tmp_path: Path,
    *flags: str,
    toml: str = "",
    env: dict[str, str] | None = None,
    command: str = "serve",
) -> BaseException | None:
    path = tmp_path / "forewarn.toml"
    path.write_text(toml)
    ports = ("--metadata", "127.0.0.1:0", "--control", "127.0.0.1:0")
    arguments = ["--config", str(path), command, *ports, *flags]
    return CliRunner().invoke(app, arguments, env=env or {}).exception


def demo_error(
    tmp_path: Path, *flags: str, toml: str = "", env: dict[str, str] | None = None
) -> BaseException | None:
    """Without a fleet, so that a demo that is not refused does not run here."""
    fleet = ("--fleet", "/nope")
    return serve_error(tmp_path, *fleet, *flags, toml=toml, env=env, command="demo")


def test_wrong_secret_is_not_repeated(tmp_path: Path) -> None:
    """Error messages end up in logs and tickets."""
    assert rejection(tmp_path, env={"FOREWARN_TOKEN": "hunter2\n"}) == (
        "token (from FOREWARN_TOKEN): expected a token, got another value"
    )


def test_a_token_on_the_command_line_is_rejected() -> None:
    """Every user of the machine can read it there."""
    error = CliRunner().invoke(app, ["--token", "hunter2", "vm", "list"]).exception

    assert isinstance(error, Invalid)
    assert error.message == (
        "--token: other users can see a command line; set FOREWARN_TOKEN instead"
    )


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8081", "ftp://127.0.0.1", "http://", "http://a/?q=1", "http://a:0", "http://a b"],
)
def test_control_url_is_http_without_a_query(url: str) -> None:
    """Paths are appended to it."""
    control_url = options(ClientConfig)[0]
    with pytest.raises(Invalid, match=rf"expected http://HOST:PORT, got {re.escape(repr(url))}$"):
        control_url.parse(["http://a", url], "--control-url")


def test_value_is_formatted_as_it_would_be_typed() -> None:
    """What `config` prints can be pasted into a flag."""
    config = config_of(simulate_duration=["Freeze=90s"], identify=["address", "path"], rate="2.5")
    names = ("simulate_duration", "identify", "rate", "legacy_path", "metadata", "fleet")

    assert [format_value(getattr(config, name)) for name in names] == [
        "Freeze=90s",
        "address,path",
        "2.5",
        "false",
        "127.0.0.1:8080",
        "",
    ]


def test_the_reference_page_has_the_current_tables() -> None:
    """Update the page with: python -m tools.configuration_page docs/configuration.md"""
    page = (DOCS / "configuration.md").read_text()

    assert page.partition(BEGIN)[2].partition(END)[0].strip() == render_reference().strip()
