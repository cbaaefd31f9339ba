"""The control listener as real processes see it: tokens, TLS whose files change, and what is
refused at the start.
"""

import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from forewarn.web.http.tls import Certificate
from tests.e2e.cli_service import (
    FLEET,
    Service,
    environment,
    forewarn,
    forewarn_process,
    running,
    soon,
)


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, for 127.0.0.1, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    of = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*make, *of, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return certificate, key


def call(
    url: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with build_opener(ProxyHandler({})).open(
            Request(url, body, named, method=method), timeout=30
        ) as response:
            return response.status, json.loads(response.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path


@pytest.fixture
def secure(folder: Path) -> Iterator[Service]:
    """A service that speaks TLS with the pair in live.pem and live.key, and logs to a pipe."""
    certificate, key = make_pair(folder, "live")
    files = ("--control-certificate-file", str(certificate), "--control-key-file", str(key))
    with running(folder, "serve", "--fleet", "fleet.yaml", "--store", "memory", *files) as made:
        yield made


def shown_certificate(service: Service) -> str:
    """What the listener shows at a new handshake."""
    host, _, port = service.control.removeprefix("https://").partition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=30)


@pytest.mark.system
def test_cli_verifies_tls_with_a_ca_file(secure: Service, folder: Path) -> None:
    """A private fleet has a private CA.

    Without it the certificate is refused, and the line says what to do.
    """
    good = forewarn(
        "vm",
        "list",
        cwd=folder,
        FOREWARN_CONTROL=secure.control,
        FOREWARN_CA=str(folder / "live.pem"),
    )
    stranger = forewarn("vm", "list", cwd=folder, FOREWARN_CONTROL=secure.control)
    nothing = forewarn(
        "vm", "list", cwd=folder, FOREWARN_CONTROL=secure.control, FOREWARN_CA="fleet.yaml"
    )

    assert secure.control.startswith("https://")
    assert (good.returncode, "web-0" in good.stdout) == (0, True), good.stderr
    assert stranger.returncode == 4
    assert re.fullmatch(
        r"forewarn: the certificate of https://\S+ is not trusted: .*; FOREWARN_CA .*\n",
        stranger.stderr,
    )
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("forewarn: ca_file: fleet.yaml has no readable certificates")


@pytest.mark.system
def test_old_versions_of_tls_and_plain_http_are_refused(secure: Service) -> None:
    """TLS 1.2 is the least; and nothing is answered in the clear."""
    host, _, port = secure.control.removeprefix("https://").partition(":")
    for version, is_good in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection((host, int(port)), 30) as plain,
            context.wrap_socket(plain) as connection,
        ):
            assert (connection.version() is not None) == is_good
    old = [
        "openssl",
        "s_client",
        "-connect",
        f"{host}:{port}",
        "-tls1_1",
        "-cipher",
        "DEFAULT:@SECLEVEL=0",
    ]
    assert (
        subprocess.run(old, input=b"", capture_output=True, check=False, timeout=30).returncode != 0
    )
    with socket.create_connection((host, int(port)), 30) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1" not in plain.recv(4096)


@pytest.mark.system
def test_errors_are_sent_over_tls(secure: Service, folder: Path) -> None:
    """A connection that is refused is half closed where that is possible;

    TLS cannot, and must not break over it.
    """
    host, _, port = secure.control.removeprefix("https://").partition(":")
    context = ssl.create_default_context(cafile=folder / "live.pem")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        scripted = connection.recv(65536)

    assert scripted.startswith(b"HTTP/1.1 400 ")


@pytest.mark.system
def test_new_certificate_is_loaded_and_a_broken_one_ignored(secure: Service, folder: Path) -> None:
    """Certificates live for weeks, the service for months.

    A half-written file must not lock the operators out.
    """
    old = shown_certificate(secure)
    (folder / "live.pem").write_text("half a certif")
    assert secure.process.stderr
    while "new certificate rejected" not in (
        line := secure.process.stderr.readline()
    ):  # ends with the process
        assert line, "the service has ended"
    assert "cannot be used" in line
    assert shown_certificate(secure) == old

    certificate, key = make_pair(folder, "next")
    (folder / "live.key").write_bytes(key.read_bytes())
    (folder / "live.pem").write_bytes(certificate.read_bytes())

    soon(lambda: shown_certificate(secure) != old)
    assert shown_certificate(secure).strip() == certificate.read_text().strip()
    listed = forewarn(
        "vm", "list", cwd=folder, FOREWARN_CONTROL=secure.control, FOREWARN_CA=str(certificate)
    )
    assert listed.returncode == 0, listed.stderr


@pytest.mark.system
def test_key_is_loaded_once_it_becomes_readable(folder: Path) -> None:
    """Whoever renews it writes the file first and gives it to the service's user afterwards."""
    certificate, key = make_pair(folder, "live")
    pair = Certificate(certificate, key)
    assert not pair.reload()

    def is_taken() -> bool:
        key.chmod(0o640)
        return pair.reload()

    soon(is_taken)


@pytest.mark.system
def test_idle_tls_connection_does_not_delay_the_stop(secure: Service, folder: Path) -> None:
    """It says no goodbye, and whoever restarts the service should not wait for one."""
    host, _, port = secure.control.removeprefix("https://").partition(":")
    context = ssl.create_default_context(cafile=folder / "live.pem")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        secure.process.terminate()
        assert secure.process.wait(timeout=7) == 0


def test_connection_limits_apply_to_the_control_listener(folder: Path) -> None:
    """An option that does nothing on one of two listeners would be a trap."""
    arguments = ("--store", "memory", "--connections-per-address-max", "1", "--idle-seconds", "1")
    with running(folder, "serve", "--fleet", "fleet.yaml", *arguments) as service:
        host, _, port = service.control.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), 30) as idle:
            status, result = call(f"{service.control}/healthz")

            assert (status, result["error"]) == (503, "too_many_connections")
            assert idle.recv(1) == b""  # its time is up
        soon(lambda: call(f"{service.control}/healthz")[0] == 200)


def test_misspelt_store_path_creates_no_file(folder: Path) -> None:
    """Only the first token may make one, and says so: otherwise the list would be empty, and the
    revoked token good.
    """
    for words in (("list",), ("revoke", "root")):
        refused = forewarn("token", *words, "--store", "sqlite:///slip.db", cwd=folder)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert (
            refused.stderr
            == "forewarn: --store: no such file: slip.db; expected the store of a service\n"
        )
        assert not (folder / "slip.db").exists()

    create = ("--role", "admin", "--store", "sqlite:///new.db")
    made, more = (forewarn("token", "create", name, *create, cwd=folder) for name in "ab")
    assert made.stderr.startswith("creating the store sqlite:///new.db\n")
    assert "creating the store" not in more.stderr


@pytest.mark.system
def test_invalid_certificate_fails_at_startup(folder: Path) -> None:
    """In one line, with the file."""
    certificate, key = make_pair(folder, "a")
    _, other = make_pair(folder, "b")
    locked = folder / "locked.key"
    lock = [
        "openssl",
        "pkey",
        "-in",
        str(key),
        "-aes256",
        "-passout",
        "pass:x",
        "-out",
        str(locked),
    ]
    subprocess.run(lock, check=True, capture_output=True)
    expected = {
        (certificate, folder / "none.key"): (
            2,
            "the key file .*none.key cannot be read: No such file or directory",
        ),
        (certificate, other): (
            2,
            ".* do not belong together; expected the two files of one pair",
        ),
        (certificate, locked): (
            2,
            ".* cannot be used: the key is encrypted; expected a key without a password",
        ),
        (folder / "fleet.yaml", key): (2, ".* cannot be used: .*; expected two PEM files"),
        (certificate, None): (
            2,
            "control_certificate_file needs control_key_file, which is not set; expected .*",
        ),
    }
    for (one, two), (code, message) in expected.items():
        flags = ["--control-certificate-file", str(one)] + (
            ["--control-key-file", str(two)] if two else []
        )
        refused = forewarn_process("serve", "--store", "memory", *flags, cwd=folder)
        assert (refused.returncode, refused.stdout) == (code, "")
        assert re.fullmatch(f"forewarn: {message}\n", refused.stderr), refused.stderr


def test_control_beyond_loopback_needs_a_token_to_start(folder: Path) -> None:
    """The line says what to type, and typing it is enough."""
    store = "sqlite:///fleet.db"
    arguments = ("serve", "--fleet", "fleet.yaml", "--store", store)
    refused = forewarn(
        *arguments, "--metadata", "127.0.0.1:0", "--control", "0.0.0.0:0", cwd=folder
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "forewarn: control is 0.0.0.0:0, but there are no tokens, so every client would be an"
        " admin; expected a loopback"
        f" address, or a token: forewarn token create NAME --role admin --store {store}\n"
    )

    made = forewarn("token", "create", "root", "--role", "admin", "--store", store, cwd=folder)
    assert made.returncode == 0, made.stderr
    with running(folder, *arguments, control="0.0.0.0:0") as service:
        url = service.control.replace("0.0.0.0", "127.0.0.1")
        assert call(f"{url}/api/v1/vms")[0] == 401
        assert call(f"{url}/healthz") == (200, {"status": "ok"})
        status, listed = call(f"{url}/api/v1/vms", Authorization=f"Bearer {made.stdout.strip()}")
        assert (status, listed["total"]) == (200, 2)


def test_a_memory_store_never_goes_beyond_loopback(folder: Path) -> None:
    """It has no tokens at the start, and would have no way to get one."""
    refused = forewarn_process(
        "serve",
        "--store",
        "memory",
        "--metadata",
        "127.0.0.1:0",
        "--control",
        "0.0.0.0:0",
        cwd=folder,
    )

    assert refused.returncode == 2
    assert refused.stderr.endswith(
        "or a persistent store with tokens, because a memory store has none\n"
    )


def test_token_commands_create_list_and_revoke(folder: Path) -> None:
    """Made on loopback without one, used, listed without secrets, revoked; and revoked on the store
    itself at once too.
    """
    store = "sqlite:///fleet.db"
    with running(folder, "serve", "--fleet", "fleet.yaml", "--store", store) as service:
        first = forewarn(
            "token",
            "create",
            "root",
            "--role",
            "admin",
            cwd=folder,
            FOREWARN_CONTROL=service.control,
        )
        root = {"FOREWARN_CONTROL": service.control, "FOREWARN_TOKEN": first.stdout.strip()}
        assert re.fullmatch(r"fw_root_[0-9a-f]{64}\n", first.stdout), first.stderr
        assert "printed once" in first.stderr

        bare = forewarn("vm", "list", cwd=folder, FOREWARN_CONTROL=service.control)
        assert (bare.returncode, "this request needs a token" in bare.stderr) == (1, True)
        second = forewarn(
            "token", "create", "ci", "--role", "viewer", "--expires", "30d", cwd=folder, **root
        )
        ci = root | {"FOREWARN_TOKEN": second.stdout.strip()}
        assert forewarn("vm", "list", cwd=folder, **ci).returncode == 0
        denied = forewarn("vm", "restart", "web-0", cwd=folder, **ci)
        assert (denied.returncode, denied.stderr) == (
            1,
            "forewarn: token ci has the role viewer; this needs the role operator\n",
        )
        listed = forewarn("token", "list", cwd=folder, **root).stdout
        assert re.search(r"\nci +viewer ", listed)
        assert second.stdout.strip().rpartition("_")[2] not in listed

        assert (
            forewarn("token", "revoke", "ci", "--store", store, cwd=folder).stdout
            == "ci is revoked\n"
        )
        soon(lambda: forewarn("vm", "list", cwd=folder, **ci).returncode == 1)
        assert forewarn("token", "revoke", "nobody", cwd=folder, **root).returncode == 3

        shown = forewarn("config", "--show", cwd=folder, **root).stdout
        assert re.search(r"\ntoken +\*\*\* ", shown)
        service.process.terminate()
        log = service.process.communicate(timeout=30)[1]
    for text in (first.stdout, second.stdout):
        assert text.strip().rpartition("_")[2] not in log + shown
    assert "token-created" in log


def test_metadata_listener_does_not_serve_the_control_api(folder: Path) -> None:
    """A VM reaches that listener; what it could do there it could do to the fleet."""
    callers = ("--identify", "path", "--identify", "address")
    with running(
        folder, "serve", "--fleet", "fleet.yaml", "--store", "memory", *callers
    ) as service:
        for path in (
            "/api/v1/vms",
            "/api/docs",
            "/api/openapi.json",
            "/as/web-0/api/v1/vms",
            "//api/v1/vms",
            "/metadata/../api/v1/vms",
        ):
            for method in ("GET", "POST", "PUT"):
                status, _ = call(
                    f"{service.metadata}{path}",
                    method,
                    b"{}",
                    Metadata="true",
                    Host="127.0.0.1:8081",
                )
                assert status in (404, 405), f"{method} {path}: {status}"


@pytest.mark.system
def test_a_bad_token_is_answered_late(folder: Path) -> None:
    """A second each, from a real process; environment and command line hold no token."""
    with running(folder, "serve", "--fleet", "fleet.yaml", "--store", "memory") as service:
        made = forewarn(
            "token",
            "create",
            "root",
            "--role",
            "admin",
            cwd=folder,
            FOREWARN_CONTROL=service.control,
        )
        assert made.returncode == 0
        timed = [
            "curl",
            "-s",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code} %{time_total}",
            f"{service.control}/api/v1/vms",
        ]
        bad = subprocess.run(
            [*timed, "-H", "Authorization: Bearer fw_root_guess"],
            env=environment(),
            capture_output=True,
            check=True,
            timeout=30,
        )
        status, seconds = bad.stdout.split()
        assert status == b"401"
        assert float(seconds) >= 1.0
