"""The options of the daemon, its token and its config file."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from forewarn.auth.tokens import TEXT
from forewarn.cli.exit_codes import Exit
from forewarn.cli.hostd import make_parser, read_hostd_config
from forewarn.config import Config, options
from forewarn.errors import Invalid
from forewarn.hostd.settings import TOKEN, HostdConfig, identify_machine, read_token
from forewarn.option_kind import HostUri
from tests.e2e.cli_service import forewarn
from tools.configuration_page import BEGIN, END, render_tables

PAGE = (Path(__file__).parents[3] / "docs" / "hostd.md").read_text()
SECRET = "0123456789abcdef" * 4
FLAGS: dict[str, Any] = {
    "host": "host-a",
    "server": ("http://s1:8081",),
    "token_file": Path("token"),
}


def made(**more: Any) -> HostdConfig:
    config = HostdConfig(**FLAGS | more)
    config.check()
    return config


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"host": ""},
            "hostd needs host, which is not set; expected --host or FOREWARN_HOSTD_HOST",
        ),
        (
            {"server": ()},
            "hostd needs server, which is not set; expected --server or FOREWARN_HOSTD_SERVER",
        ),
        (
            {"token_file": None},
            "hostd needs token_file, which is not set; expected --token-file or ",
        ),
        (
            {"bridge": ("virbr0",)},
            "bridge needs metadata_server, which is not set; expected --metadata-server or ",
        ),
        (
            {"platform": "exec"},
            "platform exec needs inventory_command, which is not set; expected --inventory-",
        ),
    ],
)
def test_missing_options_are_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid) as raised:
        made(**more)
    assert raised.value.message.startswith(message)


def test_servers_are_a_list_or_repeated() -> None:
    servers = {each.name: each for each in options(HostdConfig)}["server"]

    assert servers.parse(["http://a:1,http://b:2", "https://c"], "--server") == (
        "http://a:1",
        "http://b:2",
        "https://c",
    )
    with pytest.raises(Invalid, match=r"server \(from --server\): expected http://HOST:PORT, got"):
        servers.parse(["http://a:1,,"], "--server")


@pytest.mark.parametrize(
    ("given", "own", "other"),
    [
        ([], "qemu:///system", ""),
        ([("", "qemu:///session")], "qemu:///session", "qemu:///session"),
        ([("", "qemu+tls://{host}/system")], "qemu:///system", "qemu+tls://{host}/system"),
        ([("host-a", "test:///a"), ("host-b", "test:///b")], "test:///a", ""),
    ],
)
def test_the_plain_uri_is_that_of_this_host(
    given: list[tuple[str, str]], own: str, other: str
) -> None:
    config = made(libvirt_uri=tuple(HostUri(*uri) for uri in given)).platform_config()
    uris = {uri.host: uri.uri for uri in config.libvirt_uri}

    assert (uris["host-a"], uris.get("", "")) == (own, other)


def test_shared_options_reach_the_platform() -> None:
    config = made(exec_seconds_max=7.0, libvirt_grace_seconds=3.0).platform_config()

    assert (config.exec_seconds_max, config.libvirt_grace_seconds) == (7.0, 3.0)
    assert config.libvirt_call_seconds_max == Config.libvirt_call_seconds_max


def test_a_token_has_the_key_that_the_server_stores(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"fw_host-a_{SECRET}\n")
    token = read_token(tmp_path / "token")

    assert (token.name, token.text) == ("host-a", f"fw_host-a_{SECRET}")
    assert token.key == hashlib.sha256(SECRET.encode()).hexdigest().encode()
    assert TOKEN.pattern == TEXT.pattern


@pytest.mark.parametrize("content", ["", "fw_host-a_short", f"fw_host-a_{SECRET} more"])
def test_a_file_without_a_token_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(Invalid, match="has no valid token; expected what `forewarn token create"):
        read_token(tmp_path / "token")
    with pytest.raises(Invalid, match=r"token_file: cannot read .*absent: No such file"):
        read_token(tmp_path / "absent")


def rejection(*arguments: str, **variables: Any) -> str:
    ended = forewarn("hostd", *arguments, **variables)
    assert ended.returncode == Exit.USAGE
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("forewarn: ")


def test_machine_is_a_hash_of_its_id(tmp_path: Path) -> None:
    """The id itself is confidential, says machine-id(5)."""
    path = tmp_path / "machine-id"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    machine = identify_machine("", path)
    assert machine == identify_machine("", path)
    assert len(machine) == 64
    assert "0123456789abcdef" not in machine
    path.write_text("1123456789abcdef0123456789abcdef\n")
    assert identify_machine("", path) != machine


@pytest.mark.parametrize("content", ["", "uninitialized\n", "0123", None])
def test_machine_without_an_id_needs_the_option(tmp_path: Path, content: str | None) -> None:
    """All such machines would be one."""
    path = tmp_path / "machine-id"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Invalid, match=r"machine: .*expected the option machine") as caught:
        identify_machine("", path)
    assert "\n" not in caught.value.message
    assert identify_machine("kvm-1", path) != identify_machine("kvm-2", path)


def test_the_config_file_is_the_daemons_own(tmp_path: Path) -> None:
    """A host may run the service too: its file has other keys."""
    file = tmp_path / "hostd.toml"
    file.write_text('host = "host-a"\nserver = ["http://s1:8081"]\ntoken = "x"\n')
    assert rejection("--config", str(file)) == (
        f"{file}: unknown key 'token'; did you mean 'token_file'?"
    )
    file.write_text(f'host = "host-a"\nserver = "http://s1:8081"\ntoken_file = "{tmp_path}/no"\n')
    assert rejection("--config", str(file)) == (
        f"token_file: cannot read {tmp_path}/no: No such file or directory"
    )
    missing = "hostd needs host, which is not set; expected --host or FOREWARN_HOSTD_HOST"
    assert rejection("--config", "/dev/null", FOREWARN_CONFIG=str(file)) == missing


def test_variables_have_their_own_prefix() -> None:
    """FOREWARN_PLATFORM is for the service on the same machine."""
    message = rejection("--config", "/dev/null", FOREWARN_HOSTD_PLATFORM="x", FOREWARN_PLATFORM="y")
    assert message == (
        "platform (from FOREWARN_HOSTD_PLATFORM): expected simulated, exec or libvirt, got 'x'"
    )


def test_flags_come_before_variables_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hostd.toml"
    file.write_text('host = "file"\nserver = "http://a,http://b"\ntoken_file = "t"\n')
    variables = {"FOREWARN_HOSTD_HOST": "variable", "FOREWARN_HOSTD_BRIDGE": "br0,br1"}

    def read(*flags: str) -> HostdConfig:
        flags = (*flags, "--config", str(file), "--metadata-server", "http://m")
        return read_hostd_config(flags, variables)

    assert (read().host, read("--host", "flag").host) == ("variable", "flag")
    assert read().server == ("http://a", "http://b")
    assert read().bridge == ("br0", "br1")
    assert read("--bridge", "br2", "--bridge", "br3").bridge == ("br2", "br3")


def test_unknown_flags_are_one_line() -> None:
    assert rejection("--hots", "a") == (
        "unrecognized arguments: --hots a; try 'forewarn hostd --help'"
    )


def test_help_names_every_option() -> None:
    shown = make_parser().format_help()
    for each in options(HostdConfig):
        assert f"{each.flag} " in shown


def test_the_page_has_the_current_options() -> None:
    """Update the page with: python -m tools.configuration_page docs/hostd.md"""
    assert PAGE.partition(BEGIN)[2].partition(END)[0].strip() == render_tables(HostdConfig).strip()
