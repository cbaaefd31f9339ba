"""The service and `forewarn fleet sync` with libvirt's own test driver, as real processes."""

import json
import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from forewarn.core.change import ChangeKind
from tests.builders import guid
from tests.e2e.cli_service import forewarn
from tests.e2e.history_file import changes_in
from tests.e2e.service import Service, running
from tests.e2e.waiting import eventually
from tests.unit.cli.test_api import serving
from tests.unit.platform.libvirt.libvirt_world import NODE, domain_xml

pytestmark = pytest.mark.system
FLEET = (
    "scopes: [{name: test, vms: [{name: test, host: host-a}]}, {name: lost, vms: [{name: lost,"
    " host: host-a}]}]\n"
)
NOWHERE = "qemu+unix:///system?socket=/nowhere/{host}"
WEB = "<f:vm xmlns:f='urn:forewarn:vm:1' scope='web' kind='availability-set' update-domain='{}'/>"


def uri_of(folder: Path, *domains: str) -> str:
    """A host with these domains, all running."""
    (folder / "node.xml").write_text(NODE.format("".join(domains)))
    return f"test://{folder}/node.xml"


def sync(service: Service, *arguments: str) -> str:
    result = forewarn("fleet", "sync", "libvirt", *arguments, FOREWARN_CONTROL=service.control)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_restart_reaches_the_domain_or_fails_if_unknown(
    tmp_path: Path,
) -> None:
    flags = (
        "--platform",
        "libvirt",
        "--libvirt-uri",
        "test:///default",
        "--libvirt-grace-seconds",
        "0",
    )
    with running(tmp_path, *flags, "--impact-retry-seconds-max", "1", fleet=FLEET) as service:
        assert service.ask("POST", "/vms/test/restart")[0] == 202
        assert service.ask("POST", "/vms/lost/restart")[0] == 202
        eventually(
            lambda: ChangeKind.COMPLETED in [change.what for change in changes_in(tmp_path, "test")]
        )
        eventually(
            lambda: ChangeKind.FAILED in [change.what for change in changes_in(tmp_path, "lost")]
        )

    done = [
        change.detail
        for change in changes_in(tmp_path, "test")
        if change.what is ChangeKind.IMPACTED
    ]
    assert done == ["the guest did not reboot within 0 seconds: reset"]
    failures = [
        change.detail
        for change in changes_in(tmp_path, "lost")
        if change.what is ChangeKind.IMPACT_FAILED
    ]
    assert failures == ["no domain lost on host-a"] * 2


def test_unreachable_libvirt_fails_the_impact_not_the_service(
    tmp_path: Path,
) -> None:
    with running(
        tmp_path, "--platform", "libvirt", "--libvirt-uri", NOWHERE, fleet=FLEET
    ) as service:
        assert service.ask("POST", "/vms/test/restart")[0] == 202
        eventually(
            lambda: (
                ChangeKind.IMPACT_FAILED in [change.what for change in changes_in(tmp_path, "test")]
            )
        )
        assert service.poll(vm="lost")["Events"] == []
        assert service.stop() == 0


def test_hanging_libvirtd_blocks_neither_polls_nor_shutdown(
    tmp_path: Path,
) -> None:
    """It takes the connection and never says a word."""
    with TemporaryDirectory(prefix="fw-") as short, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{short}/s")
        silent.listen()
        uri = f"qemu+unix:///system?socket={short}/s"
        flags = ("--platform", "libvirt", "--libvirt-uri", uri, "--libvirt-call-seconds-max", "1")
        with running(tmp_path, *flags, fleet=FLEET) as service:
            assert service.ask("POST", "/vms/test/restart")[0] == 202
            assert service.poll(vm="lost")["Events"] == []
            eventually(
                lambda: (
                    ChangeKind.IMPACT_FAILED
                    in [change.what for change in changes_in(tmp_path, "test")]
                )
            )
            assert service.stop() == 0

    result = [
        change.detail
        for change in changes_in(tmp_path, "test")
        if change.what is ChangeKind.IMPACT_FAILED
    ]
    assert result[0] == "libvirt of host-a did not answer within 1 seconds"


def test_sync_shows_changes_and_applies_them(tmp_path: Path) -> None:
    uri = uri_of(
        tmp_path,
        domain_xml("web-0", 1, WEB.format(0)),
        domain_xml("web-1", 2, WEB.format(1)),
        domain_xml("test", 3),
    )
    with running(tmp_path, "--store", "memory", fleet=FLEET) as service:
        result = sync(service, "--uri", f"host-a={uri}")
        assert result.splitlines() == [
            "added: web",
            "changed: test",
            "removed: lost",
            "vms joined: web-0, web-1",
            "vms left: lost",
            "hosts added: host-a",
            f'VM test: id "" -> {guid(3).lower()}, instance.mac "" -> 52:54:00:00:00:03',
            "dry run: nothing was changed",
        ]
        assert (
            sync(service, "--uri", f"host-a={uri}", "--apply").splitlines()
            == result.splitlines()[:-1]
        )
        assert sync(service, "--uri", f"host-a={uri}", "--apply") == "no changes\n"

        fleet = service.ask("GET", "/fleet")[1]
    assert [scope["name"] for scope in fleet["scopes"]] == ["test", "web"]
    (web,) = [scope for scope in fleet["scopes"] if scope["name"] == "web"]
    assert web["kind"] == "availability-set"
    assert [(vm["name"], vm["host"], vm.get("update_domain", 0)) for vm in web["vms"]] == [
        ("web-0", "host-a", 0),
        ("web-1", "host-a", 1),
    ]
    assert web["vms"][0]["instance"] == {"mac": "52:54:00:00:00:01"}
    assert fleet["hosts"] == ["host-a"]


def test_uri_pattern_queries_every_host_of_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "host-a.xml").write_text(NODE.format(domain_xml("test", 1)))
    with running(tmp_path, "--store", "memory", fleet=FLEET) as service:
        result = json.loads(sync(service, "--uri", f"test://{tmp_path}/{{host}}.xml", "--json"))

    assert result["vms_left"] == ["lost"]


def test_a_sync_with_a_libvirt_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "--store", "memory", fleet=FLEET) as service:
        result = forewarn(
            "fleet",
            "sync",
            "libvirt",
            "--uri",
            f"host-a={NOWHERE}",
            "--apply",
            FOREWARN_CONTROL=service.control,
        )

    assert result.returncode == 1
    assert result.stderr.startswith("forewarn: libvirt of host-a: Failed to connect socket")
    assert len(result.stderr.splitlines()) == 1


def test_a_sync_reads_the_fleet_again_when_it_changed_meanwhile() -> None:
    """Asking every host takes a while.

    A VM that is moved in that time must not be put back on paper.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append("GET")
            self.response(200, {"scopes": []}, tag=f'"{asked.count("GET")}"')

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(f"PUT {self.headers['If-Match']}")
            is_late = self.headers["If-Match"] == '"1"'
            refusal = {"error": "fleet_changed", "message": "the fleet has changed", "facts": {}}
            self.response(412, refusal) if is_late else self.response(
                200, {"vms_joined": ["test"], "dry_run": False}
            )

        def response(self, status: int, body: object, tag: str = "") -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as url:
        result = forewarn(
            "fleet",
            "sync",
            "libvirt",
            "--uri",
            "host-a=test:///default",
            "--apply",
            FOREWARN_CONTROL=url,
        )

    assert (result.returncode, result.stdout) == (0, "vms joined: test\n"), result.stderr
    assert asked == ["GET", 'PUT "1"', "GET", 'PUT "2"']
