"""Reaching etcd: TLS, users, wrong options. Each problem is one line, and nothing is written."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

from forewarn.errors import Error, Invalid, StoreDenied, StoreLost, StoreUnusable
from forewarn.store.base import Write
from forewarn.store.etcd_options import EtcdOptions
from forewarn.store.open import open_store
from tests.e2e.cli_service import forewarn
from tests.e2e.service import steady_port
from tests.etcd_cluster import EtcdCluster, shared_etcd

pytestmark = pytest.mark.system
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def make_authority(folder: Path, name: str = "ca") -> Path:
    files = ("-keyout", f"{folder / name}.key", "-out", f"{folder / name}.crt")
    openssl("req", "-x509", *KEY, "-subj", f"/CN={name}", *files, "-days", "2")
    return folder / f"{name}.crt"


def make_certificate(
    folder: Path, name: str, *, address: str = "IP:127.0.0.1", expired: bool = False
) -> None:
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    openssl(
        "req", *KEY, "-subj", f"/CN={name}", "-keyout", f"{folder / name}.key", "-out", str(request)
    )
    extensions.write_text(f"subjectAltName={address}\nextendedKeyUsage=serverAuth,clientAuth\n")
    authority = ("-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key", "-CAcreateserial")
    certificate = ("-extfile", str(extensions), "-out", f"{folder / name}.crt")
    command = ["openssl", "x509", "-req", "-in", str(request), *authority, *certificate]
    command += ["-days", "1"]
    if expired:  # OpenSSL 3.0 has no option for a date in the past
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
        environment = os.environ | {"LD_PRELOAD": str(library), "FAKETIME": "-3d"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    else:
        subprocess.run(command, check=True, capture_output=True)


@contextmanager
def running(cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def etcd_with_tls(folder: Path, certificate: str = "server") -> Iterator[EtcdCluster]:
    """An etcd that verifies its clients."""
    flags = (
        f"--cert-file={folder / certificate}.crt",
        f"--key-file={folder / certificate}.key",
        f"--trusted-ca-file={folder}/ca.crt",
        "--client-cert-auth",
    )
    with running(EtcdCluster(folder, flags=flags, scheme="https")) as cluster:
        yield cluster


async def use(url: str, options: EtcdOptions) -> bytes | None:
    """What a store returns that is opened, written and read."""
    store = await open_store(url, etcd=options)
    try:
        await store.commit([Write("a", b"kept", (await store.get("a")).revision and 0)])
        return (await store.get("a")).value
    finally:
        await store.close()


def refusal(url: str, kind: type[Error], options: EtcdOptions = EtcdOptions()) -> str:  # noqa: B008
    """The message with which the store is refused: one line."""
    with pytest.raises(kind) as refused:
        asyncio.run(use(url, options))
    message = refused.value.message
    assert "\n" not in message
    assert len(message) < 200
    return message


def test_mutual_tls_works_with_a_ca_and_a_certificate(tmp_path: Path) -> None:
    """The state of a fleet must not cross a network in the clear."""
    ca = make_authority(tmp_path)
    make_certificate(tmp_path, "server")
    make_certificate(tmp_path, "client")
    options = EtcdOptions(
        ca_file=ca,
        certificate_file=tmp_path / "client.crt",
        key_file=tmp_path / "client.key",
    )
    with etcd_with_tls(tmp_path) as cluster:
        assert asyncio.run(use(cluster.url(), options)) == b"kept"

        other = make_authority(tmp_path, "other")
        wrong_ca = EtcdOptions(ca_file=other)
        assert "not from --etcd-ca-file" in refusal(cluster.url(), StoreLost, wrong_ca)
        assert "127.0.0.1" in refusal(cluster.url(), StoreLost, EtcdOptions(ca_file=ca))
        assert "127.0.0.1" in refusal(cluster.url(), StoreLost)


@pytest.mark.parametrize(
    ("certificate", "message"),
    [
        ({"expired": True}, "its certificate has expired"),
        ({"address": "DNS:etcd-7.example"}, "its certificate is for another host name"),
    ],
    ids=["expired", "other host"],
)
def test_a_wrong_certificate_of_etcd_is_named(
    tmp_path: Path, certificate: dict[str, Any], message: str
) -> None:
    """The operator must know which file to renew."""
    ca = make_authority(tmp_path)
    make_certificate(tmp_path, "server", **certificate)
    cluster = EtcdCluster(
        tmp_path,
        flags=(f"--cert-file={tmp_path}/server.crt", f"--key-file={tmp_path}/server.key"),
        scheme="https",
    )
    with running(cluster):
        assert message in refusal(cluster.url(), StoreLost, EtcdOptions(ca_file=ca))


def test_tls_to_an_etcd_without_tls_is_named(tmp_path: Path) -> None:
    """A forgotten flag on one side is the most common mistake."""
    options = EtcdOptions(ca_file=make_authority(tmp_path))

    message = refusal(shared_etcd().url(uuid4().hex), StoreLost, options)

    assert "no TLS there" in message


@pytest.mark.parametrize("content", ["", "not a certificate"])
def test_a_ca_file_that_is_no_pem_is_refused(tmp_path: Path, content: str) -> None:
    """gRPC would fail with a time-out instead."""
    (tmp_path / "ca.crt").write_text(content)
    options = EtcdOptions(ca_file=tmp_path / "ca.crt")

    assert "expected PEM files" in refusal("etcd://127.0.0.1:1/p", Invalid, options)
    missing = EtcdOptions(ca_file=tmp_path / "missing")
    assert "cannot read" in refusal("etcd://127.0.0.1:1/p", Invalid, missing)


def etcdctl(cluster: EtcdCluster, *words: str) -> str:
    endpoints = f"--endpoints={cluster.members[0].client}"
    command = ["etcdctl", endpoints, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_user_with_a_role_for_the_prefix_is_sufficient(tmp_path: Path) -> None:
    """The service needs no rights beyond its prefix; a token that has ended is renewed."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    root = ("--user=root:root",)
    options = EtcdOptions(user="forewarn", password_file=password)
    with running(EtcdCluster(tmp_path, flags=("--auth-token-ttl=1",))) as cluster:
        url = cluster.url("fleet-1")
        assert "it has no users; expected no --etcd-user" in refusal(url, StoreUnusable, options)
        etcdctl(cluster, "user", "add", "root:root")
        etcdctl(cluster, "user", "grant-role", "root", "root")
        etcdctl(cluster, "user", "add", "forewarn:secret")
        etcdctl(cluster, "role", "add", "forewarn")
        etcdctl(
            cluster, "role", "grant-permission", "forewarn", "--prefix", "readwrite", "fleet-1/"
        )
        etcdctl(cluster, "user", "grant-role", "forewarn", "forewarn")
        etcdctl(cluster, "auth", "enable")

        async def work() -> None:
            store = await open_store(url, etcd=options)
            watch = store.watch((await store.load()).revision)
            revision = await store.commit([Write("a", b"1", 0)], entries=b"one")
            assert (await anext(watch)).revision == revision
            etcdctl(cluster, *root, "user", "add", "another:one")  # every token ends
            revision = await store.commit([Write("a", b"2", revision)])
            assert (await anext(watch)).revision == revision
            assert await store.lease("l", 10) is not None
            await store.close()

        asyncio.run(work())
        assert "it needs --etcd-user" in refusal(url, StoreDenied)
        elsewhere = cluster.url("fleet-2")
        assert "needs a role with readwrite" in refusal(elsewhere, StoreDenied, options)
        password.write_text("wrong")
        assert "wrong --etcd-user or --etcd-password-file" in refusal(url, StoreDenied, options)


def test_a_prefix_that_something_else_uses_is_refused_and_not_touched() -> None:
    """A mistyped prefix must not mix two programs' data."""
    cluster, prefix = shared_etcd(), uuid4().hex
    etcdctl(cluster, "put", f"{prefix}/config", "theirs")

    message = refusal(cluster.url(prefix), StoreUnusable)

    assert f"used by something else, which has the key b'{prefix}/config'" in message
    found = subprocess.run(
        ["etcdctl", f"--endpoints={cluster.members[0].client}", "get", "--prefix", prefix],
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == [f"{prefix}/config", "theirs"]


def test_a_check_of_a_mistyped_prefix_creates_nothing() -> None:
    """A check changes nothing, and a copy does not begin with an empty source."""
    cluster, prefix = shared_etcd(), uuid4().hex
    for command in (("check",), ("copy",)):
        target = (f"sqlite:///{prefix}.db",) if command == ("copy",) else ()
        refused = forewarn("store", *command, cluster.url(prefix), *target)
        assert refused.returncode == 4
        assert f"etcd has no store {prefix}; expected the prefix of a service" in refused.stderr
        assert not Path(f"{prefix}.db").exists()

    async def main() -> None:
        with pytest.raises(StoreUnusable):
            await open_store(cluster.url(prefix), may_create=False)

    asyncio.run(main())


@pytest.mark.parametrize("content", [None, "scopes: 7"])
def test_service_with_a_wrong_fleet_file_leaves_no_key_in_etcd(
    tmp_path: Path, content: str | None
) -> None:
    """The next try may name another prefix, and this one would look like a store in use."""
    cluster, prefix = shared_etcd(), uuid4().hex
    file = tmp_path / "fleet.yaml"
    if content is not None:
        file.write_text(content)
    command = ("serve", "--store", cluster.url(prefix), "--fleet", str(file))
    refused = forewarn(*command, "--metadata", "127.0.0.1:0", "--control", "127.0.0.1:0")

    assert refused.returncode != 0
    assert str(file) in refused.stderr
    assert etcdctl(cluster, "get", "--prefix", prefix) == ""


def test_a_layout_of_a_newer_version_is_refused() -> None:
    """An older server must not write what a newer one cannot read."""
    cluster, prefix = shared_etcd(), uuid4().hex
    etcdctl(cluster, "put", f"{prefix}/forewarn", "2")

    assert "from a newer Forewarn" in refusal(cluster.url(prefix), StoreUnusable)


def test_endpoints_that_cannot_be_reached_are_named() -> None:
    """The first endpoint that is asked is in the message, with the reason."""
    port = steady_port()

    assert refusal(f"etcd://127.0.0.1:{port}/p", StoreLost) == (
        f"etcd at 127.0.0.1:{port}: Connection refused"
    )


def test_an_endpoint_that_is_not_etcd_is_refused() -> None:
    """Such as another port of the same machine."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert refusal(f"etcd://127.0.0.1:{server.server_address[1]}/p", StoreLost)
        server.shutdown()


def test_an_etcd_before_3_4_is_refused() -> None:
    """It lacks what watches need. No such etcd is at hand, so only its version is imitated."""

    class Old(rpc_pb2_grpc.MaintenanceServicer):  # type: ignore[misc]
        async def Status(self, request: Any, context: Any) -> Any:
            return rpc.StatusResponse(version="3.3.27")

    async def main() -> None:
        server = grpc.aio.server()
        rpc_pb2_grpc.add_MaintenanceServicer_to_server(Old(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(StoreUnusable, match=r"is etcd 3\.3\.27; expected 3\.4 or later"):
            await open_store(f"etcd://127.0.0.1:{port}/p")
        await server.stop(0)

    asyncio.run(main())


def test_endpoints_of_two_clusters_are_refused(tmp_path: Path) -> None:
    """A mistyped endpoint must not split a fleet."""
    with running(EtcdCluster(tmp_path)) as other:
        mixed = f"etcd://{other.members[0].client},{shared_etcd().members[0].client}/{uuid4().hex}"

        async def main() -> None:
            store = await open_store(mixed)
            other.stop()
            with pytest.raises(StoreUnusable, match="is of another cluster"):
                await store.get("a")
            await store.close()

        asyncio.run(main())


def test_a_full_etcd_refuses_writes_and_still_answers_reads(tmp_path: Path) -> None:
    """Polls continue, and the log says what the operator must do."""
    with running(EtcdCluster(tmp_path, flags=("--quota-backend-bytes=200000",))) as cluster:

        async def main() -> None:
            store = await open_store(cluster.url())

            async def fill() -> None:
                for number in range(100):
                    await store.commit([Write(f"k{number}", b"x" * 50_000, 0)])

            with pytest.raises(StoreUnusable, match="its quota is used up, nothing was written"):
                await fill()
            records = (await store.load()).records
            assert 0 < len(records) < 100
            assert (await store.get("k0")).value == b"x" * 50_000
            await store.close()

        asyncio.run(main())


def test_a_record_that_etcd_finds_too_large_is_refused(tmp_path: Path) -> None:
    """An etcd may be configured to accept less than the default."""
    with running(EtcdCluster(tmp_path, flags=("--max-request-bytes=100000",))) as cluster:

        async def main() -> None:
            store = await open_store(cluster.url())
            with pytest.raises(StoreUnusable, match="too large for --max-request-bytes"):
                await store.commit([Write("a", b"x" * 200_000, 0)])
            assert (await store.get("a")).value is None
            await store.close()

        asyncio.run(main())


def test_serve_reports_an_unreachable_etcd_in_one_line_and_exits() -> None:
    """systemd restarts it; the operator sees why in the journal."""
    url = f"etcd://127.0.0.1:{steady_port()}/p"
    command = [sys.executable, "-m", "forewarn", "serve", "--store", url]

    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert ended.returncode not in (0, 2)
    assert ended.stdout == ""
    assert ended.stderr.strip().splitlines() == [
        f"forewarn: etcd at {url[7:-2]}: Connection refused"
    ]
